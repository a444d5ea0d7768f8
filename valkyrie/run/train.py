"""Training, read from top to bottom: mesh, model, data, state, steps, loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import pathlib
from typing import Any

import gin
import jax

from valkyrie import fitting
from valkyrie.checkpoint import compatibility
from valkyrie.checkpoint.manager import CheckpointDirectory, Checkpoints
from valkyrie.config.computation import computation, may_change_on_resume
from valkyrie.config.record import bindings, write_configuration, write_operative_configuration
from valkyrie.data.feed import TaskFeed
from valkyrie.distributed import heartbeat, program_fingerprint
from valkyrie.distributed.consistency import check_same_bindings
from valkyrie.distributed.preemption import Preemption
from valkyrie.errors import Diverged, Preempted, StorageError
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.sizes import check_sizes
from valkyrie.monitoring import plot, report
from valkyrie.monitoring.hooks import Every, Hook
from valkyrie.monitoring.progress import Progress, describe
from valkyrie.monitoring.refused_log import RefusedLog
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.writers import create_writers
from valkyrie.run.batches import batches
from valkyrie.run.evaluate import Evaluator
from valkyrie.run.rewind import Rewind
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.divergence import RefusedSteps
from valkyrie.training.nan_hunt import hunting
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.setup import compile_steps, prepare
from valkyrie.training.spikes import LossSpikes
from valkyrie.training.train_step import StepMetrics, TrainState, initial_state, make_train_step


@may_change_on_resume(
  'train_steps', 'log_every', 'eval_every', 'checkpoint_every', 'evaluator', 'checkpoints',
  'hooks', 'hunt_nan', 'preemption', 'refused_steps',
)  # fmt: skip
@gin.configurable
def train(
  model_dir: str,
  *,
  seed: int,
  batch_size: int,
  train_steps: int,
  log_every: int,
  eval_every: int,
  checkpoint_every: int,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  curriculum: Callable[[], Curriculum],
  optimizer: Callable[[], Optimizer],
  feed: Callable[[], TaskFeed],
  evaluator: Callable[..., Evaluator],
  checkpoints: Checkpoints,
  hooks: Sequence[Hook] = (),
  remat: bool = True,
  hunt_nan: bool = False,
  preemption: Callable[[], Preemption] = Preemption,
  refused_steps: Callable[..., RefusedSteps] = RefusedSteps,
  loss_spikes: Callable[[], LossSpikes] = LossSpikes,
  allow_changed: Sequence[str] = (),
) -> None:
  """Trains until `train_steps` steps are done, from the newest checkpoint in model_dir if any.

  Args:
    model_dir: the directory of the run; what it comes to hold is in README.md.
    seed: of the parameters and of dropout.
    batch_size: B, rows; fixed for the run, since every row has a memory.
    train_steps: optimizer steps in all, those before a resume included.
    log_every, eval_every, checkpoint_every: steps between these; the last step does all three.
    model, partitioner, curriculum, optimizer, feed, evaluator: the classes of the parts.
    checkpoints: which checkpoints to keep.
    hooks: called after every step, besides the run's own.
    remat: recompute chunks in the backward pass; False keeps their activations.
    hunt_nan: wait for every step, and end at the first that is refused, with the name of the module
      where its first number that is not finite appears.
    preemption: what to do when the process is asked to stop.
    refused_steps: how many steps may be refused before the run ends.
    loss_spikes: what is done about a step whose loss stands out.
    allow_changed: of compatibility.KINDS, what may differ from the run that saved the checkpoint.

  Raises:
    ValkyrieError: of the kind that names what does not fit.
    Preempted: the process was asked to stop, and has saved.
  """
  check_sizes('train', train_steps=train_steps)
  with contextlib.ExitStack() as opened:
    stop = opened.enter_context(preemption())
    heartbeat.start(model_dir)
    check_same_bindings(computation(bindings()))

    # Mesh and model. What is wrong with them is said before anything is read, written or compiled.
    layout, functions, phases, rule, spikes, abstract, make_step = prepare(
      seed=seed,
      batch_size=batch_size,
      model=model,
      partitioner=partitioner,
      curriculum=curriculum,
      optimizer=optimizer,
      loss_spikes=loss_spikes,
      remat=remat,
    )

    saved = opened.enter_context(checkpoints.open(model_dir))
    progress = Progress(train_steps)
    for line in report.system_lines():
      progress.say(line)

    # Data.
    source = feed()
    fitting.check_vocabulary(functions, source)
    measure = evaluator(functions, layout)

    # State: initial, or where the run was left.
    programs: dict[str, str] = {}

    def record(step: int) -> dict[str, Any]:
      return {
        'configuration': computation(bindings()),
        'position': phases.position(step),
        'store': source.fingerprint,
        'vocabulary': source.vocabulary.fingerprint,
        'mesh': {'axes': dict(layout.mesh.shape), 'device': jax.devices()[0].device_kind},
        'versions': compatibility.versions(),
        'executable': programs,
      }

    make_initial = layout.partition(
      lambda: initial_state(functions, rule, seed, batch_size, spikes.initial()),
      out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )
    state, same = _restored(saved, abstract, record, allow_changed, progress)
    state = make_initial() if state is None else state
    start = int(state.step)
    if jax.process_index() == 0:
      write_configuration(model_dir)
      write_operative_configuration(model_dir)
      information = report.model_info(abstract.params, layout.layouts(abstract.params), layout.mesh)
      pathlib.Path(model_dir, 'model_info.txt').write_text(information)
    if start:
      progress.say(f'resuming after step {start} from {saved.directory}')
    if start >= train_steps:
      progress.say(f'nothing left to do: train_steps={train_steps} are done')
      return
    remaining = range(start, train_steps)

    # Steps: every shape is compiled before the first is taken.
    steps = compile_steps(make_step, phases, layout, abstract, batch_size, progress, not hunt_nan)
    names = [program_name(phase, train_steps, donated=not hunt_nan) for phase in phases.phases]
    programs |= program_fingerprint.fingerprints(dict(zip(names, steps, strict=True)))
    compatibility.check_executable(same, programs, allow_changed, saved.describe_newest())
    if hunt_nan:
      plain = language_model.transform(functools.partial(model, remat=None))
      steps = [
        hunting(step, make_train_step(plain, rule, phases, phase, seed=seed, remat=False))
        for step, phase in zip(steps, phases.phases, strict=True)
      ]

    def documents(step: int) -> str:
      length = phases.phase(step - 1).tokens_per_row
      return source.describe(phases.position(step - 1), length)

    with (
      create_writers(model_dir, console=progress.show) as writer,
      create_writers(model_dir, name='eval') as eval_writer,
      RefusedLog(model_dir, int(state.skipped), documents, progress.say) as refused_log,
    ):
      log = TrainingLog(
        writer,
        functions,
        phases,
        every=log_every,
        total_steps=train_steps,
        batch_size=batch_size,
        tokens_per_byte=source.tokens_per_byte,
      )

      done, under_way = start, None
      validation_loss: dict[int, float | None] = {}

      def asked_to_stop() -> bool:
        heartbeat.beat(stage='step', step=done + 1)
        return stop.requested()

      def save(step: int, state: TrainState, metrics: StepMetrics) -> None:
        del metrics
        loss = validation_loss.pop(step, None)
        saved.save(step, state, {**record(step), 'validation_loss': loss})

      def validate(step: int, state: TrainState, metrics: StepMetrics) -> None:
        del metrics
        log.flush()
        plan = phases.phase(step - 1).planner
        try:
          found = measure(state.params, whole=step == train_steps, plan=plan, stop=asked_to_stop)
        except Preempted:
          return
        if step < train_steps:  # the last one reads the whole split, and compares with no other
          validation_loss[step] = found['loss']
        eval_writer.write_scalars(step, found)
        if jax.process_index() == 0:
          plot.write_loss_by_position(pathlib.Path(model_dir), {'validation': found})
        progress.say(f'step {step}, validation: ' + ', '.join(describe(found)))
        log.restart_clock()

      due = [
        Every(n, hook, total_steps=train_steps, start_step=start)
        for n, hook in ((eval_every, validate), (checkpoint_every, save))
      ]

      refused = refused_steps(int(state.skipped), documents)
      rewind = Rewind(saved, abstract, make_initial, checkpoint_every, refused_log.rewound)

      def look_back(step: int, metrics: StepMetrics) -> None:
        refused_log(step, metrics)
        refused(step, int(metrics.skipped))

      # Loop. A step is dispatched while the one before it runs, and at most two are under way: what
      # is read from the older one is there already.
      stop.ready(saved.describe_newest)
      progress.say('handlers ready: SIGTERM or SIGINT now saves, and ends with exit code 75')
      log.restart_clock()

      def save_now() -> None:
        if done > start:
          saved.save_now(done, state, record(done))

      with _rescue(save_now):
        for step, batch in batches(source, functions, phases, layout, batch_size, remaining):
          if asked_to_stop():
            break
          state, metrics = steps[phases.index(step)](state, batch)
          done = step + 1
          if spikes.action == 'rewind':
            state = rewind(done, state, metrics)
          log(done, metrics)
          for hook in (*due, *hooks):
            hook(done, state, metrics)
          saved.check()
          if under_way is not None:
            look_back(done - 1, under_way)
          under_way = metrics
        if under_way is not None:
          look_back(done, under_way)
        log.flush()
      progress.close()
      if done < train_steps:
        save_now()
        raise Preempted(
          f'stopped after step {done} of {train_steps}; the newest checkpoint is '
          f'{saved.describe_newest()}. Run the same command again to go on.'
        )


def program_name(phase: Phase, train_steps: int, donated: bool) -> str:
  """The name of a phase's program in the record of a checkpoint.

  It holds everything that may change on resume and changes the program: the end of the learning
  rate's schedule, the number of processes, and whether the state is donated.
  """
  kept = '' if donated else ', each state kept'
  return (
    f'{phase.chunks} x {phase.chunk_size} tokens a row, gradient through {phase.backprop_chunks}, '
    f'planner {phase.planner}, of {train_steps} steps, {jax.process_count()} processes{kept}'
  )


@contextlib.contextmanager
def _rescue(save_now: Callable[[], None]) -> Iterator[None]:
  """Saves where an unforeseen error leaves something; that error stays the one to see.

  One of several processes saves nothing: a save is made by all, and the others know of no error.
  """
  try:
    yield
  except (Diverged, StorageError):
    raise
  except Exception as error:
    if jax.process_count() > 1:
      raise
    try:
      save_now()
      error.add_note('What was trained until then was saved.')
    except Exception as second:
      error.add_note(f'What was trained since the last checkpoint could not be saved: {second}')
    raise


def _restored(
  saved: CheckpointDirectory,
  abstract: TrainState,
  record: Callable[[int], dict[str, Any]],
  allow_changed: Sequence[str],
  progress: Progress,
) -> tuple[TrainState | None, Mapping[str, Any]]:
  """The newest checkpoint, after a look at what it was trained with; None where there is none.

  Beside it its record, or an empty one where something has changed since.
  """
  step, found = saved.latest_step(), saved.latest_record()
  if step is None or found is None:
    return None, {}
  changed = compatibility.check(found, record(step), allow_changed, saved.describe_newest())
  for line in changed:
    progress.say(f'changed since the checkpoint: {line}')
  restored = saved.restore(abstract)
  assert restored is not None, 'its record was just read'
  return restored[0], {} if changed else found
