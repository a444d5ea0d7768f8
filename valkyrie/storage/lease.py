"""Locks of a run: of the kernel, or a lease, which holds as long as its JSON content is renewed.

    {"token": "0b9c...", "process": 31, "host": "a", "beat": 12}

`holder` tells at once whether a holder on the same machine has ended. Without an answer, a process
waits until the holder has missed its beats.
"""

import abc
from collections.abc import Mapping
import contextlib
import errno
import json
import os
import pathlib
import socket
import threading
import time
from typing import Any, BinaryIO
import uuid
import weakref

from valkyrie import foreign
from valkyrie.errors import StorageError, Unreachable, ValkyrieError, write_errors
from valkyrie.storage import appended, held_folder, holder, locks, owned, whole_file

BEAT_SECONDS = 10.0
MISSED = 3  # beats, after which a lease is free
READER_SECONDS = 5.0  # for which a program may hold a shared lock while a trainer starts


class Changed(OSError):
  """Another process has written an object or a file since it was read."""


class Lease(abc.ABC):
  """A lease that this process holds; a thread renews it until `release`.

  Each write depends on the content before it. A process that was paused for longer than its lease,
  and has lost it, therefore changes nothing.
  """

  def __init__(self, place: Any, run: Any, process: int | None):
    """Takes the lease at a place, which messages name; for the rest, and errors, see `DiskLock`."""
    self._place = place
    self._run = run
    self._process = process
    token = uuid.uuid4().hex
    self._let_go = weakref.finalize(self, holder.marked(token).close)  # also if no lease is taken
    self._writing = threading.Lock()
    with write_errors(f'{place} cannot be locked', 'name another --model_dir'):
      self.content, self._version = self._taken(token)  # what this process wrote last
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._renew, name='lease', daemon=True)
    self._thread.start()

  @abc.abstractmethod
  def _read(self) -> tuple[dict[str, Any], Any]:
    """The content, {} if there is none, and its version."""

  @abc.abstractmethod
  def _write(self, content: Mapping[str, Any], version: Any) -> Any:
    """Writes the content, and returns its version; raises Changed if `version` is not there."""

  @property
  def is_in_place(self) -> bool:
    """Whether this process still holds the lease."""
    content, *_ = self._read()
    return content.get('token') == self.content['token']

  def check(self) -> None:
    """Raises StorageError if this process no longer holds the lease, OSError if nobody can tell."""
    if not self.is_in_place:
      self._raise_lost()

  def update(self, **fields: Any) -> None:
    """Changes fields of the content, all at once; a StorageError if the lease is no longer held."""
    with self._writing:
      new = {**self.content, **fields}
      while True:
        try:
          self._version = self._write(new, self._version)
          break
        except Changed:
          found, version = self._read()
          if found.get('token') != self.content['token']:
            self._raise_lost()
          self._version = version  # of an earlier write of this process whose answer got lost
      self.content = new

  def release(self) -> None:
    """Frees the lease; a bucket keeps the other fields."""
    self._over.set()
    self._thread.join()
    with contextlib.suppress(OSError, StorageError):
      self.update(ended=True)
    self._let_go()

  def _taken(self, token: str) -> tuple[dict[str, Any], Any]:
    host = socket.gethostname()
    this = {'token': token, 'process': os.getpid(), 'host': host, 'beat': 0}
    while True:
      found, version = self._read()
      if _is_held(found):
        self._wait_for_end(found)
      mine = {**found, **this, 'ended': False}
      with contextlib.suppress(Changed):  # by another process, or by the holder as it ended
        return mine, self._write(mine, version)

  def _wait_for_end(self, found: Mapping[str, Any]) -> None:
    """Returns when the holder has ended or released the lease; raises if it holds it."""
    ended = holder.has_ended(found['token'])
    if ended:
      holder.remove(found['token'])
    elif ended is not None:
      raise self._refusal(found)
    else:
      # Pauses are counted, not seconds: a clock goes on while the virtual machine is paused.
      for _ in range(4 * MISSED):
        time.sleep(BEAT_SECONDS / 4)
        now, _version = self._read()
        if not _is_held(now):
          return
        if now != found:
          raise self._refusal(now)

  def _refusal(self, found: Mapping[str, Any]) -> ValkyrieError:
    process = f'process {found.get("process")} on {found.get("host")}'
    return _refusal(process, self._run, self._process)

  def _renew(self) -> None:
    while not self._over.wait(BEAT_SECONDS):
      with contextlib.suppress(OSError, StorageError):  # the next beat or `check` will see it
        self.update(beat=self.content['beat'] + 1)

  def _raise_lost(self) -> None:
    raise StorageError(
      f'{self._place} no longer belongs to this run: another trainer has taken it over, for '
      'instance while this one was paused or did not reach the bucket, or somebody has deleted it. '
      'No step was added. To go on, run the same command again after the end of the other one.'
    )


