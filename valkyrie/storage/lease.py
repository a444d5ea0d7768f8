"""A lease: a place that one process holds as long as it renews a small JSON content there.

    {"token": "0b9c...", "process": 31, "host": "a", "beat": 12}

Containers, and copies of a virtual machine, repeat PIDs, host names, boot ids and the numbers of
namespaces, so equal ones do not mean the same process. A holder therefore locks a file in the
memory of its machine, named after its token. The kernel frees that lock when the process ends. A
process that finds the file shares the kernel with the holder, and its lock tells at once whether
the holder has ended. A process that does not find it, as in another container, waits for beats.
"""

import abc
from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import os
import pathlib
import re
import socket
import threading
import time
from typing import Any
import uuid
import weakref

from valkyrie.errors import StorageError, Unreachable, storage_errors

BEAT_SECONDS = 10.0
MISSED = 3  # beats, after which a lease is free
MEMORY = pathlib.Path('/dev/shm')  # on Linux; never on a disk, which others may copy or share


class Changed(OSError):
  """Another process has written an object or a file since it was read."""


class LeaseTaken(Exception):
  """Another process holds the lease; the message names it."""


class Lease(abc.ABC):
  """A lease that this process holds; a thread renews it until `release`.

  Each write depends on the content before it. A process that was paused for longer than its lease,
  and has lost it, therefore changes nothing.
  """

  def __init__(self, place: str):
    """Takes the lease; `place` names it in messages.

    Raises:
      LeaseTaken: another process holds it.
      OSError: it cannot be read or written.
    """
    self._place = place
    self._holder = _Holder()
    self._writing = threading.Lock()
    self._content, self._version = self._taken()
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._renew, name='lease', daemon=True)
    self._thread.start()

  @abc.abstractmethod
  def _read(self) -> tuple[dict[str, Any], Any]:
    """The content, {} if there is none, and its version."""

  @abc.abstractmethod
  def _write(self, content: Mapping[str, Any], version: Any) -> Any:
    """Writes the content, and returns its version; raises Changed if `version` is not there."""

  @abc.abstractmethod
  def _end(self) -> None:
    """Frees the lease for others."""

  def _inherited(self, found: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a new content beside the holder's, from the content before."""
    return {}

  @property
  def content(self) -> Mapping[str, Any]:
    """The content that this process wrote last."""
    return self._content

  @property
  def is_in_place(self) -> bool:
    """Whether this process still holds the lease."""
    return self._read()[0].get('token') == self._content['token']

  def check(self) -> None:
    """Raises StorageError if this process no longer holds the lease."""
    with storage_errors(f'{self._place} cannot be read'):
      if not self.is_in_place:
        self._raise_lost()

  def update(self, **fields: Any) -> None:
    """Changes fields of the content, all at once.

    Raises:
      StorageError: this process no longer holds the lease; nothing is changed.
      OSError: the content cannot be written.
    """
    with self._writing:
      new = {**self._content, **fields}
      while True:
        try:
          self._version = self._write(new, self._version)
          break
        except Changed:
          found, version = self._read()
          if found.get('token') != self._content['token']:
            self._raise_lost()
          self._version = version  # of an earlier write of this process whose answer got lost
      self._content = new

  def release(self) -> None:
    """Frees the lease."""
    self._over.set()
    self._thread.join()
    with contextlib.suppress(OSError, StorageError):
      self._end()
    self._holder.end()

  def _taken(self) -> tuple[dict[str, Any], Any]:
    while True:
      found, version = self._read()
      if _is_held(found):
        self._wait_for_end(found)
      mine = {**self._holder.fields, **self._inherited(found)}
      with contextlib.suppress(Changed):  # by another process, or by the holder as it ended
        return mine, self._write(mine, version)

  def _wait_for_end(self, found: Mapping[str, Any]) -> None:
    """Returns when the holder has ended or released the lease; LeaseTaken if a process holds it."""
    ended = has_ended(found)
    if ended:
      _remove(found['token'])
    elif ended is not None:
      raise LeaseTaken(_words(found))
    else:
      # Pauses are counted, not seconds: a clock goes on while the virtual machine is paused.
      for _ in range(4 * MISSED):
        time.sleep(BEAT_SECONDS / 4)
        now, _version = self._read()
        if not _is_held(now):
          return
        if now != found:
          raise LeaseTaken(_words(now))

  def _renew(self) -> None:
    while not self._over.wait(BEAT_SECONDS):
      with contextlib.suppress(OSError, StorageError):  # the next beat or `check` will see it
        self.update(beat=self._content['beat'] + 1)

  def _raise_lost(self) -> None:
    raise StorageError(
      f'{self._place} no longer belongs to this run: another trainer has taken it over, for '
      'instance while this one was paused or did not reach the bucket, or somebody has deleted it. '
      'No step was added. To go on, run the same command again after the end of the other one.'
    )


def lock_name(process: int | None) -> str:
  """The name of the lock of a run, or of the number of one of its processes."""
  return 'trainer.lock' if process is None else f'trainer-{process}.lock'


@contextlib.contextmanager
def taking(place: str, run: Any, process: int | None) -> Iterator[None]:
  """Converts errors inside: LeaseTaken of a lock at `place`, and OSErrors.

  Raises:
    Unreachable: another process has the number `process` in the directory `run`.
    StorageError: another process trains there, with `process=None`; or an OSError inside.
  """
  try:
    with storage_errors(f'{place} cannot be locked'):
      yield
  except LeaseTaken as error:
    if process is not None:
      raise Unreachable(
        f'{error} is process {process} of the run in {run} already. Give each process its own '
        '--process. To replace it, run the same command again after its end.'
      ) from error
    raise StorageError(
      f'{error} is training in {run}, and two trainers would overwrite each other. Wait for it or '
      'stop it, or name another --model_dir.'
    ) from error


def has_ended(lease: Mapping[str, Any]) -> bool | None:
  """Whether the holder of a lease has ended; None if only missed beats can tell."""
  token = str(lease.get('token'))
  if not re.fullmatch('[0-9a-f]{32}', token):  # it would name another file
    return None
  try:
    with open(_file(token)) as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError:
    return None
  return True


class _Holder:
  """This process as the holder of one lease, until `end`; `fields` of its content name it."""

  def __init__(self):
    token = uuid.uuid4().hex
    host = socket.gethostname()
    self.fields = {'token': token, 'process': os.getpid(), 'host': host, 'beat': 0}
    lock = contextlib.ExitStack()
    with contextlib.suppress(OSError):  # without such memory, others wait for beats
      file = lock.enter_context(open(_file(token), 'x'))  # noqa: SIM115, closed by end
      lock.callback(_remove, token)
      fcntl.flock(file, fcntl.LOCK_EX)
    self.end = weakref.finalize(self, lock.close)  # also when the last reference is gone


def _is_held(content: Mapping[str, Any]) -> bool:
  return bool(content.get('token')) and not content.get('ended')


def _words(lease: Mapping[str, Any]) -> str:
  return f'process {lease.get("process")} on {lease.get("host")}'


def _file(token: str) -> pathlib.Path:
  """The file of a holder; raises OSError if the memory is not this kernel's.

  A sandbox may show the memory of its host by another kind of file system, with locks of its own.
  """
  mounts = pathlib.Path('/proc/self/mounts').read_text(errors='replace').splitlines()
  kinds = {place: kind for _, place, kind, *_ in map(str.split, mounts)}
  if kinds.get(str(MEMORY)) != 'tmpfs':
    raise FileNotFoundError(f'{MEMORY} is not memory')
  return MEMORY / f'valkyrie-{token}'


def _remove(token: str) -> None:
  with contextlib.suppress(OSError):  # of another user
    _file(token).unlink(missing_ok=True)
