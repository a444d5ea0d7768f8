"""The outcomes of the steps of a run, read one step behind the devices."""

from collections.abc import Callable
import dataclasses

from valkyrie.monitoring.training_log import RefusedLog
from valkyrie.training.train_step import StepMetrics


@dataclasses.dataclass
class Refusals:
  """Logs each refused step, and ends a run that refuses too many.

  Attributes:
    log: gets a line for each refused step.
    check_budget: called with a step and the number of steps refused until then; raises Diverged.
  """

  log: RefusedLog
  check_budget: Callable[[int, int], None]

  def __post_init__(self):
    self._in_flight: list[tuple[int, StepMetrics]] = []

  def __call__(self, step: int, metrics: StepMetrics) -> None:
    """Takes the metrics of `step`, which runs, and reads the metrics of the step before."""
    self._in_flight.append((step, metrics))
    if len(self._in_flight) > 1:
      self._read_oldest()

  def flush(self) -> None:
    """Waits for the last step, and reads its metrics."""
    while self._in_flight:
      self._read_oldest()

  def _read_oldest(self) -> None:
    step, metrics = self._in_flight.pop(0)
    self.log(step, metrics)
    self.check_budget(step, int(metrics.skipped))
