"""The lengths of a run: its steps, the steps between its reports, and its patience."""

import dataclasses
from typing import NamedTuple


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


@dataclasses.dataclass(frozen=True)
class Lengths:
  """When a run logs, evaluates, saves and ends; `train` explains and checks the numbers."""

  train_steps: int
  log_every: int
  eval_every: int
  checkpoint_every: int
  patience: int | None = None

  def is_due(self, every: int, step: int) -> bool:
    """Whether something that happens every so many steps, and after the last, follows `step`."""
    return step % every == 0 or step == self.train_steps

  def end(self, step: int, lowest: Lowest | None) -> str | None:
    """Why the run ends after `step` steps; None if it goes on."""
    if step >= self.train_steps:
      return f'train_steps={self.train_steps} are done'
    if lowest is None:
      return None
    return lowest.stops(self.patience)
