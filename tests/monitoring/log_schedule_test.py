"""The schedule by which a run logs."""

import pytest

from valkyrie.errors import ConfigurationError
from valkyrie.monitoring.log_schedule import check_schedule, is_due


def lines(schedule, steps):
  check_schedule('train.log_every', schedule)
  return [step for step in range(1, steps + 1) if is_due(schedule, step)]


def test_a_number_logs_every_so_many_steps():
  assert lines(3, 10) == [3, 6, 9]


def test_pairs_log_more_often_in_the_first_steps():
  assert lines(((1, 1), (4, 2), (9, 10)), 31) == [1, 2, 3, 4, 6, 8, 10, 20, 30]
  assert lines([[1, 7]], 15) == lines(7, 15)


@pytest.mark.parametrize('schedule', [
  (), ((0, 1),), ((2, 1),), ((1, 1), (1, 2)), ((1, 1), (9, 2), (5, 3)), (1, 2), ((1, 2, 3),),
])  # fmt: skip
def test_what_is_no_schedule_is_refused_with_an_example(schedule):
  with pytest.raises(ConfigurationError, match=r'is not a schedule.*\(\(1, 1\), \(100, 20\)\)'):
    check_schedule('train.log_every', schedule)
