"""The state of a run, the record of it in each checkpoint, and the resume from both.

RunState.restore    the run after its newest checkpoint, if its record fits; or a new run
RunState.record     what the next checkpoint says about the run, beside the train state
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from valkyrie import packages
from valkyrie.checkpoint.manager import CheckpointDirectory
from valkyrie.config.computation import computation, default_of
from valkyrie.config.differences import differences
from valkyrie.config.record import bindings
from valkyrie.errors import ConfigurationError, StorageError, first_of, message_of
from valkyrie.run.lengths import Lengths, Lowest
from valkyrie.run.other_rates import other_rates
from valkyrie.training.objective import Start
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup, check_documents
from valkyrie.training.train_state import TrainState
from valkyrie.types import TaskFeed
from valkyrie.weights.initial import InitialWeights

_SHOWN = 10
_OTHER_CARRY = (
  'Only the carry differs: the weights of this run can begin another one. Name a new --model_dir, '
  'and this one by --gin.train.initial_weights=\'"MODEL_DIR"\'.'
)


class Origin(NamedTuple):
  """What a run begins with.

  weights: the weights of a new run; None initializes them.
  allow_changed: the kinds of differences from the run that saved which are accepted.
  """

  weights: InitialWeights | None = None
  allow_changed: Collection[str] = ()


@dataclasses.dataclass
class RunState:
  """A run between two steps: what its checkpoints save, and what a resumed run continues.

  Attributes:
    setup, feed, lengths: its parts.
    state: the train state, on the devices.
    step: the number of steps done.
    start: the number of steps done before this process began.
    reading: what each step reads.
    lowest: the lowest validation loss of the run so far; None before the first.
    losses: the validation loss after each step that this process has evaluated.
    programs: {name: fingerprint} of the compiled steps.
    saved_programs: the programs of the checkpoint; {} if they may differ.
    has_all_weights: whether a new run has loaded all of its weights; None if it has loaded none.
  """

  setup: Setup
  feed: TaskFeed
  lengths: Lengths
  state: TrainState
  step: int
  reading: Reading
  lowest: Lowest | None = None
  losses: dict[int, float | None] = dataclasses.field(default_factory=dict)
  programs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  saved_programs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_all_weights: bool | None = None

  def __post_init__(self):
    self.start = self.step

  @classmethod
  def restore(
    cls,
    setup: Setup,
    feed: TaskFeed,
    lengths: Lengths,
    directory: CheckpointDirectory,
    origin: Origin,
    say: Callable[[str], None],
  ) -> 'RunState':
    """The run after its newest checkpoint, or a new one without a checkpoint.

    Raises a ConfigurationError if the run that saved differs from this one, and a DataError if the
    model cannot read the feed's longest document; without a checkpoint, as `InitialWeights.load`.
    """
    check_documents(setup.model, feed)
    found = directory.latest_record()
    if found is None:
      say(f'no checkpoint found in {directory.directory}: starting a new run')
      state, has_all_weights = first_state(setup, feed, origin.weights, say)
      reading = Reading(setup.curriculum, feed, setup.settings.batch_size)
      return cls(setup, feed, lengths, state, 0, reading, has_all_weights=has_all_weights)

    check_form(found, directory.describe_newest())
    step = directory.latest_step() or 0
    rows = setup.settings.batch_size

    def read_on() -> Reading:
      return Reading(
        setup.curriculum,
        feed,
        rows,
        step=step,
        position=found['position'],
        stretches=found['stretches'],
      )

    def why_not() -> str:
      reason = obstacle(found, rows, setup.state, directory.differences, read_on)
      return unread_weights(found, expected) or reason

    expected = facts(setup, feed, {})
    place = directory.describe_newest()
    changes = check(found, expected, origin.allow_changed, place, why_not)
    say_changes(changes, say)
    unread = unread_weights(found, expected)
    if unread:
      say(unread)
    reading = read_on()
    other_tokens = reading.change(step)
    if other_tokens:
      say(other_tokens)
    say(f'resuming after step {step} from {directory.directory}')
    for line in other_rates(found.get('schedule'), setup, range(step, lengths.train_steps)):
      say(line)
    state = _restored_state(setup, directory, found['rows'])
    run = cls(setup, feed, lengths, state, step, reading)
    if found.get('lowest'):
      run.lowest = Lowest(*found['lowest'])
    if not changes:  # then only the compiler's flags and the machine can change the programs
      run.saved_programs = found.get('executable', {})
    return run

  def record(self) -> dict[str, Any]:
    """The facts that a checkpoint of the state records, and where a resumed run continues.

    A follower of the run ends at a step that has `stopped`.
    """
    return {
      **facts(self.setup, self.feed, self.programs),
      'schedule': self.setup.schedule(self.step),
      'position': self.reading.position(self.step),
      'stretches': self.reading.stretches,
      'lowest': self.lowest,
      'stopped': self.lengths.early_end(self.lowest),
      'validation_loss': self.losses.get(self.step),
    }

  def done(self) -> str | None:
    """Why no step is left; None if one is."""
    return self.lengths.end(self.step, self.lowest)

  def note_loss(self, loss: float | None) -> None:
    """Notes the validation loss after the last step; NaN, as without targets, is never lowest."""
    self.losses[self.step] = loss
    if loss is None:
      return
    lowest = self.lowest
    if math.isfinite(loss) and (lowest is None or loss < lowest.loss):
      self.lowest = Lowest(self.step, loss)
    elif lowest is not None:
      self.lowest = lowest._replace(since=lowest.since + 1)


def first_state(
  setup: Setup,
  feed: TaskFeed,
  weights: InitialWeights | None,
  say: Callable[[str], None],
) -> tuple[TrainState, bool | None]:
  """The state of a new run, and whether all of its weights were loaded (None: none were)."""
  state = setup.initial_state()
  params = state.params
  vocabulary = feed.vocabulary.fingerprint
  has_all_weights = None
  if weights is not None:
    params, has_all_weights = weights.load(
      setup.model, setup.settings.model, params, vocabulary, say
    )
  start = Start(setup.model, setup.partitioner, vocabulary, say)
  for term in setup.terms:
    params = term.prepared(params, start)
  if params is state.params:
    return state, has_all_weights
  average = None if state.average is None else jax.tree.map(jnp.copy, params)
  return state._replace(params=params, average=average), has_all_weights


def unread_weights(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
  """A sentence, if this run names first weights that the run that saved did not begin with."""
  before = _initial_weights(found)
  given = _initial_weights(expected)
  if given in (None, before):
    return ''
  return (
    f'train.initial_weights = {given!r} is read only where a run begins, and this one goes on with '
    'the weights of its checkpoint.'
  )


def _initial_weights(record: Mapping[str, Any]) -> Any:
  """The first weights that a record names, if any."""
  configuration = record.get('configuration')
  if not isinstance(configuration, dict):
    return None
  return configuration.get('train.initial_weights')


def _restored_state(setup: Setup, directory: CheckpointDirectory, saved_rows: int) -> TrainState:
  """The state of the newest checkpoint; with other rows than it had, every carry is empty."""
  if saved_rows == setup.settings.batch_size:
    try:
      return directory.restore(setup.state)
    except ConfigurationError as error:
      if directory.differences(without_carry(setup.state), partial=True):
        raise
      raise ConfigurationError(f'{message_of(error)} {_OTHER_CARRY}') from error
  restored = directory.restore(without_carry(setup.state), partial=True)
  return TrainState(carry=setup.initial_carry(), **restored)


def facts(setup: Setup, feed: TaskFeed, programs: Mapping[str, str]) -> dict[str, Any]:
  """What a resumed run must share with this one, by the kinds that --allow_changed accepts."""
  return {
    'configuration': computation(bindings()),
    'rows': setup.settings.batch_size,
    'store': feed.fingerprint,
    'vocabulary': feed.vocabulary.fingerprint,
    'mesh': {
      'axes': dict(setup.partitioner.mesh.shape),
      'device': jax.devices()[0].device_kind,
    },
    'versions': packages.versions(),
    'executable': programs,
  }


def say_changes(changes: Collection[str], say: Callable[[str], None]) -> None:
  """Says the accepted differences, as `check` returns them."""
  for line in changes:
    say(f'changed since the checkpoint: {line}')


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
    allowed: the kinds that may differ.
    obstacle: tells why the checkpoint cannot be continued, whatever is allowed; '' if it can.

  Raises a ConfigurationError with all differences that are not allowed.
  """
  changes: list[str] = []
  refused_kinds: list[str] = []
  refused: list[str] = []
  for kind, value in expected.items():
    lines = [f'{kind}: {line}' for line in _compare(kind, found.get(kind), value)]
    changes += lines
    if lines and kind not in allowed:
      refused_kinds.append(kind)
      refused += lines
  if refused:
    shown = '\n  '.join(first_of(refused, _SHOWN))
    needed = sorted({*refused_kinds, *allowed})
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
  return changes


