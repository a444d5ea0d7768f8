"""The run mode `train`: parts, state, compiled steps, hooks, loop."""

from collections.abc import Callable, Sequence
import contextlib
import functools
import pathlib
import time
from typing import Annotated, NamedTuple

import gin
import jax

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.computation import computation, may_change_on_resume
from valkyrie.config.ranges import (
  Fraction,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  PositiveInt64,
  Range,
  checked,
)
from valkyrie.config.record import bindings
from valkyrie.data.tokenizer_copy import copy_tokenizer
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.distributed import heartbeat
from valkyrie.distributed.consistency import check_same_bindings
from valkyrie.distributed.preemption import Preemption
from valkyrie.errors import Preempted
from valkyrie.monitoring import memory, model_info, planned, system
from valkyrie.monitoring.log_schedule import LogSchedule, check_schedule
from valkyrie.monitoring.patience import may_pass_when_opened, patiently
from valkyrie.monitoring.profiler_port import listening_at
from valkyrie.monitoring.progress import Progress
from valkyrie.monitoring.trackers import Tracker, Tracking
from valkyrie.monitoring.training_log import Hook, TrainingLog
from valkyrie.monitoring.waiting import doing
from valkyrie.monitoring.writers import RunWriter, create_writers
from valkyrie.run.configuration_files import write_configuration, write_operative_configuration
from valkyrie.run.evaluator import Evaluator
from valkyrie.run.lengths import Lengths
from valkyrie.run.observers import Profile, Refusals, Saver, Validation
from valkyrie.run.resume import Origin, RunState
from valkyrie.run.trainer import Trainer, batches
from valkyrie.training import kernel_check
from valkyrie.training.objective import evaluations
from valkyrie.training.setup import Setup, StepSettings, check_feed, check_mixers
from valkyrie.training.spikes import RefusedSteps
from valkyrie.types import TaskFeed
from valkyrie.weights.initial import InitialWeights


class Observers(NamedTuple):
  """What happens between the steps of a run; `train` makes them."""

  log: TrainingLog
  hooks: Sequence[Hook]
  refusals: Refusals
  validation: Validation
  saver: Saver
  profile: Profile


