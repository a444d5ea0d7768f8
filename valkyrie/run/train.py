"""The run mode `train`: parts, state, compiled steps, hooks, loop."""

from collections.abc import Callable, Sequence
import contextlib
import pathlib
import time

import gin
import jax

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config import ranges
from valkyrie.config.computation import computation, may_change_on_resume
from valkyrie.config.record import bindings
from valkyrie.data import vocabularies
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.distributed import heartbeat
from valkyrie.distributed.consistency import check_same_bindings
from valkyrie.distributed.preemption import Preemption
from valkyrie.errors import Preempted
from valkyrie.monitoring import memory, report
from valkyrie.monitoring.progress import Progress
from valkyrie.monitoring.trackers import Tracker, Tracking
from valkyrie.monitoring.training_log import Hook, TrainingLog
from valkyrie.monitoring.waiting import doing
from valkyrie.monitoring.writers import RunWriter, create_writers
from valkyrie.run.configuration_files import write_configuration, write_operative_configuration
from valkyrie.run.evaluator import Evaluator
from valkyrie.run.observers import Profile, Refusals, Saver, Validation
from valkyrie.run.trainer import Trainer, batches
from valkyrie.sharding import ambient
from valkyrie.storage import whole_file
from valkyrie.training.objective import evaluations
from valkyrie.training.setup import Setup, StepSettings, check_feed, check_mixers
from valkyrie.training.spikes import RefusedSteps
from valkyrie.types import TaskFeed
from valkyrie.weights.initial import InitialWeights


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
  ranges.check('train', train_steps=train_steps, log_every=log_every, patience=patience)
  ranges.check('train', eval_every=eval_every, checkpoint_every=checkpoint_every)
  progress = Progress(train_steps, quiet=quiet)
  profile = Profile(model_dir, profile_steps, progress.say)
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
    progress.log_to(pathlib.Path(model_dir, 'log.txt') if jax.process_index() == 0 else None)
    progress.say(*report.system_lines(), *setup.remarks())
    with doing('comparing kernels', progress.say):
      agreed = setup.check_kernels(progress.say)
    stack.enter_context(ambient.within(kernels=agreed))
    tokens = feed()
    check_feed(setup.model, tokens, setup.settings.batch_size)
    weights = None if initial_weights is None else InitialWeights(initial_weights)
    if weights and directory.latest_step() is None:  # a resumed run no longer needs them
      weights.check_source()
    evaluate = evaluator(setup.language_model, setup.partitioner, terms=evaluations(setup.terms))
    evaluate.open()

    # State: initial, or of the newest checkpoint.
    with doing('making or restoring the state', progress.say):
      trainer = Trainer(
        setup, tokens, directory, stop, train_steps, patience, allow_changed, weights, progress.say
      )
    budget = refused_steps(
      int(trainer.state.skipped), lambda step: trainer.reading.describe(step - 1)
    )
    directory.make_room()
    evaluate.record_data(model_dir, 'eval', may_differ=True)
    progress.say(*memory.lines(' with the state'), trainer.reading.plan(train_steps))
    with doing('evaluating the first weights', progress.say):
      trainer.check_weights(evaluate)
    if jax.process_index() == 0:
      _write_description(pathlib.Path(model_dir), setup, tokens.vocabulary)
    if done := trainer.done():
      progress.say(f'nothing to do: {done}')
      return

    # Writers. They import their packages in threads while the steps are compiled.
    tracking = Tracking(trackers, model_dir, trainer.start, progress.say)
    stack.callback(tracking.close)
    shared = {'begin': trainer.start + 1, 'say': progress.say}
    eval_writer = stack.enter_context(
      create_writers(model_dir, name='eval', also=[tracking.stream('eval')], **shared)
    )
    writer = stack.enter_context(
      create_writers(model_dir, also=[progress.show, tracking.stream('train')], **shared)
    )

    # Steps. Every shape is compiled before the first step is taken.
    stack.enter_context(memory.explained(lambda: trainer.needs))
    trainer.compile()

    # Observers.
    _write_settings(writer, trainer.start)
    refusals = stack.enter_context(Refusals(model_dir, budget, progress.say))
    log = TrainingLog(
      writer, setup, trainer.reading, every=log_every, total_steps=train_steps, check=refusals,
      began=began, say=progress.say,
    )  # fmt: skip
    validation = Validation(evaluate, trainer, model_dir, log, eval_writer)
    saver = Saver(trainer, log)

    # Loop. A step is dispatched while the one before it runs, and the metrics of the older one are
    # read then: at most two steps are in flight, and no device waits for the host.
    stop.ready(directory.describe_newest)
    progress.say(
      'handlers ready: SIGTERM, SIGINT, SIGHUP or SIGQUIT now saves, and ends with exit code 75'
    )
    log.clock(runs=True)
    with saver.saving_on_error():
      for batch in batches(trainer.reading, setup, range(trainer.step, train_steps)):
        done = trainer.done()
        if done or trainer.should_stop():
          break
        with profile.step(trainer.step + 1, log.untimed):
          metrics = trainer.take_step(batch)
          log(trainer.step, metrics)
        if setup.loss_spikes.action == 'rewind' and bool(metrics.spiked):
          with log.untimed():
            refusals.rewound(trainer.step, trainer.rewind(checkpoint_every))
        if trainer.step == trainer.start + 2:  # whose dispatch the first one's end has followed
          progress.say(*memory.lines(' after the first step'))
        log.call_hooks(hooks, trainer.step, trainer.state, metrics)
        for every, act in ((eval_every, validation), (checkpoint_every, saver)):
          if trainer.step % every == 0 or trainer.step == train_steps:
            act()
        saver.retry()
      log.flush()
    progress.close()
    progress.say(*memory.lines(' at the end'))
    saver.save_now()
    done = trainer.done()
    if not done:
      raise Preempted(
        f'stopped after step {trainer.step} of {train_steps}; the newest checkpoint is '
        f'{directory.describe_newest()}. Run the same command again to continue.'
      )
    if trainer.step < train_steps:
      progress.say(done)


def _write_settings(writer: RunWriter, step: int) -> None:
  """Writes the configuration to TensorBoard."""
  bound = bindings()
  rows = [f'| `{name}` | `{value}` |' for name, value in sorted(bound.items())]
  table = '\n'.join(['| binding | value |', '| --- | --- |', *rows])
  writer.write_texts(step, {'configuration': table})
  writer.write_hparams({n: v for n, v in bound.items() if isinstance(v, int | float | str)})


def _write_description(model_dir: pathlib.Path, setup: Setup, vocabulary: Vocabulary) -> None:
  """Writes the configuration, the tokenizer, and the table of parameters."""
  write_configuration(model_dir)
  write_operative_configuration(model_dir)
  axes = setup.model.parameter_axes(setup.partitioner.parameter_axes)
  text = report.model_info(setup.state.params, axes, setup.model.counts())
  whole_file.write_version(model_dir / 'model_info.txt', text.encode())
  vocabularies.copy(vocabulary, model_dir)
