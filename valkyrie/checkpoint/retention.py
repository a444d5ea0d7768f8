"""The steps of a run that are kept."""

from collections.abc import Sequence

from valkyrie.checkpoint import steps
from valkyrie.checkpoint.steps import Steps


def superseded(
  run_steps: Steps, saved: Sequence[int], keep: int, keep_period: int | None, keep_best: int
) -> list[int]:
  """The steps that are not kept, of all `saved` ones in order; never the newest one.

  For the numbers to keep, see `manager.Checkpoints`.
  """
  best = steps.best_first(run_steps, saved)
  kept = set(best[:keep_best])
  if keep_period:
    kept.update(step for step in saved if step % keep_period == 0)
  kept.update(saved[-max(1, keep) :])
  return [step for step in saved if step not in kept]
