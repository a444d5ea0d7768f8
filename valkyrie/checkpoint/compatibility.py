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
  of_packages = {package: version(package) for package in _PACKAGES}
  return {'valkyrie': __version__, 'python': platform.python_version()} | of_packages


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
    expected: this run's: {kind: a value, or a dict of named values}. An 'executable', the
      fingerprints of programs, shows what nothing else records: the compiler's flags, the machine.
    allowed: the KINDS that may differ.
    obstacle: tells why the checkpoint cannot be continued, whatever is allowed; '' if it can.

  Raises a ConfigurationError with all differences that are not allowed.
  """
  differences = {kind: _compare(kind, found.get(kind), value) for kind, value in expected.items()}
  if refused := [kind for kind in differences if differences[kind] and kind not in allowed]:
    lines = [f'{kind}: {line}' for kind in refused for line in differences[kind]]
    shown = '\n  '.join(first_of(lines, _SHOWN))
    needed = [kind for kind in KINDS if kind in refused or kind in allowed]
    if reason := obstacle():
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
  return [f'{kind}: {line}' for kind in differences for line in differences[kind]]


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
  is_record = (
    isinstance(found, dict)
    and _is_count(found.get('position'))
    and _is_count(found.get('rows'), least=1)
    and isinstance(stretches := found.get('stretches'), list)
    and all(isinstance(each, list) and len(each) == 3 for each in stretches)
    and all(_is_count(number) for each in stretches for number in each)
    and all(_is_count(rows, least=1) for _, _, rows in stretches)
    and isinstance(found.get('executable', {}), dict)
    and isinstance(lowest := found.get('lowest') or [0, 0], list)
    and len(lowest) in (2, 3)
    and all(isinstance(number, float) or _is_count(number) for number in lowest)
    and isinstance(schedule := found.get('schedule') or {'rate': 0.0, 'ends': 0}, dict)
    and isinstance(schedule.get('rate'), float)
    and _is_count(schedule.get('ends'))
  )
  if not is_record:
    raise StorageError(
      f'{place}/record.json is not the record of a run. Restore the step from a copy, or move it '
      'away to continue from the one before.'
    )


def _is_count(value: Any, least: int = 0) -> bool:
  return type(value) is int and least <= value < 2**62


def _compare(kind: str, found: Any, expected: Any) -> list[str]:
  from valkyrie.config.computation import default_of  # noqa: PLC0415, imports gin: not for --help

  expected = json.loads(json.dumps(expected))  # as the record was: tuples become lists
  if kind == 'executable':  # only programs that both have: before compilation a run has none
    both = {*(found or {})} & {*expected}
    found, expected = ({name: programs[name] for name in both} for programs in (found, expected))
  if not isinstance(found, dict) or not isinstance(expected, dict):
    return [] if found == expected else [f'was {found!r}, is {expected!r}']

  def differ(name):
    is_bound = name in found and name in expected
    other = default_of(name) if kind == 'configuration' and not is_bound else _NOTHING
    return found.get(name, other) != expected.get(name, other)

  return [
    f'{name} was {_text(found, name)}, is {_text(expected, name)}'
    for name in filter(differ, sorted({*found, *expected}))
  ]


def _text(values: Mapping[str, Any], name: str) -> str:
  return repr(values[name]) if name in values else 'not set'