@gin.configurable
@may_change_on_resume(
  'train_steps', 'log_every', 'eval_every', 'checkpoint_every', 'evaluator', 'checkpoints',
  'hooks', 'preemption', 'refused_steps', 'patience', 'target_loss', 'profile_steps', 'trackers',
  'profile_every', 'profiler_port', 'replication_tolerance', 'quiet',
)  # fmt: skip
@checked
def train(
  model_dir: str,
  *,
  # Parts.
  settings: Callable[[], StepSettings],
  feed: Callable[[], TaskFeed],
  evaluator: Callable[..., Evaluator],
  checkpoints: Checkpoints,
  preemption: Callable[[], Preemption] = Preemption,
  refused_steps: Callable[..., RefusedSteps] = RefusedSteps,
  # Lengths.
  train_steps: NonNegativeInt,
  log_every: LogSchedule,
  eval_every: PositiveInt64,
  checkpoint_every: PositiveInt64,
  patience: PositiveInt | None = None,
  target_loss: PositiveFloat | None = None,
  # Origin.
  initial_weights: str | None = None,
  allow_changed: Sequence[str] = (),
  # Reports.
  hooks: Sequence[Hook] = (),
  trackers: Sequence[Tracker] = (),
  profile_steps: tuple[PositiveInt, PositiveInt] | None = None,
  profile_every: PositiveInt64 | None = None,
  profiler_port: Annotated[int, Range('[1024, 49151]')] | None = None,
  replication_tolerance: Fraction = model_info.TOLERANCE,
  quiet: bool = False,
) -> None:
  """Trains until `train_steps` steps are done, from the newest checkpoint in model_dir if any.

  Args:
    model_dir: the directory of the run; docs/operations.md lists its files.
    settings, feed, evaluator, preemption, refused_steps: the classes of the parts.
    checkpoints: which steps are kept.
    train_steps: optimizer steps in all, those before a resume included. With 0, the run saves its
      first weights, initial or loaded, for the other run modes.
    log_every, eval_every, checkpoint_every: steps between these; the last step does all three.
      `log_every` can be pairs (first step, steps between two lines from this step on), such as
      ((1, 1), (100, 20)), which logs each of the first steps.
    patience: evaluations without a lower validation loss after which the run ends; None for none.
    target_loss: the validation loss, in nats per token of the quick part, at which the run ends.
    initial_weights: the source of the first weights, see `InitialWeights`; None initializes them.
    allow_changed: which differences from the run that saved to accept, see --allow_changed.
    hooks: called after every step, besides the run's own; their numbers are logged.
    trackers: receive the numbers that are logged.
    profile_steps: the first and the last step to profile, into model_dir/profile.
    profile_every: steps after which as many are profiled again; None profiles once.
    profiler_port: where jax's profiler listens, see `listening_at`; None for nowhere.
    replication_tolerance: the share of the bytes of parameters that every device may have whole
      without a warning, in a layout that splits some.
    quiet: print only errors. All lines go to model_dir/log.txt, too.

  Raises:
    ValkyrieError: a subclass says what does not fit, for example too little memory.
    Preempted: the process was asked to stop, and has saved.
  """
  began = time.perf_counter()
  lengths = Lengths(train_steps, eval_every, checkpoint_every, patience, target_loss)
  check_schedule('train.log_every', log_every)
  weights = None
  if initial_weights is not None:
    weights = InitialWeights(initial_weights)
  origin = Origin(weights, allow_changed)
  progress = Progress(train_steps, quiet=quiet)
  profile = Profile(model_dir, profile_steps, profile_every, progress.say)
  with contextlib.ExitStack() as stack:
    stop = stack.enter_context(preemption())
    heartbeat.start(model_dir)
    check_same_bindings(computation(bindings()))

    # Parts. A misfit is found before anything is read, written or compiled.
    with doing('checking the parts of the run', progress.say):
      setup = Setup(settings())
      if setup.settings.check_mixers:
        check_mixers(setup.settings.model)
    directory = stack.enter_context(checkpoints.open(model_dir, progress.say))
    stack.callback(profile.close)  # before the directory is let go
    log_file = None
    if jax.process_index() == 0:
      log_file = pathlib.Path(model_dir, 'log.txt')
    progress.log_to(log_file)
    progress.say(*system.lines(), *setup.remarks())
    stack.enter_context(listening_at(profiler_port, progress.say))
    progress.say(*model_info.replication(setup.state.params, replication_tolerance))
    progress.say(*planned.lines(setup))
    with doing('comparing kernels', progress.say):
      setup = setup.with_kernels(kernel_check.agreeing_lengths(setup, progress.say))
    tokens = feed()
    check_feed(setup.model, tokens, setup.settings.batch_size)
    if weights and directory.latest_step() is None:  # a resumed run no longer needs them
      weights.check(setup.model, setup.settings.model, tokens.vocabulary.fingerprint)
    evaluate = evaluator(setup.language_model, setup.partitioner, terms=evaluations(setup.terms))
    evaluate.open()

    # State: initial, or of the newest checkpoint. A new run has its table before.
    progress.say(*memory.lines(' before the state'))
    if jax.process_index() == 0 and directory.latest_step() is None:
      write_table = functools.partial(planned.write, pathlib.Path(model_dir), setup)
      patiently(write_table, checkpoints.patience, progress.say, passes=may_pass_when_opened)
    fits = memory.explained(lambda: 'the state of the run has no room')
    with fits, doing('making or restoring the state', progress.say):
      run = RunState.restore(setup, tokens, lengths, directory, origin, progress.say)
    trainer = Trainer(run, directory, origin, stop, progress.say)
    skipped = int(run.state.skipped)
    budget = refused_steps(skipped, lambda step: run.reading.describe(step - 1))
    directory.make_room()
    evaluate.record_data(
      model_dir,
      'eval',
      may_differ=True,
      patience=checkpoints.patience,
      say=progress.say,
    )
    memory_lines = memory.lines(' with the state')
    progress.say(*memory_lines, run.reading.plan(train_steps))
    with doing('evaluating the first weights', progress.say):
      trainer.check_weights(evaluate)
    if jax.process_index() == 0:
      describe = functools.partial(
        _write_description, pathlib.Path(model_dir), setup, tokens.vocabulary
      )
      patiently(describe, checkpoints.patience, progress.say, passes=may_pass_when_opened)
    if done := run.done():
      if directory.latest_step() is None:
        directory.save_now(run.step, run.state, run.record())
      else:
        progress.say(f'nothing to do: {done}')
      return

    # Writers. They import their packages in threads while the steps are compiled.
    tracking = Tracking(trackers, model_dir, run.step, progress.say)
    stack.callback(tracking.close)
    shared = {'begin': run.step + 1, 'say': progress.say}
    eval_writer = stack.enter_context(
      create_writers(model_dir, name='eval', also=[tracking.stream('eval')], **shared)
    )
    writer = stack.enter_context(
      create_writers(model_dir, also=[progress.show, tracking.stream('train')], **shared)
    )

    # Steps. Every shape is compiled before the first step is taken.
    stack.enter_context(memory.explained(lambda: trainer.step_memory))
    trainer.compile()

    # Observers.
    _write_settings(writer, run.step)
    refusals = Refusals(model_dir, budget, progress.say, checkpoints.patience)
    stack.enter_context(refusals)
    log = TrainingLog(
      writer, setup, run.reading, every=log_every, total_steps=train_steps, check=refusals,
      began=began, say=progress.say,
    )  # fmt: skip
    validation = Validation(
      evaluate, run, trainer.should_stop, model_dir, log, eval_writer, progress.say
    )
    saver = Saver(run, directory, log, progress.say)
    stop.ready(directory.describe_newest)
    progress.say(
      'handlers ready: SIGTERM, SIGINT, SIGHUP or SIGQUIT now saves, and ends with exit code 75'
    )

    _take_steps(trainer, Observers(log, hooks, refusals, validation, saver, profile))
    progress.close()
    progress.say(*memory.lines(' at the end'))
    saver.save_now()
    done = run.done()
    if not done:
      raise Preempted(
        f'stopped after step {run.step} of {train_steps}; the newest checkpoint is '
        f'{directory.describe_newest()}. Run the same command again to continue.'
      )
    if run.step < train_steps:
      progress.say(done)


