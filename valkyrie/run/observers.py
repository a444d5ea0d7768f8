"""Observers of a run between its steps: refused steps, validation and saves."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
import contextlib
import dataclasses
import os
import pathlib
import time
from typing import Any

import jax
import numpy as np

from valkyrie.errors import Diverged, Preempted, StorageError
from valkyrie.monitoring import pictures
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.metrics import text_metrics
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.writers import RunWriter
from valkyrie.run.evaluator import Evaluator
from valkyrie.run.trainer import Lowest, Trainer
from valkyrie.training.train_step import StepMetrics, TrainState


@dataclasses.dataclass
class Refusals(contextlib.AbstractContextManager['Refusals']):
  """Writes model_dir/refused_steps.jsonl, and ends a run that refuses too many steps.

    {"step": 412, "why": "loss spike", "loss": 9.1, "grad_norm": 3.0, "read": "these documents .."}
    {"step": 412, "rewound_to": 400}

  Only process 0 writes the file. A context manager that closes it.

  Attributes:
    skipped: number of steps refused so far.
    describe: names the documents of a step, given its number, counted from 1.
    check_budget: called with a step and the number of steps refused until then; raises Diverged.
  """

  model_dir: str | os.PathLike
  skipped: int
  describe: Callable[[int], str]
  say: Callable[[str], None]
  check_budget: Callable[[int, int], None]

  def __post_init__(self):
    writes = jax.process_index() == 0
    self._lines = JsonLines(pathlib.Path(self.model_dir, 'refused_steps.jsonl')) if writes else None
    self._running: tuple[int, StepMetrics] | None = None

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Takes the metrics of `step`, which runs, and reads the metrics of the step before.

    Raises Diverged if the budget is spent, and a StorageError if the file cannot be written.
    """
    self.flush((step, metrics))

  def flush(self, running: tuple[int, StepMetrics] | None = None) -> None:
    """Waits for the last step, and reads its metrics; raises as a call does."""
    last, self._running = self._running, running
    if last is None:
      return
    step, metrics = last
    before, self.skipped = self.skipped, int(metrics.skipped)
    if self.skipped > before and self._lines is not None:
      why = 'loss spike' if bool(metrics.spiked) else 'not finite'
      loss = text_metrics(float(metrics.sums.loss), float(metrics.sums.weight), None)['loss']
      line = {'step': step, 'why': why, 'loss': loss, 'grad_norm': float(metrics.grad_norm)}
      self._lines.write({**line, 'read': self.describe(step)})
      self.say(f'step {step} is refused: {why} (loss {loss:.4g})')
    self.check_budget(step, self.skipped)

  def rewound(self, step: int, goal: int) -> None:
    """Writes that step `step` was rewound to the parameters and optimizer of step `goal`."""
    if self._lines is not None:
      self._lines.write({'step': step, 'rewound_to': goal})
    self.say(f'step {step} is a loss spike: continuing with the parameters of step {goal}')

  def __exit__(self, *error: object) -> None:
    if self._lines is not None:
      self._lines.close()


@dataclasses.dataclass
class Validation:
  """A hook that evaluates the state; an evaluation in progress ends when the run is to stop.

  Attributes:
    drawing: the thread that draws the picture.
    losses: the loss of the quick part of the split after each step that was evaluated. The last
      step reads the whole split, too.
    lowest: of these losses and those before a resume; None before the first.
  """

  evaluator: Evaluator
  trainer: Trainer
  train_steps: int
  model_dir: str
  log: TrainingLog
  writer: RunWriter
  drawing: Executor

  def __post_init__(self):
    self.losses: dict[int, float | None] = {}
    self.lowest = self.trainer.lowest
    self._picture: tuple[int, Future[np.ndarray]] | None = None

  def __call__(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """Evaluates the state after `step`, counted from 1."""
    del metrics
    self.log.flush()
    is_last = step == self.train_steps
    plan, stop = self.trainer.reading.curriculum.phase(step - 1).planner, self.trainer.should_stop
    try:
      found = self.evaluator(state.evaluated, whole=is_last, plan=plan, stop=stop)
    except Preempted:
      return
    self.losses[step] = loss = found.get('quick_loss', found['loss'])
    if loss is not None:
      if self.lowest is None or loss < self.lowest.loss:
        self.lowest = Lowest(step, loss)
      else:
        self.lowest = self.lowest._replace(since=self.lowest.since + 1)
    self.writer.write_scalars(step, found)
    if jax.process_index() == 0:
      self.check_picture()
      draw, place = pictures.write_loss_by_position, pathlib.Path(self.model_dir)
      self._picture = step, self.drawing.submit(draw, place, {'validation': found})
    split = 'the whole validation split' if is_last else 'validation'
    self.trainer.say(f'step {step}, {split}: ' + ', '.join(describe(found)))

  def check_picture(self) -> None:
    """Waits for the picture that is being drawn; raises a StorageError if it cannot be written."""
    if self._picture is not None:
      (step, picture), self._picture = self._picture, None
      self.writer.write_images(step, {'validation/loss_by_position': picture.result()[None]})


@dataclasses.dataclass
class Saver:
  """A hook that saves the state of a run in the background.

  Attributes:
    refusals, log: they write the lines of the steps done before a save.
    patience: of the run; a follower of the run ends at a step that was saved after it was used up.
  """

  trainer: Trainer
  validation: Validation
  refusals: Refusals
  log: TrainingLog
  patience: int | None
  _saved: float = dataclasses.field(default_factory=time.perf_counter, init=False)

  def __call__(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """Saves the state after `step`, counted from 1."""
    del metrics
    self.flush()
    with self.log.untimed():
      began, before = time.perf_counter(), self._saved
      self.trainer.directory.save(step, state, self._record())
      self._saved = time.perf_counter()
    if (waited := self._saved - began) > max(1, 0.1 * (self._saved - before)):
      self.trainer.say(
        f'the run waited {waited:.1f} s of {self._saved - before:.1f} for the save of step {step}: '
        'a larger checkpoint_every saves less often'
      )

  def retry(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """A hook that saves again after a save that failed, and raises if the directory is lost."""
    if self.trainer.directory.is_due(step):
      self(step, state, metrics)
    self.trainer.directory.check()

  def flush(self) -> None:
    """Waits for the steps done, and writes their lines."""
    self.refusals.flush()
    self.log.flush()

  def save_now(self, patiently: bool = True) -> None:
    """Saves the state and waits, unless no step was taken or it is saved already."""
    trainer = self.trainer
    if trainer.step > trainer.start:
      trainer.directory.save_now(trainer.step, trainer.state, self._record(), patiently)

  @contextlib.contextmanager
  def saving_on_error(self) -> Iterator[None]:
    """Saves the state after an unforeseen error inside, which stays the one that is raised.

    With several processes nothing is saved: a save needs all, and the others see no error.
    """
    try:
      yield
    except (Diverged, StorageError):
      raise
    except Exception as error:
      if jax.process_count() > 1:
        raise
      with contextlib.suppress(Exception):  # the state is worth more than a line
        self.flush()
      try:
        self.save_now(patiently=False)
        error.add_note('The state before the error was saved.')
      except Exception as second:
        error.add_note(f'The steps since the last checkpoint could not be saved: {second}')
      raise

  def _record(self) -> dict[str, Any]:
    lowest = self.validation.lowest
    return self.trainer.record() | {
      'lowest': lowest,
      'stopped': lowest and lowest.stops(self.patience),
      'validation_loss': self.validation.losses.get(self.trainer.step),
    }
