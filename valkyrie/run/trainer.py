"""A training run in progress: its compiled steps, and their batches."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import time
from typing import Any

import jax

from valkyrie.checkpoint.manager import CheckpointDirectory
from valkyrie.data.read_ahead import prefetch
from valkyrie.distributed import compilation_cache, consistency, heartbeat
from valkyrie.distributed.preemption import Preemption
from valkyrie.monitoring import memory
from valkyrie.monitoring.waiting import doing
from valkyrie.run import resume
from valkyrie.run.evaluator import Evaluator
from valkyrie.run.resume import Origin, RunState
from valkyrie.training.curriculum import Phase
from valkyrie.training.nan_hunt import hunting
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup, StepSettings
from valkyrie.training.train_state import TrainState
from valkyrie.training.train_step import StepMetrics
from valkyrie.types import Batch
from valkyrie.weights.initial import check_loss


@dataclasses.dataclass
class Trainer:
  """Compiles the steps of a run, and takes them.

  Attributes:
    run: the state of the run, which each step replaces.
    step_memory: a line about the memory that a compiled step takes; '' before.
  """

  run: RunState
  directory: CheckpointDirectory
  origin: Origin
  stop: Preemption
  say: Callable[[str], None]

  def __post_init__(self):
    self.setup = self.run.setup
    self.step_memory = ''
    self._steps: dict[tuple, Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]] = {}

  def check_weights(self, evaluate: Evaluator) -> None:
    """Evaluates loaded weights once, and says their loss; raises as `check_loss` does."""
    weights = self.origin.weights
    if weights is None or self.run.has_all_weights is None:
      return
    params = self.run.state.evaluated
    metrics = evaluate(params, whole=False, stop=self.should_stop)
    loss = metrics['loss']
    if loss is not None and metrics['targets']:
      strict = self.run.has_all_weights and not weights.any_loss
      vocabulary_size = self.setup.model.about.vocabulary_size
      self.say(check_loss(loss, vocabulary_size, strict))

  def compile(self) -> None:
    """Compiles the step of every phase to come, before the first is taken; one for each shape.

    Raises a ConfigurationError if the programs differ between processes, or from the checkpoint's.
    """
    phases = self.setup.curriculum.forms_from(self.run.step)
    devices = self.setup.partitioner.mesh.devices.flatten().tolist()
    compiled: dict[tuple, jax.stages.Compiled] = {}
    for phase in phases:
      if phase.shape not in compiled:
        compiled[phase.shape] = self._compiled(phase, devices)
    compilation_cache.seal()
    settings = self.setup.settings
    train_steps = self.run.lengths.train_steps
    programs = {}
    for phase in phases:
      name = _program_name(phase, train_steps, settings)
      programs[name] = compiled[phase.shape]
    self.run.programs = consistency.fingerprints(programs)
    self._compare_programs(is_autotuned=consistency.is_autotuned(devices))
    self._steps = dict(compiled)
    if settings.hunt_nan:
      for phase in phases:
        step = self.setup.train_step(phase, remat=False)
        self._steps[phase.shape] = hunting(compiled[phase.shape], step)

  def _compiled(self, phase: Phase, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Compiles the step of a phase, and says how long that takes and how much memory the step."""
    heartbeat.beat(stage='compile')
    about = self.setup.model.about
    self.say(
      f'compiling a step of {_shape_text(phase)}; {about.compute_dtype}, remat_policy '
      f'{about.remat_policy}, learning rate x {phase.learning_rate_scale:g}'
    )
    began = time.perf_counter()
    with doing('compiling a step', self.say):
      lowered = self.setup.trace(phase).lower()
      traced = time.perf_counter()
      compiled, before = compilation_cache.compiled(lowered, devices)
    seconds = time.perf_counter() - traced
    times = f'{traced - began:.1f} s, compiled in {seconds:.1f} s'
    if before is not None:
      saved = before - seconds
      times += f': read from a file, {saved:.1f} s saved'
    step_memory = memory.of_program(compiled)
    self.say(f'traced in {times}; {step_memory}')
    self.step_memory = f'a step of {_shape_text(phase)} takes {step_memory}'
    local_devices = self.setup.partitioner.mesh.local_devices
    shortage = memory.shortage(compiled, len(local_devices))
    if shortage:
      self.say(shortage)
    return compiled

  def _compare_programs(self, is_autotuned: bool) -> None:
    """Compares the programs with the checkpoint's; the tuned ones of a GPU may be others."""
    allowed = [*self.origin.allow_changed]
    if is_autotuned:
      allowed.append('executable')
    saved = {'executable': self.run.saved_programs}
    compiled = {'executable': self.run.programs}
    changes = resume.check(saved, compiled, allowed, self.directory.describe_newest())
    resume.say_changes(changes, self.say)
    if changes and is_autotuned:
      self.say(
        'XLA has timed its kernels again, and chosen others: the run continues, but not bit for bit'
      )

  def take_step(self, batch: Batch) -> StepMetrics:
    """Dispatches the next step, and returns its metrics without waiting for them."""
    run = self.run
    phase = self.setup.curriculum.phase(run.step)
    step = self._steps[phase.shape]
    run.state, metrics = step(run.state, batch)
    run.step += 1
    return metrics

  def should_stop(self) -> bool:
    """Whether the run is to stop; called before each dispatch, by all processes."""
    heartbeat.beat(stage='step', step=self.run.step + 1)
    return self.stop.requested()

  def rewind(self) -> int:
    """Restores parameters, average and optimizer of the last checkpoint due; returns its step.

    That checkpoint precedes the last step; without one, it is the initial state. So interruptions
    of the run change nothing. The step, and with it the feed's position and the learning rate, and
    the empty carries of the refused step stay. Raises a StorageError if no checkpoint is readable.
    """
    for leaf in jax.tree.leaves(_rewound(self.run.state)):
      leaf.delete()  # memory does not hold it twice
    every = self.run.lengths.checkpoint_every
    due = (self.run.step - 1) // every * every
    found = None
    if due:
      found = self.directory.nearest_valid(due)
    if found is None:
      state, _ = resume.first_state(self.setup, self.run.feed, self.origin.weights, self.say)
      fields = _rewound(state)
    else:
      target = _rewound(self.setup.state)
      fields = self.directory.restore(target, partial=True, step=found)
    self.run.state = self.run.state._replace(**fields)
    return found or 0


