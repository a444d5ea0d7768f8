"""The errors that can end a run, with their exit codes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import errno
import os
import re
import sys
from typing import Any


class ValkyrieError(Exception):
  """An ending that is not a bug: the message gives the finding, the expectation and the remedy."""

  exit_code = 70

  def __init_subclass__(cls, exit_code: int | None = None):
    cls.exit_code = exit_code or cls.exit_code


class UsageError(ValkyrieError, exit_code=2):
  """The command line cannot be read."""


class DataError(ValkyrieError, exit_code=65):
  """A document, shard or store is missing, damaged or of another kind."""


class DeviceError(ValkyrieError, exit_code=71):
  """A device or its runtime failed: a restart from the last checkpoint may succeed."""


class StorageError(ValkyrieError, exit_code=74):
  """A file system refused, or a checkpoint is not whole."""


class Preempted(ValkyrieError, exit_code=75):
  """The run was asked to stop, and saved: run the same command again."""


class Unreachable(ValkyrieError, exit_code=75):
  """The other processes of the run are not there (yet): run the same command again."""


class Diverged(ValkyrieError, exit_code=76):
  """The numbers are no longer finite, and the budget for skipping steps is spent."""


class Disagreement(ValkyrieError, exit_code=77):
  """Forms of one computation differ by more than rounding explains."""


class ConfigurationError(ValkyrieError, exit_code=78):
  """The gin configuration is wrong, or does not fit this machine, data or checkpoint."""


def message_of(error: ValkyrieError) -> str:
  """The message without the lines that gin adds for every configurable that the error passes."""
  return re.sub(r'\n  In call to configurable .*', '', str(error))


def notes_of(error: BaseException) -> list[str]:
  """The notes of an error, without jax's note about a traceback, which is not shown."""
  notes = getattr(error, '__notes__', ())
  return [note for note in notes if 'JAX_TRACEBACK_FILTERING' not in note]


def reason_of(error: Exception) -> str:
  """The reason to show: `strerror` of an OSError, otherwise the exception's own text."""
  return getattr(error, 'strerror', None) or str(error)