def lock_name(process: int | None) -> str:
  """The name of the lock of a run, or of the number of one of its processes."""
  if process is None:
    return 'trainer.lock'
  return f'trainer-{process}.lock'


def _refusal(holding: str, run: Any, process: int | None) -> ValkyrieError:
  """The error of a process whose lock another one holds."""
  if process is not None:
    return Unreachable(
      f'{holding} is process {process} of the run in {run} already. Give each process its own '
      '--process. To replace it, run the same command again after its end.'
    )
  return StorageError(
    f'{holding} is training in {run}, and two trainers would overwrite each other. Wait for it or '
    'stop it, or name another --model_dir.'
  )


def _is_shared(file: BinaryIO) -> bool:
  """Whether the locks of a file are shared ones, which no trainer takes."""
  is_shared = locks.attempt(file, shared=True) is True
  if is_shared:
    locks.free(file)
  return is_shared


def _reader_of(file: BinaryIO) -> str:
  """Names a process with a shared lock of a file, as far as the kernel tells."""
  status = os.fstat(file.fileno())
  inode = str(status.st_ino)
  with contextlib.suppress(OSError, ValueError):
    locks_of_machine = pathlib.Path('/proc/locks').read_text()
    for line in locks_of_machine.splitlines():
      _, kind, _, access, process, place, *_ = line.split()
      _, _, inode_of_lock = place.rpartition(':')
      is_shared_lock = (kind, access) == ('FLOCK', 'READ')
      if is_shared_lock and inode_of_lock == inode:
        program = pathlib.Path('/proc', process, 'comm').read_text().strip()
        return f'process {process} ({program!r:.40})'
  return 'another program'


def lock_holder(directory: pathlib.Path, process: int | None = None) -> str:
  """Names the present or last holder of a lock of a directory; '' if it was never locked."""
  with contextlib.suppress(OSError, ValueError):
    content = foreign.content(directory / lock_name(process))
    return content.decode(errors='replace')
  return ''


