"""The schedule of a log: a line every so many steps, or more of them in the first steps."""

from collections.abc import Sequence
import itertools

from valkyrie.config.ranges import PositiveInt64
from valkyrie.errors import ConfigurationError

# The steps between two lines; or pairs (first step, steps between two lines from this step on).
LogSchedule = PositiveInt64 | Sequence[tuple[PositiveInt64, PositiveInt64]]


def check_schedule(name: str, schedule: LogSchedule) -> None:
  """Raises a ConfigurationError unless the pairs begin at step 1 and are in order."""
  if isinstance(schedule, int):
    return
  are_pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in schedule)
  if are_pairs:
    firsts = [first for first, _ in schedule]
    in_order = all(one < other for one, other in itertools.pairwise(firsts))
    if firsts and firsts[0] == 1 and in_order:
      return
  raise ConfigurationError(
    f'{name} = {schedule!r} is not a schedule. Give the steps between two lines, such as 20, or '
    'pairs (first step, steps between two lines), from step 1 on and in order: ((1, 1), (100, 20)) '
    'logs each of the first steps, and every 20th from step 100 on.'
  )


def is_due(schedule: LogSchedule, step: int) -> bool:
  """Whether a line follows `step`, from 1: a multiple of the steps between lines at this step."""
  if isinstance(schedule, int):
    return step % schedule == 0
  every = 1
  for first, next_every in schedule:
    if step >= first:
      every = next_every
  return step % every == 0
