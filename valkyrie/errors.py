"""The errors that can end a run, with their exit codes."""

from collections.abc import Iterable, Iterator
import contextlib
import os
import re
from typing import Any


class ValkyrieError(Exception):
  """An ending that is not a bug: the message gives the finding, the expectation and the remedy."""

  exit_code = 70


class UsageError(ValkyrieError):
  """The command line cannot be read."""

  exit_code = 2


class DataError(ValkyrieError):
  """A document, shard or store is missing, damaged or of another kind."""

  exit_code = 65


class StorageError(ValkyrieError):
  """A file system refused, or a checkpoint is not whole."""

  exit_code = 74


class Preempted(ValkyrieError):
  """The run was asked to stop, and saved: run the same command again."""

  exit_code = 75


class Unreachable(ValkyrieError):
  """The other processes of the run are not there (yet): run the same command again."""

  exit_code = 75


class Diverged(ValkyrieError):
  """The numbers are no longer finite, and the budget for skipping steps is spent."""

  exit_code = 76


class ConfigurationError(ValkyrieError):
  """The gin configuration is wrong, or does not fit this machine, data or checkpoint."""

  exit_code = 78


def message_of(error: ValkyrieError) -> str:
  """The message without the lines that gin adds for every configurable that the error passes."""
  return re.sub(r'\n  In call to configurable .*', '', str(error))


def reason_of(error: Exception) -> str:
  """The reason to show: `strerror` of an OSError, otherwise the exception's own text."""
  return getattr(error, 'strerror', None) or str(error)


@contextlib.contextmanager
def storage_errors(
  message: str, advice: str = '', also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
  """Raises StorageError('MESSAGE: reason. ADVICE') for an OSError, or one of `also`, inside."""
  try:
    yield
  except (OSError, *also) as error:
    reason = reason_of(error)
    file = getattr(error, 'filename', None)
    if file is not None and str(file) not in message:
      reason += f' ({file})'
    raise StorageError(f'{message}: {reason}' + (f'. {advice}' if advice else '')) from error


def regular_expression(name: str, pattern: str) -> re.Pattern[str]:
  """The compiled pattern of the setting `name`; raises a ConfigurationError if it is none."""
  try:
    return re.compile(pattern)
  except (TypeError, re.error) as error:
    raise ConfigurationError(
      f'{name} has {pattern!r}, which is not a regular expression ({error}). Change the pattern.'
    ) from error


_LONGEST_PATH = 4096 - 512  # bytes of a directory: Linux allows 4096, less the names of its files


def usable_path(name: str, path: str) -> str:
  """The path of a directory that the setting `name` gives, with the home for a `~`.

  Raises:
    ConfigurationError: it is an address, no UTF-8, or too long for the names of files in it.
  """
  if bad := re.search('[\0\ud800-\udfff]', path):  # bytes that are not UTF-8 become the latter
    raise ConfigurationError(
      f'{name}={path!a} contains {bad[0]!a}, but a path must be UTF-8 without null characters. '
      'Rename the directory.'
    )
  if '://' in path:
    raise ConfigurationError(
      f'{name}={path} is the address of storage that cannot be used. Use a directory; only '
      '--model_dir may also be in a bucket of Google Cloud Storage: gs://BUCKET/FOLDER.'
    )
  path = os.path.expanduser(path)
  if (length := len(os.fsencode(os.path.abspath(path)))) > _LONGEST_PATH:
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
