"""Patience with a file system that refuses for a while, such as a full disk."""

from collections.abc import Callable
import errno
import sys
import time
from typing import TypeVar

from valkyrie.distributed import heartbeat
from valkyrie.errors import StorageError

PATIENCE = 3600.0  # seconds for which what is refused is tried again, as `Checkpoints.patience`
AT_THE_END = 30.0  # of these seconds, at most, once the run has ended
_PAUSE = 1.0  # seconds between two attempts
_MISTAKES = (
  errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
  errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip

_Result = TypeVar('_Result')


def tell(text: str) -> None:
  """Prints a line to standard error."""
  print(f'valkyrie: {text}', file=sys.stderr, flush=True)


def refusal(error: BaseException | None) -> OSError | None:
  """The error of the system behind an error, if there is one."""
  while error is not None and not isinstance(error, OSError):
    error = error.__cause__
  return error


def may_pass(error: BaseException) -> bool:
  """Whether the system has refused, which it may stop to do."""
  return refusal(error) is not None


def may_pass_when_opened(error: BaseException) -> bool:
  """As `may_pass`, for a file that is opened: a wrong name or right stays wrong, however long."""
  refused = refusal(error)
  return refused is not None and refused.errno not in _MISTAKES


def patiently(
  attempt: Callable[[], _Result],
  patience: float = PATIENCE,
  say: Callable[[str], None] = tell,
  passes: Callable[[BaseException], bool] = may_pass,
) -> _Result:
  """Calls a function, again and again while the file system refuses, and returns its result.

  Raises the OSError or StorageError of the function if it does not pass or lasts too long.

  Args:
    attempt: the function.
    patience: the seconds for which it is called again.
    say: prints the first refusal.
    passes: whether an error may pass.
  """
  until = time.monotonic() + patience
  is_said = False
  while True:
    try:
      return attempt()
    except (OSError, StorageError) as error:
      if not passes(error):
        raise
      if time.monotonic() >= until:
        heartbeat.beat(transient=True)
        raise
      if not is_said:
        say(f'tried again for up to {patience:g} s: {error}')
      is_said = True
    heartbeat.beat()
    time.sleep(_PAUSE)
