"""A training run in progress: its first state, its compiled steps, and their batches."""

from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from valkyrie.checkpoint import compatibility
from valkyrie.checkpoint.manager import CheckpointDirectory
from valkyrie.config.computation import computation
from valkyrie.config.record import bindings
from valkyrie.data.feed import prefetch
from valkyrie.distributed import compilation_cache, consistency, heartbeat
from valkyrie.distributed.preemption import Preemption
from valkyrie.monitoring import memory
from valkyrie.monitoring.waiting import doing
from valkyrie.run.evaluator import Evaluator
from valkyrie.training.curriculum import Phase
from valkyrie.training.nan_hunt import hunting
from valkyrie.training.objective import Start
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup, check_documents
from valkyrie.training.train_state import TrainState
from valkyrie.training.train_step import StepMetrics
from valkyrie.types import Batch, TaskFeed
from valkyrie.weights.initial import InitialWeights, check_loss


class Lowest(NamedTuple):
  """The lowest validation loss of a run, after `step`, and the evaluations since then."""

  step: int
  loss: float
  since: int = 0

  def stops(self, patience: int | None) -> str | None:
    """Why the run ends, if `patience` evaluations have found no lower loss."""
    if patience is None or self.since < patience:
      return None
    return (
      f'stopped early: {self.since} evaluations found no lower loss than {self.loss:.4f}, after '
      f'step {self.step} (train.patience={patience})'
    )