class DiskLock:
  """The lock of a directory that one trainer writes; the kernel frees it when its holder dies.

  Its file, `trainer.lock`, stays and names the last holder. Each process of a run also locks a file
  such as `trainer-1.lock` before it joins the others, so that no number is given twice. Where the
  file system has no locks, the holder keeps a lease beside the file. FUSE mounts of buckets accept
  locks but enforce them only within one host.
  """

  def __init__(self, directory: pathlib.Path, process: int | None = None):
    """Takes the lock of the run, or of the number of a process.

    Raises:
      StorageError: the named process trains there, or the files cannot be written.
      Unreachable: another process has the number.
    """
    self._path = directory / lock_name(process)
    self._directory = directory
    self._process = process
    self._lease: _FileLease | None = None
    failure = write_errors(f'{self._path} cannot be locked', 'name another --model_dir')
    with failure, contextlib.ExitStack() as stack:
      self._folder = held_folder.HeldFolder(directory, self._check_lease)
      stack.callback(self._folder.release)
      self._file = appended.open_file(self._path)
      stack.callback(self._close)
      self._wait_for_readers()
      if os.fstat(self._file.fileno()).st_nlink > 1:
        self._replace_by_own()
      # Containers repeat PIDs and host names: the number tells this holder from those before.
      words = f'process {os.getpid()} on {socket.gethostname()}'
      text = f'{words}, {uuid.uuid4().hex}\n'
      owned.rewrite(self._file, text.encode())
      stack.pop_all()  # the file is held until `release`

  def _wait_for_readers(self) -> None:
    """Locks the file, or takes a lease where there are no locks; raises if another one holds it.

    A program that only reads, such as one for backups, may hold a shared lock for a moment.
    """
    end = time.monotonic() + READER_SECONDS
    is_locked = locks.attempt(self._file)
    while is_locked is False:
      if not _is_shared(self._file):
        raise self._refusal()
      if time.monotonic() >= end:
        raise self._reader()
      time.sleep(0.1)
      is_locked = locks.attempt(self._file)
    if is_locked is None:
      path = self._path.with_suffix('.lease')
      self._lease = _FileLease(path, self._directory, self._process)

  def _refusal(self) -> ValkyrieError:
    holder = lock_holder(self._directory, self._process)
    last, _, _ = holder.partition(',')
    refusal = _refusal(last or 'another process', self._directory, self._process)
    if os.fstat(self._file.fileno()).st_nlink > 1:
      refusal = StorageError(
        f'{refusal}\n{self._path} has other names, too, as after `cp -al`: the trainer may be that '
        f'of another directory. In that case delete {self._path}, which changes no other name.'
      )
    return refusal

  def _reader(self) -> ValkyrieError:
    return Unreachable(
      f'{_reader_of(self._file)} holds a shared lock on {self._path}, as a program that only reads '
      'it may, so that nothing can train there. Nothing was changed. Wait for its end or stop it, '
      'and run the same command again.'
    )

  def _replace_by_own(self) -> None:
    """Replaces a file that is the lock of another directory, too; the lock is held throughout."""
    with owned.new_file(held_folder.place(self._path)) as new:  # it is locked, too
      descriptor = os.dup(new.fileno())
      file = os.fdopen(descriptor, 'r+b', buffering=0)
    self._file.close()
    self._file = file

  def _check_lease(self) -> None:
    if self._lease is not None:
      self._lease.check()

  @property
  def is_in_place(self) -> bool:
    """Whether the file at the path is the one that is held, and the lease too."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      status = os.fstat(self._file.fileno())
      same = os.path.samestat(os.stat(self._path), status)
      return same and (self._lease is None or self._lease.is_in_place)
    return False

  def check(self) -> None:
    """Raises StorageError if the directory at the path no longer belongs to this trainer."""
    if not self.is_in_place:
      raise StorageError(
        f'{self._path} is not the file that this run has locked: its directory was moved, or the '
        'file deleted, while the run trained, or its lease went to another one. Nothing was '
        'written there. To go on, give the directory of this run as --model_dir.'
      )

  def release(self) -> None:
    """Frees the lock."""
    if self._lease is not None:
      self._lease.release()  # and its thread, which writes in the folder
    self._folder.release()
    self._close()

  def _close(self) -> None:
    self._file.close()


class _FileLease(Lease):
  """The lease of a lock on a file system without locks, as Lustre and NFS may be.

  Its place is the path of a file. The version of the content is its bytes; None is no file. Unlike
  for an object, comparing and replacing the content are two operations.
  """

  def _read(self) -> tuple[dict[str, Any], bytes | None]:
    try:
      content = foreign.content(self._place)
    except FileNotFoundError:
      return {}, None
    except ValueError as error:  # it is too large
      raise OSError(errno.EFBIG, str(error), str(self._place)) from error
    with contextlib.suppress(ValueError):  # a machine has lost its power
      return foreign.json_object(content), content
    return {}, content

  def _write(self, content: Mapping[str, Any], version: bytes | None) -> bytes:
    found, present = self._read()
    if present != version:
      raise Changed(errno.EAGAIN, 'another process has written it', str(self._place))
    text = json.dumps(content).encode()
    if content['ended']:
      owned.delete_file(self._place)
      return text
    new = self._new(content['token'])
    whole_file.write(new, text)
    try:
      if found.get('token') == content['token']:
        # A renewal, without a moment in which the lease is free.
        owned.replace_file(new, self._place)
      else:
        if present is not None:
          self._remove(present)
          if holder.is_token(found.get('token')):  # its holder may have been killed in a renewal
            owned.delete_file(self._new(found['token']))
        os.link(new, self._place)
    except FileExistsError as error:
      raise Changed(errno.EEXIST, 'another process has made it', str(self._place)) from error
    finally:
      owned.delete_file(new)
    return text

  def _new(self, token: str) -> pathlib.Path:
    """The file of a holder's next renewal, until it takes the place of the lease."""
    return self._place.with_name(f'{self._place.name}.{token}')

  def _remove(self, version: bytes) -> None:
    """Removes an expired lease. If several processes try at once, exactly one succeeds."""
    taken = self._place.with_name(f'{self._place.name}.{uuid.uuid4().hex}')
    with contextlib.suppress(FileNotFoundError):
      owned.rename(self._place, taken)
      if taken.read_bytes() != version:  # another process has taken it over meanwhile
        with contextlib.suppress(FileExistsError):
          os.link(taken, self._place)
      owned.delete_file(taken)


def _is_held(content: Mapping[str, Any]) -> bool:
  return bool(content.get('token')) and not content.get('ended')
