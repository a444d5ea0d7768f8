"""The holder of a lease: one process, and whether it has ended.

    {"token": "0b9c...", "process": 31, "host": "a", "beat": 12}

Containers, and copies of a virtual machine, repeat PIDs, host names, boot ids and the numbers of
namespaces, so equal ones do not mean the same process. A holder therefore locks a file in the
memory of its machine, named after its token. The kernel frees that lock when the process ends. A
process that finds the file shares the kernel with the holder, and its lock tells at once whether
the holder has ended. A process that does not find it, as in another container, waits for beats.
"""

from collections.abc import Callable, Mapping
import contextlib
import fcntl
import os
import pathlib
import re
import socket
import time
from typing import Any
import uuid
import weakref

BEAT_SECONDS = 10.0
MISSED = 3  # beats, after which a lease is free
MEMORY = pathlib.Path('/dev/shm')  # on Linux; never on a disk, which others may copy or share


class LeaseTaken(Exception):
  """Another process holds the lease; the message names it."""


class Holder:
  """This process as the holder of one lease, until `end`.

  Attributes:
    lease: the content of the lease.
    end: frees the lock in memory. It runs by itself when the last reference is gone.
  """

  def __init__(self):
    token = uuid.uuid4().hex
    self.lease = {
      'token': token,
      'process': os.getpid(),
      'host': socket.gethostname(),
      'beat': 0,
    }
    lock = contextlib.ExitStack()
    with contextlib.suppress(OSError):  # without such memory, others wait for beats
      file = lock.enter_context(open(_file(token), 'x'))  # noqa: SIM115, closed by end
      lock.callback(_remove, token)
      fcntl.flock(file, fcntl.LOCK_EX)
    self.end = weakref.finalize(self, lock.close)


def words(lease: Mapping[str, Any]) -> str:
  """The holder of a lease, for a message."""
  return f'process {lease.get("process")} on {lease.get("host")}'


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


def wait_for_end(found: Mapping[str, Any], read: Callable[[], Mapping[str, Any] | None]) -> None:
  """Returns when the holder of a lease has ended or has released it.

  Args:
    found: the lease.
    read: reads it again; None if it was released.

  Raises:
    LeaseTaken: a process holds it.
  """
  ended = has_ended(found)
  if ended:
    _remove(found['token'])
  elif ended is not None:
    raise LeaseTaken(words(found))
  else:
    # Pauses are counted, not seconds: a clock goes on while the virtual machine is paused.
    for _ in range(4 * MISSED):
      time.sleep(BEAT_SECONDS / 4)
      if (now := read()) is None:
        return
      if now != found:
        raise LeaseTaken(words(now))


def _file(token: str) -> pathlib.Path:
  """The file of a holder; raises OSError if the memory is not that of this kernel.

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
