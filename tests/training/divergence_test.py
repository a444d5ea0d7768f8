"""Refused steps are put up with, until there are too many of them too close together."""

import pytest

from valkyrie.errors import ConfigurationError, Diverged
from valkyrie.training.spikes import RefusedSteps


def count(refused_at, already=0, **options):
  """Feeds 40 steps, those in `refused_at` being refused; the step that ends it, or None."""
  budget = RefusedSteps(already, lambda step: f'the pages of {step}', **options)
  skipped = already
  for step in range(1, 41):
    skipped += step in refused_at
    try:
      budget(step, skipped)
    except Diverged as end:
      assert f'step {step}, which read the pages of {step}.' in str(end)
      return step
  return None


@pytest.mark.parametrize('already', [0, 1000])
def test_the_budget_is_of_a_window(already):
  assert count({3, 4, 5}, already, allowed=3, window=10) is None
  assert count({3, 4, 5, 6}, already, allowed=3, window=10) == 6
  assert count({3, 4, 5, 12}, already, allowed=3, window=10) == 12
  assert count({3, 4, 5, 13}, already, allowed=3, window=10) is None
  assert count(set(range(1, 40, 4)), already, allowed=3, window=10) is None
  assert count({7}, already, allowed=0, window=1) == 7


@pytest.mark.parametrize('options', [{'allowed': -1}, {'allowed': 5, 'window': 5}, {'window': 0}])
def test_a_budget_that_means_nothing_is_refused(options):
  with pytest.raises(ConfigurationError, match=r'RefusedSteps\.allowed'):
    count(set(), **options)
