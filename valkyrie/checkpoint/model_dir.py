"""The directory of a run: its absolute path, a write test, and the lock of its trainer."""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import tempfile
import uuid

from valkyrie.checkpoint.disk_files import sync_directory
from valkyrie.checkpoint.holder import LeaseTaken
from valkyrie.checkpoint.lease import Lease
from valkyrie.errors import StorageError, Unreachable, storage_errors

_LOCK = 'trainer.lock'


def local_path(path: str | os.PathLike) -> pathlib.Path:
  """The absolute path of --model_dir."""
  return pathlib.Path(os.path.abspath(os.path.expanduser(path)))


def writable_directory(path: str | os.PathLike) -> pathlib.Path:
  """Makes a directory, writes a temporary file in it, and returns its absolute path.

  Raises:
    StorageError: the directory cannot be made or written.
  """
  directory = local_path(path)
  with storage_errors(
    f'--model_dir={os.fspath(path)} is not a directory that can be written ({directory})',
    'Nothing was changed. Name another --model_dir, or make room there.',
  ):
    try:
      directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
      raise OSError('there is a file of that name, or above it') from error
    with tempfile.TemporaryFile(dir=directory) as trial:
      trial.write(bytes(4096))
      trial.flush()
      os.fsync(trial.fileno())
    sync_directory(directory)  # which some file systems refuse
  return directory


def lock_holder(directory: pathlib.Path) -> str:
  """Names the present or last holder of the lock of a directory; '' if it was never locked."""
  return _content(directory / _LOCK)


def _content(path: pathlib.Path) -> str:
  try:
    return path.read_text()
  except OSError:
    return ''


class TrainerLock:
  """The lock of a directory that one trainer writes; the kernel frees it when its holder dies.

  Its file, `trainer.lock`, stays and names the last holder. Of several processes of a run each
  locks a file of its own before they join, such as `trainer-1.lock`, so that no number is given
  twice. Hosts that share the directory over a network see each other's locks if the file system
  supports them. Where it has no locks, the holder keeps a `Lease` beside it. FUSE mounts of buckets
  claim to lock, and do so on each host alone.

  Raises:
    StorageError: another process holds it, and the message names that process; or its files cannot
      be written.
    Unreachable: another process holds that of the number.
  """

  def __init__(self, directory: pathlib.Path, process: int | None = None):
    """Takes the lock of the run, or that of the number of a process."""
    self._path = path = directory / (_LOCK if process is None else f'trainer-{process}.lock')
    self._lease: Lease | None = None
    with contextlib.ExitStack() as stack:
      stack.enter_context(storage_errors(f'{path} cannot be locked'))
      self._file = stack.enter_context(open(path, 'a+'))
      try:
        if not self._is_locked():
          self._lease = Lease(path.with_suffix('.lease'))
      except (BlockingIOError, LeaseTaken) as error:
        is_lease = isinstance(error, LeaseTaken)
        holder = str(error) if is_lease else _content(path).partition(',')[0] or 'another process'
        if process is not None:
          raise Unreachable(
            f'{holder} is process {process} of the run in {directory} already. Give each process '
            'its own --process. To replace it, run the same command again after its end.'
          ) from error
        raise StorageError(
          f'{holder} is training in {directory}, and two trainers would overwrite each other. Wait '
          'for it or stop it, or name another --model_dir.'
        ) from error
      self._file.truncate(0)
      # Containers repeat PIDs and host names: the number tells this holder from those before.
      words = f'process {os.getpid()} on {socket.gethostname()}'
      self._file.write(f'{words}, {uuid.uuid4().hex}\n')
      self._file.flush()
      os.fsync(self._file.fileno())  # other hosts that share the directory can read it now
      stack.pop_all()  # the file is held until `release`

  def _is_locked(self) -> bool:
    """Locks the file; False on a file system without locks."""
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        return False
      raise
    return True

  @property
  def is_in_place(self) -> bool:
    """Whether the file at the path is the one that is held, and the lease too."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      same = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
      return same and (self._lease is None or self._lease.is_mine)
    return False

  def check(self) -> None:
    """Raises StorageError if the directory at the path is no longer that of this trainer."""
    with storage_errors(f'{self._path} cannot be read'):
      if not self.is_in_place:
        raise StorageError(
          f'{self._path} is not the file that this run has locked: its directory was moved, or the '
          'file deleted, while the run trained, or its lease went to another one. Nothing was '
          'written there. To go on, give the directory of this run as --model_dir.'
        )

  def release(self) -> None:
    """Frees the lock."""
    if self._lease is not None:
      self._lease.release()
    self._file.close()
