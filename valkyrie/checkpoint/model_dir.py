"""The directory of a run: absolute, writable, and of one trainer at a time."""

import fcntl
import os
import pathlib
import socket
import tempfile

from valkyrie.errors import StorageError

_LOCK = 'trainer.lock'


def local_path(path: str | os.PathLike) -> pathlib.Path:
  """The absolute path of --model_dir.

  Raises:
    StorageError: it is the address of a bucket.
  """
  if '://' in os.fspath(path):
    raise StorageError(
      f'--model_dir={os.fspath(path)} is the address of a bucket, and a run needs a directory: '
      'mount the bucket (for instance with gcsfuse) and give the path where it is mounted.'
    )
  return pathlib.Path(os.path.abspath(os.path.expanduser(path)))


def writable_directory(path: str | os.PathLike) -> pathlib.Path:
  """Makes a directory and writes in it once; returns its absolute path.

  Raises:
    StorageError: saying what stands in the way.
  """
  directory = local_path(path)
  try:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as trial:
      trial.write(bytes(4096))
      trial.flush()
      os.fsync(trial.fileno())
  except OSError as error:
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
      reason = 'there is a file of that name, or above it'
    raise StorageError(
      f'--model_dir={os.fspath(path)} must be a directory that can be written, but {directory} '
      f'cannot: {reason}. Nothing was changed. Name another --model_dir, or make room there.'
    ) from error
  return directory


def lease_holder(directory: pathlib.Path) -> str:
  """Who holds the lease of a directory, or held it last; '' where nobody ever did."""
  try:
    return (directory / _LOCK).read_text()
  except OSError:
    return ''


class Lease:
  """The right to write in a directory; the kernel takes it back when its holder dies.

  Its file, `trainer.lock`, stays and says who held it last. Hosts that share the directory over a
  network see each other's leases only where the file system carries locks (NFS does, FUSE mounts
  of buckets do not).
  """

  def __init__(self, directory: pathlib.Path):
    """Takes the lease.

    Raises:
      StorageError: another process holds it; it is named.
    """
    path = directory / _LOCK
    try:
      self._file = open(path, 'a+')  # noqa: SIM115, held until `release`
    except OSError as error:
      raise StorageError(f'{path} cannot be opened: {error.strerror}') from error
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      self._file.seek(0)
      holder = self._file.read().strip() or 'another process'
      self._file.close()
      raise StorageError(
        f'{directory} is being trained in by {holder}, and two trainers would overwrite each '
        'other. Wait for it or stop it, or name another --model_dir.'
      ) from error
    self._file.truncate(0)
    self._file.write(f'process {os.getpid()} on {socket.gethostname()}\n')
    self._file.flush()
    os.fsync(self._file.fileno())  # where the directory is shared, the others see it from now on

  def release(self) -> None:
    """Gives the directory free."""
    self._file.close()
