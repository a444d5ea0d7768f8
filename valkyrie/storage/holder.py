"""A file in the memory of the machine that tells whether the holder of a lease has ended.

Containers, and copies of a virtual machine, repeat PIDs, host names, boot ids and the numbers of
namespaces, so equal ones do not mean the same process. A holder therefore locks a file in the
memory of its machine, named after its token. The kernel frees that lock when the process ends. A
process that finds the file shares the kernel with the holder, and its lock tells at once whether
the holder has ended. A process that does not find it, as in another container, waits for beats.
"""

import contextlib
import os
import pathlib
import re
from typing import Any

from valkyrie.storage import locks, owned

MEMORY = pathlib.Path('/dev/shm')  # on Linux; never on a disk, which others may copy or share


def marked(token: str) -> contextlib.ExitStack:
  """Locks the file of this process in memory, until the stack is closed."""
  lock = contextlib.ExitStack()
  with contextlib.suppress(OSError):  # without such memory, others wait for beats
    file = lock.enter_context(open(_file(token), 'xb'))  # noqa: SIM115, closed by the stack
    lock.callback(remove, token)
    locks.attempt(file)
  return lock


def has_ended(token: Any) -> bool | None:
  """Whether the holder with a token has ended; None if only missed beats can tell."""
  if not is_token(token):  # it would name another file
    return None
  try:
    with open(_file(token), 'rb', opener=_open_literally) as file:
      return locks.attempt(file, shared=True)
  except OSError:
    return None


def remove(token: str) -> None:
  """Removes the file of a holder that has ended."""
  with contextlib.suppress(OSError):  # it belongs to another user
    owned.delete_file(_file(token))


def is_token(text: Any) -> bool:
  """Whether a foreign value has the form of a token."""
  if not isinstance(text, str):
    return False
  return re.fullmatch('[0-9a-f]{32}', text) is not None


def _open_literally(path: str, flags: int) -> int:
  """Follows no link and waits for no other process, since strangers may write in the memory."""
  return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _file(token: str) -> pathlib.Path:
  """The file of a holder; raises OSError if the memory is not this kernel's.

  A sandbox may show the memory of its host by another kind of file system, with locks of its own.
  """
  mounts = pathlib.Path('/proc/self/mounts').read_text(errors='replace').splitlines()
  kinds = {}
  for mount in mounts:
    _, place, kind, *_ = mount.split()
    kinds[place] = kind
  if kinds.get(str(MEMORY)) != 'tmpfs':
    raise FileNotFoundError(f'{MEMORY} is not memory')
  return MEMORY / f'valkyrie-{token}'
