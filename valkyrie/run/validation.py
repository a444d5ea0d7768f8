"""Validation during training: a quick evaluation every so many steps, a whole one at the end."""

from collections.abc import Callable
import dataclasses
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


@dataclasses.dataclass
class Validation:
  """A hook that evaluates the state; an evaluation in progress ends when the run is to stop.

  Attributes:
    losses: the loss of each step whose quick part was evaluated. The last step reads the whole
      split, and its loss compares with no other.
  """

  evaluator: Evaluator
  curriculum: Curriculum
  train_steps: int
  model_dir: str
  log: TrainingLog
  writer: RunWriter
  should_stop: Callable[[], bool]
  say: Callable[[str], None]
  losses: dict[int, float | None] = dataclasses.field(default_factory=dict)

  def __call__(self, step: int, state: TrainState, metrics: StepMetrics) -> None:
    """Evaluates the state after `step`, counted from 1."""
    del metrics
    self.log.flush()
    is_last = step == self.train_steps
    plan = self.curriculum.phase(step - 1).planner
    try:
      found = self.evaluator(state.params, whole=is_last, plan=plan, stop=self.should_stop)
    except Preempted:
      return
    if not is_last:
      self.losses[step] = found['loss']
    self.writer.write_scalars(step, found)
    if jax.process_index() == 0:
      plot.write_loss_by_position(pathlib.Path(self.model_dir), {'validation': found})
    self.say(f'step {step}, validation: ' + ', '.join(describe(found)))
    self.log.restart_clock()