@dataclasses.dataclass
class Trainer:
  """Restores and advances the state of a run.

  Attributes:
    allow_changed: the accepted differences to the saved run, of compatibility.KINDS.
    weights: those that a new run begins with; None initializes them.
    state: the train state, on the devices.
    step: the number of steps done.
    start: the number of steps done before this process began.
    reading: what each step reads.
    losses: the validation loss after each step that this process has evaluated.
    lowest: the lowest validation loss of the run until now; None before the first.
    needs: the memory that a step takes, once it is compiled.
  """

  setup: Setup
  feed: TaskFeed
  directory: CheckpointDirectory
  stop: Preemption
  train_steps: int
  patience: int | None
  allow_changed: Collection[str]
  weights: InitialWeights | None
  say: Callable[[str], None]

  def __post_init__(self):
    """Restores the newest checkpoint.

    Raises a ConfigurationError if its run differs from this one, and a DataError if the model
    cannot read the feed's longest document; without a checkpoint, as `InitialWeights.load` does.
    """
    check_documents(self.setup.model, self.feed)
    self.reading = Reading(self.setup.curriculum, self.feed, self.setup.settings.batch_size)
    self._programs: Mapping[str, str] = {}
    self._saved_programs: Mapping[str, str] = {}
    self.losses: dict[int, float | None] = {}
    self.lowest: Lowest | None = None
    self.needs = ''
    self._complete: bool | None = None  # whether all weights were loaded; None if none were
    self._steps: dict[tuple, Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]] = {}
    self.state = self._restored() or self._initial()
    self.step = self.start = int(self.state.step)

  def _initial(self) -> TrainState:
    """The state of a new run."""
    setup = self.setup
    state = self.setup.initial_state()
    params = state.params
    vocabulary = self.feed.vocabulary.fingerprint
    if self.weights is not None:
      params, self._complete = self.weights.load(
        setup.model, setup.settings.model, params, vocabulary, self.say
      )
    start = Start(setup.model, setup.partitioner, vocabulary, self.say)
    for term in setup.terms:
      params = term.prepared(params, start)
    if params is state.params:
      return state
    average = None if state.average is None else jax.tree.map(jnp.copy, params)
    return state._replace(params=params, average=average)

  def check_weights(self, evaluate: Evaluator) -> None:
    """Evaluates loaded weights once, and says their loss; raises as `check_loss` does."""
    if self.weights is None or self._complete is None:
      return
    plan = self.setup.curriculum.phase(0).planner
    loss = evaluate(self.state.evaluated, whole=False, plan=plan, stop=self.should_stop)['loss']
    if loss is not None:
      strict = self._complete and not self.weights.any_loss
      self.say(check_loss(loss, self.setup.model.about.vocabulary_size, strict))

  def compile(self) -> None:
    """Compiles the step of every phase to come, before the first is taken; one for each shape.

    Raises a ConfigurationError if the programs differ between processes, or from the checkpoint's.
    """
    phases = self.setup.curriculum.forms_from(self.step)
    about = self.setup.model.about
    compiled: dict[tuple, jax.stages.Compiled] = {}
    devices = self.setup.partitioner.mesh.devices.flatten().tolist()
    for phase in phases:
      if phase.shape not in compiled:
        heartbeat.beat(stage='compile')
        self.say(
          f'compiling a step of {_shape_text(phase)}; {about.compute_dtype}, remat_policy '
          f'{about.remat_policy}, planner {phase.planner and about.plan_interval is not None}, '
          f'learning rate x {phase.learning_rate_scale:g}'
        )
        began = time.perf_counter()
        with doing('compiling a step', self.say):
          lowered = self.setup.trace(phase).lower()
          traced = time.perf_counter()
          compiled[phase.shape], before = compilation_cache.compiled(lowered, devices)
        seconds = time.perf_counter() - traced
        times = f'{traced - began:.1f} s, compiled in {seconds:.1f} s'
        if before is not None:
          times += f': read from a file, {before - seconds:.1f} s saved'
        takes = memory.of_program(compiled[phase.shape])
        self.say(f'traced in {times}; {takes}')
        self.needs = f'a step of {_shape_text(phase)} takes {takes}'
        if warning := memory.shortage(compiled[phase.shape]):
          self.say(warning)
    compilation_cache.seal()
    hunt_nan = self.setup.settings.hunt_nan
    self._programs = consistency.fingerprints(
      {_program_name(phase, self.train_steps, hunt_nan): compiled[phase.shape] for phase in phases}
    )
    autotuned = consistency.is_autotuned(devices)  # then the programs may differ
    allowed = [*self.allow_changed, *(['executable'] if autotuned else [])]
    saved = {'executable': self._saved_programs}
    now = {'executable': self._programs}
    if self._changed(saved, now, allowed) and autotuned:
      self.say(
        'XLA has timed its kernels again, and chosen others: the run continues, but not bit for bit'
      )
    self._steps = dict(compiled)
    for phase in phases if hunt_nan else ():
      step = self.setup.train_step(phase, remat=False)
      self._steps[phase.shape] = hunting(compiled[phase.shape], step)

  def take_step(self, batch: Batch) -> StepMetrics:
    """Dispatches the next step, and returns its metrics without waiting for them."""
    step = self._steps[self.setup.curriculum.phase(self.step).shape]
    self.state, metrics = step(self.state, batch)
    self.step += 1
    return metrics

  def done(self) -> str | None:
    """Why no step is left; None if one is."""
    if self.step >= self.train_steps:
      return f'train_steps={self.train_steps} are done'
    return self.lowest and self.lowest.stops(self.patience)

  def should_stop(self) -> bool:
    """Whether the run is to stop; called before each dispatch, by all processes alike."""
    heartbeat.beat(stage='step', step=self.step + 1)
    return self.stop.requested()

  def rewind(self, checkpoint_every: int) -> int:
    """Restores parameters, average and optimizer of the last checkpoint due; returns its step.

    That checkpoint precedes the last step; without one, it is the initial state. So interruptions
    of the run change nothing. The step, and with it the feed's position and the learning rate, and
    the empty carries of the refused step stay. Raises a StorageError if no checkpoint is readable.
    """

    def of(state: TrainState) -> dict[str, Any]:
      fields = state._asdict()
      names = ('params', 'optimizer_state', 'average', 'objective')
      return {name: fields[name] for name in names if fields[name] is not None}

    for leaf in jax.tree.leaves(of(self.state)):
      leaf.delete()  # memory does not hold it twice
    due = (self.step - 1) // checkpoint_every * checkpoint_every
    found = self.directory.nearest_valid(due) if due else None
    if found is None:
      fields = of(self._initial())
    else:
      fields = self.directory.restore(of(self.setup.state), partial=True, step=found)
    self.state = self.state._replace(**fields)
    return found or 0

  def _restored(self) -> TrainState | None:
    """The state of the newest checkpoint, after the comparison of its record; None without one."""
    found = self.directory.latest_record()
    if found is None:
      self.say(f'no checkpoint found in {self.directory.directory}: starting a new run')
      return None
    compatibility.check_form(found, self.directory.describe_newest())
    self.lowest = Lowest(*found['lowest']) if found.get('lowest') else None
    self.step = self.directory.latest_step() or 0
    rows = self.setup.settings.batch_size

    def obstacle() -> str:
      return compatibility.obstacle(
        found, rows, self.setup.state, self.directory.differences, lambda: self._reading_on(found)
      )

    if not self._changed(found, self._facts(), self.allow_changed, obstacle):
      # Only the compiler's flags and the machine can change the programs.
      self._saved_programs = found.get('executable', {})
    self.reading = self._reading_on(found)
    if change := self.reading.change(self.step):
      self.say(change)
    self.say(f'resuming after step {self.step} from {self.directory.directory}')
    schedule = self.setup.schedule(self.step)
    if change := compatibility.other_rate(found.get('schedule'), schedule, self.step):
      self.say(change)
    if found['rows'] == rows:
      return self.directory.restore(self.setup.state)
    return TrainState(
      carry=self.setup.initial_carry(),
      **self.directory.restore(compatibility.without_carry(self.setup.state), partial=True),
    )

  def _reading_on(self, found: Mapping[str, Any]) -> Reading:
    """The reading of the checkpoint with this record, continued; raises as `Reading`."""
    read = {name: found[name] for name in ('position', 'stretches')}
    rows = self.setup.settings.batch_size
    return Reading(self.setup.curriculum, self.feed, rows, step=self.step, **read)

  def _changed(
    self,
    found: Mapping,
    expected: Mapping,
    allowed: Collection[str],
    obstacle: Callable[[], str] = lambda: '',
  ) -> bool:
    """Whether facts differ from the checkpoint's; raises as `compatibility.check`."""
    place = self.directory.describe_newest()
    lines = compatibility.check(found, expected, allowed, place, obstacle)
    for line in lines:
      self.say(f'changed since the checkpoint: {line}')
    return bool(lines)

  def _facts(self) -> dict[str, Any]:
    """What a resumed run must share with this one, by compatibility.KINDS."""
    return {
      'configuration': computation(bindings()),
      'rows': self.setup.settings.batch_size,
      'store': self.feed.fingerprint,
      'vocabulary': self.feed.vocabulary.fingerprint,
      'mesh': {
        'axes': dict(self.setup.partitioner.mesh.shape),
        'device': jax.devices()[0].device_kind,
      },
      'versions': compatibility.versions(),
      'executable': self._programs,
    }

  def record(self) -> dict[str, Any]:
    """The facts that a checkpoint of the state records, and where a resumed run continues.

    A follower of the run ends at a step that has `stopped`.
    """
    return {
      **self._facts(),
      'schedule': self.setup.schedule(self.step),
      'position': self.reading.position(self.step),
      'stretches': self.reading.stretches,
      'lowest': self.lowest,
      'stopped': self.lowest and self.lowest.stops(self.patience),
      'validation_loss': self.losses.get(self.step),
    }


