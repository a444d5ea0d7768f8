"""Locks on open files and folders; the kernel frees them when their process ends."""

import errno
import fcntl
from typing import BinaryIO

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


def attempt(file: BinaryIO | int, *, shared: bool = False) -> bool | None:
  """Asks for a lock, and waits for nobody.

  Args:
    file: an open file, or the descriptor of an open file or folder.
    shared: whether other processes may hold shared locks at the same time.

  Returns:
    True if the lock is held now, False if another process holds one that excludes it, None if the
    file system has no locks.

  Raises:
    OSError: the file system failed, so that nobody can tell.
  """
  kind = fcntl.LOCK_EX
  if shared:
    kind = fcntl.LOCK_SH
  try:
    fcntl.flock(file, kind | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    if error.errno in _NO_LOCKS:
      return None
    raise
  return True


def free(file: BinaryIO | int) -> None:
  """Frees a lock before the file is closed."""
  fcntl.flock(file, fcntl.LOCK_UN)