def _take_steps(trainer: Trainer, observers: Observers) -> None:
  """Takes the steps that are left, until the run is done or is to stop.

  A step is dispatched while the one before it runs, and the metrics of the older one are read then:
  at most two steps are in flight, and no device waits for the host.
  """
  run = trainer.run
  setup = run.setup
  lengths = run.lengths
  log, hooks, refusals, validation, saver, profile = observers
  log.clock(runs=True)
  with saver.saving_on_error():
    steps = range(run.step, lengths.train_steps)
    for batch in batches(run.reading, setup, steps):
      if run.done() or trainer.should_stop():
        break
      with profile.step(run.step + 1, log.untimed):
        metrics = trainer.take_step(batch)
        log(run.step, metrics)
      if setup.loss_spikes.action == 'rewind' and bool(metrics.spiked):
        with log.untimed():
          refusals.rewound(run.step, trainer.rewind())
      if run.step == run.start + 2:  # by now the first step has ended
        trainer.say(*memory.lines(' after the first step'))
      log.call_hooks(hooks, run.step, run.state, metrics)
      if lengths.is_due(lengths.eval_every, run.step):
        validation()
      if lengths.is_due(lengths.checkpoint_every, run.step):
        saver()
      saver.retry()
    log.flush()


def _write_settings(writer: RunWriter, step: int) -> None:
  """Writes the configuration to TensorBoard."""
  bound = bindings()
  rows = []
  for name, value in sorted(bound.items()):
    rows.append(f'| `{name}` | `{value}` |')
  table = '\n'.join(['| binding | value |', '| --- | --- |', *rows])
  writer.write_texts(step, {'configuration': table})
  hparams = {}
  for name, value in bound.items():
    if isinstance(value, int | float | str):
      hparams[name] = value
  writer.write_hparams(hparams)


def _write_description(model_dir: pathlib.Path, setup: Setup, vocabulary: Vocabulary) -> None:
  """Writes the configuration, the tokenizer, and the table of parameters."""
  write_configuration(model_dir)
  write_operative_configuration(model_dir)
  planned.write(model_dir, setup)
  copy_tokenizer(vocabulary, model_dir)