def obstacle(
  found: Mapping[str, Any],
  rows: int,
  state: Any,
  state_differences: Callable[..., list[str]],
  read_on: Callable[[], Any],
) -> str:
  """Why a run cannot continue a checkpoint, whatever differences it allows; '' if it can.

  Args:
    found: the record of the checkpoint.
    rows: the rows of the run.
    state: the train state of the run: arrays, or their shapes.
    state_differences: as `CheckpointDirectory.differences`, of the checkpoint.
    read_on: continues the reading of the checkpoint, or raises a ConfigurationError.
  """
  try:
    read_on()
  except ConfigurationError as error:
    return message_of(error)
  lines = state_differences(without_carry(state), partial=True)
  if lines:
    return f'the state of this run has other arrays. {lines[0]}.'
  if found['rows'] == rows:
    lines = state_differences(state)
    if lines:
      return f'the state of this run has other arrays. {lines[0]}. {_OTHER_CARRY}'
  return ''


def without_carry(state: Any) -> dict[str, Any]:
  """The fields of a train state that a run with another number of rows restores."""
  fields = state._asdict()
  del fields['carry']
  return fields


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

  if kind != 'configuration':
    return differences(found, expected)
  found = computation(found)  # an earlier version may have recorded what may change now
  return differences(found, expected, default_of)
