"""Learning rates of a resumed run that differ from those of the run that saved."""

from collections.abc import Mapping
import math
from typing import Protocol

import numpy as np

_COMPARED = 64  # steps
_TOLERANCE = 1e-5  # of a rate


class Rates(Protocol):
  """The learning rates of a run, see `training.setup.Setup`."""

  def schedule(self, step: int) -> dict[str, float]: ...

  def rate(self, step: int, ends: int) -> float: ...


def other_rates(saved: Mapping[str, float] | None, rates: Rates, steps: range) -> list[str]:
  """A line for the next step, and one for the end of the schedule, where they differ.

  A warm-up, or the flat part of 'wsd', has the same rate in both schedules: the ends are therefore
  compared over the steps to come.

  Args:
    saved: the `Setup.schedule` that the checkpoint records; None in old ones.
    rates: those of this run.
    steps: the steps to come, counted from 0.
  """
  if saved is None or not steps:
    return []
  lines: list[str] = []
  schedule = rates.schedule(steps.start)
  if not math.isclose(saved['rate'], schedule['rate'], rel_tol=_TOLERANCE):
    lines.append(
      f'the learning rate of step {steps.start + 1} is {schedule["rate"]:.4g}, where the run that '
      f'saved had {saved["rate"]:.4g}'
    )
  before = int(saved['ends'])
  after = int(schedule['ends'])
  if before != after:
    lines += _other_end(rates, steps, before, after)
  return lines


def _other_end(rates: Rates, steps: range, before: int, after: int) -> list[str]:
  """A line about the step at which another end of the schedule changes the rate most; if any."""
  count = min(len(steps), _COMPARED)
  last = steps.stop - 1
  places = np.linspace(steps.start, last, count)
  rounded = places.round()
  chosen = rounded.astype(int).tolist()
  earlier = np.array([rates.rate(step, before) for step in chosen])
  current = np.array([rates.rate(step, after) for step in chosen])
  apart = np.abs(current - earlier)
  most = int(apart.argmax())
  tolerated = _TOLERANCE * current.max()
  if apart[most] <= tolerated:
    return []
  return [
    f'the schedule of the learning rate ended at step {before}, and now ends at step {after}: '
    f'step {chosen[most] + 1} has {current[most]:.4g}, and with the earlier end '
    f'{earlier[most]:.4g}. To keep the earlier end, add --gin.Optimizer.train_steps={before}'
  ]
