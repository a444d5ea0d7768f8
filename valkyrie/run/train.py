"""The run mode `train`: parts, state, compiled steps, hooks, loop."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import pathlib
import time

import gin
import jax

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.computation import computation, may_change_on_resume
from valkyrie.config.record import bindings, write_configuration, write_operative_configuration
from valkyrie.data import vocabularies
from valkyrie.distributed import heartbeat
from valkyrie.distributed.consistency import check_same_bindings
from valkyrie.distributed.preemption import Preemption
from valkyrie.errors import Preempted, check_count
from valkyrie.models.layers import check_sizes
from valkyrie.monitoring import memory, report
from valkyrie.monitoring.hooks import Every, Hook, Profile
from valkyrie.monitoring.progress import Progress
from valkyrie.monitoring.trackers import Tracker, Tracking
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.writers import RunWriter, create_writers
from valkyrie.run import memory_limits
from valkyrie.run.evaluator import Evaluator
from valkyrie.run.observers import Refusals, Saver, Validation
from valkyrie.run.trainer import InitialState, Lowest, Trainer, batches
from valkyrie.storage import whole_file
from valkyrie.training.objective import evaluations
from valkyrie.training.setup import Setup, StepSettings, check_mixers, check_vocabulary
from valkyrie.training.spikes import RefusedSteps
from valkyrie.types import TaskFeed


@gin.configurable
@may_change_on_resume(
  'train_steps', 'log_every', 'eval_every', 'checkpoint_every', 'evaluator', 'checkpoints',
  'hooks', 'preemption', 'refused_steps', 'patience', 'profile_steps', 'trackers',
  'quiet',
)  # fmt: skip
def train(
  model_dir: str,
  *,
  settings: Callable[[], StepSettings],
  feed: Callable[[], TaskFeed],
  train_steps: int,
  log_every: int,
  eval_every: int,
  checkpoint_every: int,
  evaluator: Callable[..., Evaluator],
  checkpoints: Checkpoints,
  initial_weights: str | None = None,
  patience: int | None = None,
  profile_steps: tuple[int, int] | None = None,
  hooks: Sequence[Hook] = (),
  trackers: Sequence[Tracker] = (),
  preemption: Callable[[], Preemption] = Preemption,
  refused_steps: Callable[..., RefusedSteps] = RefusedSteps,
  allow_changed: Sequence[str] = (),
  quiet: bool = False,
) -> None:
  """Trains until `train_steps` steps are done, from the newest checkpoint in model_dir if any.

  Args:
    model_dir: the directory of the run; docs/operations.md lists its files.
    train_steps: optimizer steps in all, those before a resume included.
    log_every, eval_every, checkpoint_every: steps between these; the last step does all three.
    initial_weights: the source of the first weights, see `InitialWeights`; None initializes them.
    patience: evaluations without a lower validation loss after which the run ends; None for none.
    profile_steps: the first and the last step to profile, into model_dir/profile.
    hooks: called after every step, besides the run's own; their numbers are logged.
    trackers: receive the numbers that are logged.
    allow_changed: of compatibility.KINDS, the accepted differences to the run that saved.
    quiet: print only errors. All lines go to model_dir/log.txt, too.

  Raises:
    ValkyrieError: of the kind that names the misfit, such as too little memory.
    Preempted: the process was asked to stop, and has saved.
  """
  began = time.perf_counter()
  check_sizes('train', train_steps=train_steps, patience=1 if patience is None else patience)
  check_count('train.train_steps', train_steps)
  profile = Profile(model_dir, profile_steps)
  with contextlib.ExitStack() as stack:
    stack.callback(profile.close)
    stop = stack.enter_context(preemption())
    heartbeat.start(model_dir)
    check_same_bindings(computation(bindings()))

    # Parts. A misfit is found before anything is read, written or compiled.
    setup = Setup(settings())
    if setup.settings.check_mixers:
      check_mixers(setup.settings.model)
    progress = Progress(train_steps, quiet=quiet)
    directory = stack.enter_context(checkpoints.open(model_dir, progress.say))
    progress.log_to(pathlib.Path(model_dir, 'log.txt') if jax.process_index() == 0 else None)
    progress.say(*report.system_lines(), *setup.remarks())
    tokens = feed()
    check_vocabulary(setup.model, tokens)
    initial = InitialState(setup, tokens.vocabulary.fingerprint, initial_weights, progress.say)
    if directory.latest_step() is None:  # a resumed run no longer needs them
      initial.check_source()
    evaluate = evaluator(setup.language_model, setup.partitioner, terms=evaluations(setup.terms))
    evaluate.open()
    evaluate.record_data(model_dir, 'eval', may_differ=True)

    # State: initial, or of the newest checkpoint.
    trainer = Trainer(setup, tokens, directory, stop, allow_changed, initial, progress.say)
    progress.say(*memory.lines(' with the state'), trainer.reading.plan(train_steps))
    initial.check(evaluate, trainer.state, trainer.should_stop)
    if jax.process_index() == 0:
      _write_description(model_dir, setup)
      vocabularies.copy(tokens.vocabulary, pathlib.Path(model_dir))
    if done := _done(trainer.step, train_steps, trainer.lowest, patience):
      progress.say(f'nothing to do: {done}')
      return

    # Steps. Every shape is compiled before the first step is taken.
    stack.enter_context(memory_limits.explained(lambda: trainer.needs))
    trainer.compile(train_steps)

    # Observers.
    tracking = Tracking(trackers, model_dir, trainer.start, progress.say)
    stack.callback(tracking.close)
    eval_writer = stack.enter_context(
      create_writers(model_dir, name='eval', also=[tracking.stream('eval')])
    )
    writer = stack.enter_context(
      create_writers(model_dir, also=[progress.show, tracking.stream('train')])
    )
    _write_settings(writer, trainer.start)
    log = TrainingLog(
      writer, setup, trainer.reading, every=log_every, total_steps=train_steps, began=began
    )
    skipped = int(trainer.state.skipped)
    budget = refused_steps(skipped, trainer.documents)
    refusals = stack.enter_context(
      Refusals(model_dir, skipped, trainer.documents, progress.say, budget)
    )
    drawing = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix='plot'))
    validation = Validation(evaluate, trainer, train_steps, model_dir, log, eval_writer, drawing)
    stack.callback(validation.check_picture)
    saver = Saver(trainer, validation, refusals, log, patience)

    def every(n: int, hook: Hook) -> Hook:
      return Every(n, hook, total_steps=train_steps, start_step=trainer.start)

    observers = *hooks, every(eval_every, validation), every(checkpoint_every, saver), saver.retry

    # Loop. A step is dispatched while the one before it runs, and the metrics of the older one are
    # read then: at most two steps are in flight, and no device waits for the host.
    stop.ready(directory.describe_newest)
    progress.say(
      'handlers ready: SIGTERM, SIGINT, SIGHUP or SIGQUIT now saves, and ends with exit code 75'
    )
    log.clock(runs=True)
    with saver.saving_on_error():
      for batch in batches(trainer.reading, setup, range(trainer.step, train_steps)):
        done = _done(trainer.step, train_steps, validation.lowest, patience)
        if done or trainer.should_stop():
          break
        with profile.step(trainer.step + 1, log.untimed):
          metrics = trainer.take_step(batch)
          log(trainer.step, metrics)
        if setup.loss_spikes.action == 'rewind' and bool(metrics.spiked):
          with log.untimed():
            refusals.rewound(trainer.step, trainer.rewind(checkpoint_every))
        refusals(trainer.step, metrics)
        if trainer.step == trainer.start + 2:  # whose dispatch the first one's end has followed
          progress.say(*memory.lines(' after the first step'))
        for observe in observers:
          pauses = getattr(observe, 'pauses', lambda step: False)(trainer.step)
          with log.untimed() if pauses else contextlib.nullcontext():
            log.note(observe(trainer.step, trainer.state, metrics))
      saver.flush()
    progress.close()
    progress.say(*memory.lines(' at the end'))
    saver.save_now()
    if trainer.step == train_steps:
      return
    if done := _done(trainer.step, train_steps, validation.lowest, patience):
      progress.say(done)
      return
    raise Preempted(
      f'stopped after step {trainer.step} of {train_steps}; the newest checkpoint is '
      f'{directory.describe_newest()}. Run the same command again to continue.'
    )


def _done(step: int, train_steps: int, lowest: Lowest | None, patience: int | None) -> str | None:
  """Why no step is left; None if one is."""
  if step >= train_steps:
    return f'train_steps={train_steps} are done'
  return lowest and lowest.stops(patience)


def _write_settings(writer: RunWriter, step: int) -> None:
  """Writes the configuration to TensorBoard."""
  bound = bindings()
  writer.write_texts(step, {'configuration': report.as_markdown(bound)})
  writer.write_hparams({n: v for n, v in bound.items() if isinstance(v, int | float | str)})


def _write_description(model_dir: str, setup: Setup) -> None:
  """Writes the configuration, and the table of parameters."""
  write_configuration(model_dir)
  write_operative_configuration(model_dir)
  axes = setup.model.parameter_axes(setup.partitioner.parameter_axes)
  text = report.model_info(setup.state.params, axes, setup.model.counts())
  whole_file.write(pathlib.Path(model_dir, 'model_info.txt'), text)
