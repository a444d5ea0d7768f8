"""Verdicts: which of two candidates is better, as far as seeds and amounts of training allow."""

from collections.abc import Mapping, Sequence
import math
import statistics

AMOUNTS = {'seconds': '{:,.1f} seconds', 'tokens': '{:,.0f} tokens', 'flops': '{:.3g} FLOPs'}
_NEAR = 1.1  # the largest ratio of two amounts of training that count as equal


def is_near(first: float | None, second: float | None) -> bool:
  """Whether two amounts of training are equal within a tenth; unknown ones count as equal."""
  if not first or not second:
    return True
  larger = max(first, second)
  smaller = min(first, second)
  return larger <= _NEAR * smaller


def verdict(
  scores: Mapping[str, Sequence[float]],
  unit: str,
  budget: str = 'tokens',
  amounts: Mapping[str, float | None] | None = None,
) -> list[str]:
  """Compares the candidate with the lowest mean with each other one.

  One is better if the difference of the means is larger than the range of the seeds of either, and
  if it has not trained for more than the other one.

  Args:
    scores: the score of each seed by candidate, in the order of the means.
    unit: the unit of the scores.
    budget: 'seconds', 'tokens' or 'flops'.
    amounts: how much each candidate has trained, the mean over its seeds; None if unknown.
  """
  first, *others = scores
  used = amounts or {}
  return [_compare(first, other, scores, unit, budget, used) for other in others]


def _compare(
  first: str,
  other: str,
  scores: Mapping[str, Sequence[float]],
  unit: str,
  budget: str,
  amounts: Mapping[str, float | None],
) -> str:
  """What can be said about two candidates, where the first has the lower mean."""
  mean_of_first = statistics.fmean(scores[first])
  mean_of_other = statistics.fmean(scores[other])
  difference = mean_of_other - mean_of_first
  if not math.isfinite(difference):
    return f'{other} diverged.'
  used_by_first = amounts.get(first)
  used_by_other = amounts.get(other)
  unequal = ''
  if used_by_first and used_by_other and not is_near(used_by_first, used_by_other):
    form = AMOUNTS[budget]
    unequal = (
      f'{first} trained for {form.format(used_by_first)}, {other} for {form.format(used_by_other)}'
    )
    if used_by_first > used_by_other:
      return (
        f'{first} and {other}: no verdict. {first} is ahead by {difference:.3f} {unit}, but '
        f'{unequal}. Compare the same --tokens, or give more --seconds on an idle machine.'
      )
  range_of_first = _range(scores[first])
  range_of_other = _range(scores[other])
  spread = max(range_of_first, range_of_other)
  if len(scores[first]) == 1:
    sentence = (
      f'{first} is ahead of {other} by {difference:.3f} {unit} with one seed. More --seeds show '
      'how far seeds differ.'
    )
  elif difference > spread:
    sentence = (
      f'{first} is better than {other} by {difference:.3f} {unit}; the seeds of one candidate '
      f'differ by at most {spread:.3f}.'
    )
  else:
    sentence = (
      f'{first} and {other}: no difference that the seeds do not explain. Their means differ by '
      f'{difference:.3f} {unit}, the seeds of one candidate by up to {spread:.3f}.'
    )
  if unequal:
    sentence += f' The amounts differ: {unequal}.'
  return sentence


def _range(values: Sequence[float]) -> float:
  return max(values) - min(values)
