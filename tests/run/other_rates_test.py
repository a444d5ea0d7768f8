"""What a resumed run says about another learning rate, or another end of the schedule."""

import re

import optax
import pytest

from valkyrie.run.other_rates import other_rates
from valkyrie.training.optimizers import Optimizer


class Rates:
  """The learning rates of an optimizer, as `Setup` has them."""

  def __init__(self, train_steps, learning_rate=1.0, **changes):
    options = {'warmup_steps': 10, 'train_steps': train_steps, **changes}
    self._optimizer = Optimizer(learning_rate, **options)

  def rate(self, step, ends):
    return float(self._optimizer.ending_at(ends).learning_rate(step))

  def schedule(self, step):
    ends = self._optimizer.train_steps
    return {'rate': self.rate(step, ends), 'ends': ends}


def said(before, after, step, **changes):
  """What a run says that saved after `step` of `before` steps, and goes on to `after`."""
  saved = Rates(before, **changes).schedule(step)
  return other_rates(saved, Rates(after, **changes), range(step, after))


ENDS = 'the schedule of the learning rate ended at step 100, and now ends at step 200: step '


@pytest.mark.parametrize(
  ('step', 'schedule'), [(5, 'cosine'), (5, 'linear'), (5, 'wsd'), (50, 'wsd')]
)
def test_a_stretched_schedule_is_said_where_the_next_step_has_the_same_rate(step, schedule):
  (line,) = said(100, 200, step, schedule=schedule)
  assert line.startswith(ENDS)
  assert line.endswith('To keep the earlier end, add --gin.Optimizer.train_steps=100')
  shown, rate, earlier = re.findall(r'step (\d+) has (\S+), and .* end (\S+)\. ', line)[0]
  done = int(shown) - 1
  assert float(rate) == pytest.approx(Rates(200, schedule=schedule).rate(done, 200), rel=1e-3)
  assert float(earlier) == pytest.approx(Rates(200, schedule=schedule).rate(done, 100), rel=1e-3)
  assert float(rate) > 2 * float(earlier)


def test_another_next_rate_is_said_too():
  rate, end = said(100, 200, 50)
  assert rate == 'the learning rate of step 51 is 0.9051, where the run that saved had 0.6281'
  assert end.startswith(ENDS)
  _, end = said(100, 60, 50)
  assert 'ended at step 100, and now ends at step 60' in end


@pytest.mark.parametrize(
  'changes',
  [
    {'schedule': 'constant'},
    {'schedule': 'inverse_sqrt'},
    {'schedule': optax.polynomial_schedule(1.0, 0.0, 2, 100)},
    {'final_learning_rate_scale': 1.0},
    {'learning_rate': 0.0},
  ],
)
def test_a_schedule_that_the_end_does_not_change_is_not_said(changes):
  assert not said(100, 200, 5, **changes)


def test_what_is_over_or_was_not_recorded_is_not_said():
  assert not other_rates(None, Rates(200), range(5, 200))
  assert not other_rates({'rate': 0.5, 'ends': 100}, Rates(4), range(5, 4))


def test_the_advice_keeps_the_end_also_where_another_binding_changed_the_rate():
  saved = Rates(100).schedule(50)
  rate, end = other_rates(saved, Rates(200, learning_rate=2.0), range(50, 200))
  assert 'where the run that saved had 0.6281' in rate
  assert '--gin.Optimizer.train_steps=100' in end
  kept = other_rates(saved, Rates(100, learning_rate=2.0), range(50, 200))
  assert kept == ['the learning rate of step 51 is 1.256, where the run that saved had 0.6281']