def batches(reading: Reading, setup: Setup, steps: range) -> Iterator[Batch]:
  """The batch [B, N·C] of each step, on the devices.

  Raises a DataError if two processes read different tokens.
  """
  partitioner = setup.partitioner
  batch_size = setup.settings.batch_size
  rows = partitioner.local_rows(batch_size)
  check_consistency = consistency.TokenConsistency(reading.feed, rows)
  spans = ((reading.place(n), setup.curriculum.phase(n).tokens_per_row) for n in steps)
  for step, batch in zip(steps, prefetch(reading.feed, spans, rows=rows), strict=True):
    check_consistency(step, reading.place(step), batch)
    yield partitioner.place_batch(batch, batch_size)


def _shape_text(phase: Phase) -> str:
  return (
    f'{phase.chunks} x {phase.chunk_size} tokens per row, gradient through {phase.backprop_chunks}'
  )


def _program_name(phase: Phase, train_steps: int, hunt_nan: bool) -> str:
  """The name of a phase's program in a checkpoint's record.

  It contains everything that may change on resume and changes the program: the end of the learning
  rate's schedule, the number of processes, and whether the state is donated.
  """
  kept = ', state not donated' if hunt_nan else ''
  return (
    f'{_shape_text(phase)}, planner {phase.planner}, of {train_steps} steps, '
    f'{jax.process_count()} processes{kept}'
  )