@contextlib.contextmanager
def storage_errors(
  message: str,
  advice: str = '',
  also: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
  """Raises StorageError('MESSAGE: reason. ADVICE') for an OSError, or one of `also`, inside."""
  try:
    yield
  except (OSError, *also) as error:
    reason = reason_of(error)
    file = getattr(error, 'filename', None)
    # A path of `held_folder.place` tells a user nothing: the message names the file.
    path = str(file)
    is_named = path in message or path.startswith('/proc/self/fd/')
    if file is not None and not is_named:
      reason += f' ({file})'
    text = f'{message}: {reason}'
    if advice:
      text += f'. {advice}'
    raise StorageError(text) from error


# What to do at the path that a message names, by what the system says when it refuses a write.
_REMEDIES: dict[int | None, str] = {
  errno.ENOSPC: 'Make room there',
  errno.EDQUOT: 'Make room there, or ask for a larger quota',
  errno.EFBIG: 'Raise the limit on the size of a file (ulimit -f)',
  errno.EACCES: 'Give this user the right to write there',
  errno.EPERM: 'Give this user the right to write there',
  errno.EROFS: 'Mount that file system for writing',
  errno.EEXIST: 'Move away what is there',
  errno.ENOENT: 'Make the folder that is missing',
  errno.ENOTDIR: 'Move away the file in its path, where a folder is expected',
  errno.EISDIR: 'Move away the folder there, where a file is expected',
  errno.ENAMETOOLONG: 'Shorten the name',
  errno.ELOOP: 'Remove the link there',
}


@contextlib.contextmanager
def write_errors(
  message: str,
  otherwise: str = '',
  note: str = '',
  also: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
  """As `storage_errors`, of a write: the first advice is the remedy for what the system says.

  Args:
    message: what cannot be written.
    otherwise: what the user can do instead: 'name another --output'.
    note: a last sentence, such as what was not changed.
    also: more types of errors.
  """
  try:
    yield
  except (OSError, *also) as error:
    remedy = _REMEDIES.get(getattr(error, 'errno', None), '')
    ways = ', or '.join(filter(None, (remedy, otherwise)))
    sentences = [note]
    if ways:
      advice = f'{ways[0].upper()}{ways[1:]}.'
      sentences = [sentence for sentence in (advice, note) if sentence]
    with storage_errors(message, ' '.join(sentences), also):
      raise


def first_of(texts: Sequence[str], most: int) -> list[str]:
  """The first of the texts, and how many more there are."""
  more = len(texts) - most
  if more <= 0:
    return [*texts]
  return [*texts[:most], f'and {more} more']


def end_after(end: Callable[[], None], error: BaseException | None) -> None:
  """Calls `end` after a block. If the block raised an error, a failure becomes its note."""
  try:
    end()
  except ValkyrieError as failure:
    if error is None:
      raise
    error.add_note(str(failure))


# What the system says when a disk or a network fails: the content of a file may be whole.
_OUTAGES = frozenset({
  errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT, errno.EHOSTDOWN,
  errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNABORTED, errno.ECONNREFUSED,
  errno.ECONNRESET, errno.ENOTCONN,
})  # fmt: skip
# pyarrow's errors of a service have no number.
_OUTAGE = re.compile('AWS Error (?!NO_SUCH_|RESOURCE_NOT_FOUND)')


def raise_outage(message: str, error: BaseException) -> None:
  """Raises StorageError('MESSAGE (reason). ADVICE') if a disk or a network has failed.

  It is called where an error would otherwise be one of what a file contains.
  """
  if not isinstance(error, OSError):
    return
  is_timeout = isinstance(error, TimeoutError)
  if error.errno in _OUTAGES or is_timeout or _OUTAGE.search(str(error)):
    reason = _one_line(reason_of(error))
    raise StorageError(
      f'{message} ({reason}). Check its disk or the network, and run again.'
    ) from error


def _one_line(text: str) -> str:
  words = text.split()
  return ' '.join(words)


@contextlib.contextmanager
def converted(
  of: tuple[type[Exception], ...],
  to: type[ValkyrieError],
  message: str,
  advice: str,
) -> Iterator[None]:
  """Raises to('MESSAGE (error). ADVICE') for an error of these types inside.

  A disk or a network that fails is a StorageError: see `raise_outage`.
  """
  try:
    yield
  except of as error:
    raise_outage(message, error)
    reason = _one_line(str(error)) or type(error).__name__
    raise to(f'{message} ({reason}). {advice}') from error


def regular_expression(name: str, pattern: str) -> re.Pattern[str]:
  """The compiled pattern of the setting `name`; raises a ConfigurationError if it is none."""
  message = f'{name} has {pattern!r}, which is not a regular expression'
  with converted((TypeError, re.error), ConfigurationError, message, 'Change the pattern.'):
    return re.compile(pattern)


def with_home(path: str) -> str:
  """The path with a home directory in place of a `~` or `~USER` before its first slash.

  Raises a ConfigurationError if there is no such directory: Python would leave the `~`, and a
  folder of this name would appear; and for an empty path, which would be the current folder.
  """
  if not path:
    raise ConfigurationError(
      'A path is empty, like that of a shell variable without a value. Write the path, or a dot '
      'for the current folder.'
    )
  expanded = os.path.expanduser(path)
  if expanded == path and path.startswith('~') and (path == '~' or '/' in path):
    raise ConfigurationError(
      f'The home directory in {path!r} is unknown: HOME is not set, or the system has no entry for '
      'this user. Set HOME, or write the path without ~.'
    )
  return expanded


def is_there(path: str | os.PathLike) -> bool:
  """Whether a file, a folder or a link is there, at a path that a user names.

  Raises a StorageError if the system does not tell, as in a folder that this user may not search.
  """
  advice = 'Give this user the right to search the folders of this path, or name another one.'
  with storage_errors(f'{path} cannot be looked up', advice):
    try:
      os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last of a null character
      return False
  return True


_LONGEST_PATH = 4096 - 512  # bytes of a directory: Linux allows 4096, less the names of its files


def usable_path(name: str, path: str) -> str:
  """The path of a directory that the setting `name` gives, with the home for a `~`.

  Raises a ConfigurationError if it is an address, is not UTF-8, or is too long for the names of
  its files.
  """
  bad = re.search('[\0\ud800-\udfff]', path)  # bytes that are not UTF-8 become the latter
  if bad:
    advice = 'Rename the directory.'
    if sys.getfilesystemencoding() != 'utf-8':  # by the locale and PYTHONUTF8=0
      encoding = sys.getfilesystemencoding()
      advice = f'This Python reads names as {encoding}: set PYTHONUTF8=1, or rename the directory.'
    raise ConfigurationError(
      f'{name}={path!a} contains {bad[0]!a}, but a path must be UTF-8 without null characters. '
      f'{advice}'
    )
  if '://' in path:
    raise ConfigurationError(
      f'{name}={path} is the address of storage that cannot be used. Use a path; only '
      '--model_dir may also be in a bucket of Google Cloud Storage: gs://BUCKET/FOLDER.'
    )
  path = with_home(path)
  length = len(os.fsencode(os.path.abspath(path)))
  if length > _LONGEST_PATH:
    raise ConfigurationError(
      f'{name} is a path of {length:,} bytes, but {_LONGEST_PATH:,} are the most that leave room '
      'for the names of the files in it. Use a shorter one, for example a symbolic link.'
    )
  return path


LARGEST_COUNT = 2**31 - 1  # of int32, in which devices count


def check_count(name: str, count: int) -> None:
  """Raises a ConfigurationError, naming the binding `name`, for a count that int32 cannot hold."""
  if count > LARGEST_COUNT:
    raise ConfigurationError(
      f'{name}={count:,} exceeds {LARGEST_COUNT:,}, the largest int32. Lower it.'
    )


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
  """Raises a ConfigurationError if the setting `name` has a value that is no choice."""
  if value not in choices:
    raise ConfigurationError(f'{name}={value!r} is unknown. Use one of {[*choices]}.')