def _rewound(state: TrainState) -> dict[str, Any]:
  """The fields of a state that a rewind replaces."""
  fields = state._asdict()
  names = ('params', 'optimizer_state', 'average', 'objective')
  known = {}
  for name in names:
    if fields[name] is not None:
      known[name] = fields[name]
  return known


def batches(reading: Reading, setup: Setup, steps: range) -> Iterator[Batch]:
  """The batch [B, N·C] of each step, on the devices.

  Raises a DataError if two processes read different tokens.
  """
  partitioner = setup.partitioner
  batch_size = setup.settings.batch_size
  rows = partitioner.local_rows(batch_size)
  check_consistency = consistency.TokenConsistency(reading.feed, rows)
  ahead = prefetch(reading.feed, _spans(reading, setup, steps), rows=rows)
  for step, batch in zip(steps, ahead, strict=True):
    check_consistency(step, reading.place(step), batch)
    yield partitioner.place_batch(batch, batch_size)


def _spans(reading: Reading, setup: Setup, steps: range) -> Iterator[tuple[int, int]]:
  """(position, length) of each row that each step reads."""
  for step in steps:
    phase = setup.curriculum.phase(step)
    yield reading.place(step), phase.tokens_per_row


def _shape_text(phase: Phase) -> str:
  text = (
    f'{phase.chunks} x {phase.chunk_size} tokens per row, gradient through {phase.backprop_chunks}'
  )
  if not phase.insert:
    text += ', without the insert'
  return text


def _program_name(phase: Phase, train_steps: int, settings: StepSettings) -> str:
  """The name of a phase's program in a checkpoint's record.

  It contains everything that may change on resume and changes the program: the end of the learning
  rate's schedule, the number of processes, whether the state is donated, and norms by layer.
  """
  more = ''
  if settings.hunt_nan:
    more += ', state not donated'
  if settings.grad_norm_by_layer:
    more += ', norms by layer'
  count = jax.process_count()
  return f'{_shape_text(phase)}, of {train_steps} steps, {count} processes{more}'
