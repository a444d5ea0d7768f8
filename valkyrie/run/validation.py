"""Validation during training: a quick evaluation every so many steps, a whole one at the end."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
import dataclasses
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from valkyrie.errors import Preempted
from valkyrie.monitoring import pictures
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.writers import RunWriter
from valkyrie.run.evaluator import Evaluator
from valkyrie.training.curriculum import Curriculum
from valkyrie.training.train_step import StepMetrics, TrainState


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
class Validation:
  """A hook that evaluates the state; an evaluation in progress ends when the run is to stop.

  Attributes:
    drawing: the thread that draws the picture.
    losses: the loss of the quick part of the split after each step that was evaluated. The last
      step reads the whole split, too.
    lowest: of these losses and those before a resume; None before the first.
  """

  evaluator: Evaluator
  curriculum: Curriculum
  train_steps: int
  model_dir: str
  log: TrainingLog
  writer: RunWriter
  should_stop: Callable[[], bool]
  say: Callable[[str], None]
  drawing: Executor
  losses: dict[int, float | None] = dataclasses.field(default_factory=dict)
  lowest: Lowest | None = None
  _picture: tuple[int, Future[np.ndarray]] | None = None

  def __call__(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """Evaluates the state after `step`, counted from 1."""
    del metrics
    self.log.flush()
    is_last = step == self.train_steps
    plan = self.curriculum.phase(step - 1).planner
    try:
      found = self.evaluator(state.evaluated, whole=is_last, plan=plan, stop=self.should_stop)
    except Preempted:
      return
    self.losses[step] = loss = found.get('quick_loss', found['loss'])
    self._compare(step, loss)
    self.writer.write_scalars(step, found)
    if jax.process_index() == 0:
      self.check_picture()
      self._picture = (
        step,
        self.drawing.submit(
          pictures.write_loss_by_position, pathlib.Path(self.model_dir), {'validation': found}
        ),
      )
    split = 'the whole validation split' if is_last else 'validation'
    self.say(f'step {step}, {split}: ' + ', '.join(describe(found)))
    self.log.restart_clock()

  def check_picture(self) -> None:
    """Waits for the picture that is being drawn; raises a StorageError if it cannot be written."""
    if self._picture is not None:
      (step, picture), self._picture = self._picture, None
      self.writer.write_images(step, {'validation/loss_by_position': picture.result()[None]})

  def _compare(self, step: int, loss: float | None) -> None:
    if loss is None:
      return
    if self.lowest is None or loss < self.lowest.loss:
      self.lowest = Lowest(step, loss)
    else:
      self.lowest = self.lowest._replace(since=self.lowest.since + 1)
