"""The lengths of a run: its steps, the steps between its reports, and when it ends early."""

import dataclasses
from typing import NamedTuple


class Lowest(NamedTuple):
  """The lowest validation loss of a run, after `step`, and the evaluations since then."""

  step: int
  loss: float
  since: int = 0


@dataclasses.dataclass(frozen=True)
class Lengths:
  """When a run evaluates, saves and ends; `train` explains and checks the numbers."""

  train_steps: int
  eval_every: int
  checkpoint_every: int
  patience: int | None = None
  target_loss: float | None = None

  def is_due(self, every: int, step: int) -> bool:
    """Whether something that happens every so many steps, and after the last, follows `step`."""
    return step % every == 0 or step == self.train_steps

  def end(self, step: int, lowest: Lowest | None) -> str | None:
    """Why the run ends after `step` steps; None if it goes on."""
    if step >= self.train_steps:
      return f'train_steps={self.train_steps} are done'
    return self.early_end(lowest)

  def early_end(self, lowest: Lowest | None) -> str | None:
    """Why the run ends before its last step; None if it does not."""
    if lowest is None:
      return None
    if self.target_loss is not None and lowest.loss <= self.target_loss:
      return (
        f'stopped early: the validation loss {lowest.loss:.4f}, after step {lowest.step}, has '
        f'reached train.target_loss={self.target_loss}'
      )
    if self.patience is not None and lowest.since >= self.patience:
      return (
        f'stopped early: {lowest.since} evaluations found no lower loss than {lowest.loss:.4f}, '
        f'after step {lowest.step} (train.patience={self.patience})'
      )
    return None
