"""The errors that can end a run, with their exit codes."""

from collections.abc import Iterator
import contextlib
import re


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
  """The words of the system for an OSError, or of the library for another error."""
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
