"""Validation during training: a quick evaluation every so many steps, a whole one at the end."""

from collections.abc import Callable
import pathlib

import jax

from valkyrie.errors import Preempted
from valkyrie.monitoring import plot
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.training_log import TrainingLog
from valkyrie.monitoring.writers import RunWriter
from valkyrie.run.evaluator import Evaluator
from valkyrie.training.curriculum import Curriculum
from valkyrie.training.train_step import StepMetrics, TrainState


class Validation:
  """A hook that evaluates the state; an evaluation in progress ends when the run is to stop.

  Attributes:
    losses: the loss of each step whose quick part was evaluated. The last step reads the whole
      split, and its loss compares with no other.
  """

  def __init__(
    self,
    evaluator: Evaluator,
    curriculum: Curriculum,
    train_steps: int,
    *,
    model_dir: str,
    log: TrainingLog,
    writer: RunWriter,
    should_stop: Callable[[], bool],
    say: Callable[[str], None],
  ):
    self.losses: dict[int, float | None] = {}
    self._evaluator, self._curriculum, self._train_steps = evaluator, curriculum, train_steps
    self._model_dir, self._log, self._writer = pathlib.Path(model_dir), log, writer
    self._should_stop, self._say = should_stop, say

  def __call__(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """Evaluates the state after `step`, counted from 1."""
    del metrics
    self._log.flush()
    is_last = step == self._train_steps
    plan = self._curriculum.phase(step - 1).planner
    try:
      found = self._evaluator(state.params, whole=is_last, plan=plan, stop=self._should_stop)
    except Preempted:
      return
    if not is_last:
      self.losses[step] = found['loss']
    self._writer.write_scalars(step, found)
    if jax.process_index() == 0:
      plot.write_loss_by_position(self._model_dir, {'validation': found})
    self._say(f'step {step}, validation: ' + ', '.join(describe(found)))
    self._log.restart_clock()
