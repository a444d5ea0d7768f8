"""The comparison of a checkpoint's record with the run that resumes from it."""

from collections.abc import Callable, Collection, Mapping
from importlib import metadata
import json
import math
import platform
from typing import Any

from valkyrie import __version__
from valkyrie.errors import ConfigurationError, StorageError, first_of, message_of

# The kinds of differences that --allow_changed accepts.
KINDS = ('configuration', 'rows', 'store', 'vocabulary', 'mesh', 'versions', 'executable')

_PACKAGES = ('jax', 'jaxlib', 'dm-haiku', 'optax', 'orbax-checkpoint', 'numpy')
_SHOWN = 10
_NOTHING = object()


def version(package: str) -> str:
  """The version of a package; some ways to install one leave no metadata."""
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return 'unknown'


def versions() -> dict[str, str]:
  """The versions of Valkyrie, Python and the packages that decide the computation of a step."""
  found = {'valkyrie': __version__, 'python': platform.python_version()}
  for package in _PACKAGES:
    found[package] = version(package)
  return found


def check(
  found: Mapping[str, Any],
  expected: Mapping[str, Any],
  allowed: Collection[str],
  place: str,
  obstacle: Callable[[], str] = lambda: '',
) -> list[str]:
  """The differences, a line each, of the record of the checkpoint at `place` from this run's.

  Args:
    found: the record of the checkpoint.
    expected: this run's {kind: a value, or a dict of named values}. An 'executable', the
      fingerprints of programs, depends on the compiler's flags and the machine, too, which nothing
      else records.
    allowed: the KINDS that may differ.
    obstacle: tells why the checkpoint cannot be continued, whatever is allowed; '' if it can.

  Raises a ConfigurationError with all differences that are not allowed.
  """
  differences: list[str] = []
  refused_kinds: list[str] = []
  refused: list[str] = []
  for kind, value in expected.items():
    lines = [f'{kind}: {line}' for line in _compare(kind, found.get(kind), value)]
    differences += lines
    if lines and kind not in allowed:
      refused_kinds.append(kind)
      refused += lines
  if refused:
    shown = '\n  '.join(first_of(refused, _SHOWN))
    needed = [kind for kind in KINDS if kind in refused_kinds or kind in allowed]
    reason = obstacle()
    if reason:
      advice = f'Use the earlier values, or name another --model_dir. It cannot continue: {reason}'
    else:
      advice = (
        'Use the earlier values, name another --model_dir, or continue anyway with '
        f'--allow_changed={",".join(needed)}.'
      )
    raise ConfigurationError(
      f'{place} was saved by a run that differs from this one:\n  {shown}\n'
      f'Nothing was changed. {advice}'
    )
  return differences


def obstacle(
  found: Mapping[str, Any],
  rows: int,
  state: Any,
  differences: Callable[..., list[str]],
  read_on: Callable[[], Any],
) -> str:
  """Why a run cannot continue a checkpoint, whatever differences it allows; '' if it can.

  Args:
    found: the record of the checkpoint.
    rows: the rows of the run.
    state: the train state of the run: arrays, or their shapes.
    differences: as `CheckpointDirectory.differences`, of the checkpoint.
    read_on: continues the reading of the checkpoint, or raises a ConfigurationError.
  """
  try:
    read_on()
  except ConfigurationError as error:
    return message_of(error)
  if found['rows'] == rows:
    lines = differences(state)
  else:
    lines = differences(without_carry(state), partial=True)
  return f'the state of this run has other arrays. {lines[0]}.' if lines else ''


def without_carry(state: Any) -> dict[str, Any]:
  """The fields of a train state that a run with another number of rows restores."""
  fields = state._asdict()
  del fields['carry']
  return fields


def other_rate(
  saved: Mapping[str, float] | None, schedule: Mapping[str, float], step: int
) -> str | None:
  """A line, if the next step has another learning rate than in the run that saved.

  Args:
    saved: the `Setup.schedule` that the checkpoint after `step` steps records; None in old ones.
    schedule: the one of this run.
    step: the number of steps done.
  """
  if saved is None or math.isclose(saved['rate'], schedule['rate'], rel_tol=1e-5):
    return None
  line = (
    f'the learning rate of step {step + 1} is {schedule["rate"]:.4g}, where the run that saved had '
    f'{saved["rate"]:.4g}'
  )
  if saved['ends'] == schedule['ends']:
    return line
  return (
    f'{line}: its schedule ended at step {saved["ends"]}, and now ends at {schedule["ends"]}. To '
    f'keep it, add --gin.Optimizer.train_steps={saved["ends"]}'
  )


def check_form(found: Any, place: str) -> None:
  """Raises a StorageError if no run can have written a record."""
  if not _is_record(found):
    raise StorageError(
      f'{place}/record.json is not the record of a run. Restore the step from a copy, or move it '
      'away to continue from the one before.'
    )


def _is_record(found: Any) -> bool:
  if not isinstance(found, dict):
    return False
  stretches = found.get('stretches')
  return (
    _is_count(found.get('position'))
    and _is_count(found.get('rows'), least=1)
    and isinstance(stretches, list)
    and all(map(_is_stretch, stretches))
    and isinstance(found.get('executable', {}), dict)
    and _is_lowest(found.get('lowest') or [0, 0])
    and _is_schedule(found.get('schedule') or {'rate': 0.0, 'ends': 0})
  )


def _is_stretch(value: Any) -> bool:
  """Whether a value is [step, position, rows], see `training.reading`."""
  if not isinstance(value, list) or len(value) != 3:
    return False
  return all(map(_is_count, value)) and _is_count(value[2], least=1)


def _is_lowest(value: Any) -> bool:
  """Whether a value has the two or three numbers of the lowest validation loss."""
  if not isinstance(value, list) or len(value) not in (2, 3):
    return False
  return all(isinstance(number, float) or _is_count(number) for number in value)


def _is_schedule(value: Any) -> bool:
  if not isinstance(value, dict):
    return False
  return isinstance(value.get('rate'), float) and _is_count(value.get('ends'))


def _is_count(value: Any, least: int = 0) -> bool:
  return type(value) is int and least <= value < 2**62


def _compare(kind: str, found: Any, expected: Any) -> list[str]:
  from valkyrie.config.computation import default_of  # noqa: PLC0415, imports gin: not for --help

  expected = json.loads(json.dumps(expected))  # as in the record: tuples become lists
  if kind == 'executable':  # only programs that both have: before compilation a run has none
    both = set(found or {})
    both &= set(expected)
    found = {name: found[name] for name in both}
    expected = {name: expected[name] for name in both}
  if not isinstance(found, dict) or not isinstance(expected, dict):
    if found == expected:
      return []
    return [f'was {found!r}, is {expected!r}']

  lines = []
  for name in sorted(found.keys() | expected.keys()):
    is_bound = name in found and name in expected
    default = _NOTHING
    if kind == 'configuration' and not is_bound:
      default = default_of(name)
    if found.get(name, default) != expected.get(name, default):
      lines.append(f'{name} was {_text(found, name)}, is {_text(expected, name)}')
  return lines


def _text(values: Mapping[str, Any], name: str) -> str:
  if name not in values:
    return 'not set'
  return repr(values[name])
