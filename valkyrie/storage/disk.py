"""Places on a file system: absolute paths, a write test, flushes, and the lock of a trainer."""

from collections.abc import Mapping
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import tempfile
from typing import Any
import uuid

from valkyrie.errors import StorageError, storage_errors
from valkyrie.storage.lease import Changed, Lease, LeaseTaken, lock_name, taking


def local_path(path: str | os.PathLike) -> pathlib.Path:
  """The absolute path of --model_dir."""
  return pathlib.Path(os.path.abspath(os.path.expanduser(path)))


def writable_directory(path: str | os.PathLike) -> pathlib.Path:
  """Creates a directory, writes a temporary file in it, and returns its absolute path.

  Raises:
    StorageError: the directory cannot be created or written.
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


def sync(path: pathlib.Path) -> None:
  """Flushes a file to disk, whoever has written it."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())


def write_synced(path: pathlib.Path, content: bytes) -> None:
  """Writes a file and flushes it to disk."""
  with open(path, 'wb') as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
  """Flushes the list of a directory's files to disk."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def lock_holder(directory: pathlib.Path) -> str:
  """Names the present or last holder of the lock of a directory; '' if it was never locked."""
  return _text(directory / lock_name(None))


def _text(path: pathlib.Path) -> str:
  with contextlib.suppress(OSError):
    return path.read_text()
  return ''


class DiskLock:
  """The lock of a directory that one trainer writes; the kernel frees it when its holder dies.

  Its file, `trainer.lock`, stays and names the last holder. Each process of a run also locks a file
  such as `trainer-1.lock` before it joins the others, so that no number is given twice. Hosts that
  share the directory over a network see each other's locks if the file system supports them. Where
  it has no locks, the holder keeps a lease beside the file. FUSE mounts of buckets accept locks but
  enforce them only within one host.
  """

  def __init__(self, directory: pathlib.Path, process: int | None = None):
    """Takes the lock of the run, or of the number of a process.

    Raises:
      StorageError: another process holds it, and the message names that process; or its files
        cannot be written.
      Unreachable: another process holds the lock of the number.
    """
    self._path = directory / lock_name(process)
    self._lease: _FileLease | None = None
    with contextlib.ExitStack() as stack:
      stack.enter_context(taking(str(self._path), directory, process))
      self._file = stack.enter_context(open(self._path, 'a+'))
      if not self._is_locked():
        self._lease = _FileLease(self._path.with_suffix('.lease'))
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
    except BlockingIOError as error:
      raise LeaseTaken(_text(self._path).partition(',')[0] or 'another process') from error
    except OSError as error:
      if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        raise
      return False
    return True

  @property
  def is_in_place(self) -> bool:
    """Whether the file at the path is the one that is held, and the lease too."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      same = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
      return same and (self._lease is None or self._lease.is_in_place)
    return False

  def check(self) -> None:
    """Raises StorageError if the directory at the path no longer belongs to this trainer."""
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


class _FileLease(Lease):
  """The lease of a lock on a file system without locks, as Lustre and NFS may be.

  The version of the content is its bytes; None is no file. Unlike for an object, comparing and
  replacing the content are two operations.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    super().__init__(str(path))

  def _read(self) -> tuple[dict[str, Any], bytes | None]:
    try:
      content = self._path.read_bytes()
    except FileNotFoundError:
      return {}, None
    try:
      found = json.loads(content)
    except ValueError:  # a machine has lost its power
      found = None
    return found if isinstance(found, dict) else {}, content

  def _write(self, content: Mapping[str, Any], version: bytes | None) -> bytes:
    found, present = self._read()
    if present != version:
      raise Changed(errno.EAGAIN, 'another process has written it', str(self._path))
    text = json.dumps(content).encode()
    new = self._path.with_name(f'{self._path.name}.{content["token"]}')
    write_synced(new, text)
    try:
      if found.get('token') == content['token']:
        new.replace(self._path)  # a renewal, without a moment in which the lease is free
      else:
        if present is not None:
          self._remove(present)
        os.link(new, self._path)
    except FileExistsError as error:
      raise Changed(errno.EEXIST, 'another process has made it', str(self._path)) from error
    finally:
      new.unlink(missing_ok=True)
    return text

  def _remove(self, version: bytes) -> None:
    """Removes an expired lease. If several processes try at once, exactly one succeeds."""
    taken = self._path.with_name(f'{self._path.name}.{uuid.uuid4().hex}')
    with contextlib.suppress(FileNotFoundError):
      self._path.rename(taken)
      if taken.read_bytes() != version:  # another process has taken it over meanwhile
        with contextlib.suppress(FileExistsError):
          os.link(taken, self._path)
      taken.unlink()

  def _end(self) -> None:
    if self.is_in_place:
      self._path.unlink()
