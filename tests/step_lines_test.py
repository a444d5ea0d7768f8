"""monitoring/step_lines: one line for each step, whoever writes and dies."""

import json
import os
import resource
import threading

import pytest

from valkyrie.errors import StorageError
from valkyrie.monitoring.json_lines import by_step
from valkyrie.monitoring.step_lines import StepLines


def steps_of(path):
  return [json.loads(line)['step'] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'eval' / 'metrics.jsonl'


def write(path, *lines):
  writer = StepLines(path)
  for step, loss in lines:
    writer.write({'step': step, 'loss': loss})
  writer.close()


def test_a_line_takes_the_place_of_that_of_its_step(path):
  write(path, (2, 0.2), (4, 0.4))
  write(path, (2, 0.25))
  assert [*by_step(path).values()] == [{'step': 2, 'loss': 0.25}, {'step': 4, 'loss': 0.4}]
  assert sorted(steps_of(path)) == [2, 4]
  assert os.listdir(path.parent) == ['metrics.jsonl']


def test_a_resumed_run_drops_what_it_has_repeated_with_the_last_of_it(path):
  write(path, (1, 0.1), (2, 0.2), (3, 0.3))
  resumed = StepLines(path)
  resumed.write({'step': 2, 'loss': 0.0})
  assert steps_of(path) == [1, 2, 3, 2]
  resumed.write({'step': 3, 'loss': 0.0})
  assert steps_of(path) == [1, 2, 3]
  resumed.write({'step': 4})
  resumed.write({'step': 5})
  assert steps_of(path) == [1, 2, 3, 4, 5]
  resumed.close()
  assert by_step(path)[2]['loss'] == 0.0


def test_lines_that_a_killed_run_has_repeated_are_dropped_by_the_next_one(path):
  path.parent.mkdir()
  path.write_text('{"step": 1}\n{"step": 2}\nnot a line of ours\n{"step": 2, "loss": 1.0}\n')
  StepLines(path).close()
  expected = '{"step": 1}\n{"step": 2, "loss": 1.0}\nnot a line of ours\n'
  assert path.read_text() == expected


def test_a_file_that_another_process_writes_is_not_replaced(path):
  trainer = StepLines(path)
  trainer.write({'step': 2})
  write(path, (2, 0.2))
  trainer.write({'step': 4})
  assert steps_of(path) == [2, 2, 4]
  trainer.close()
  StepLines(path).close()
  assert steps_of(path) == [2, 4]


def test_a_renamed_folder_keeps_its_lines_and_another_in_its_place_gets_none(path):
  writer = StepLines(path)
  writer.write({'step': 1})
  path.parent.rename(path.parent.with_name('moved'))
  write(path, (7, 0.7))
  for step in (1, 2):
    writer.write({'step': step})
  writer.close()
  assert steps_of(path) == [7]
  assert steps_of(path.parent.with_name('moved') / 'metrics.jsonl') == [1, 2]


def test_a_full_disk_leaves_all_lines(path):
  write(path, *((step, 0.5) for step in range(20)))
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  writer = StepLines(path)
  resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
  try:
    writer.write({'step': 3, 'loss': 0.25})
    with pytest.raises(StorageError):
      writer.close()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  write(path, (3, 0.75))
  assert steps_of(path) == [*range(20)]
  assert by_step(path)[3]['loss'] == 0.75


def test_writers_at_once_lose_no_line(path):
  def evaluate(steps):
    for step in steps:
      write(path, (step, step + 0.5), (1000, 0.0))

  writers = [threading.Thread(target=evaluate, args=(range(first, 200, 4),)) for first in range(4)]
  for writer in writers:
    writer.start()
  for writer in writers:
    writer.join()
  StepLines(path).close()
  assert sorted(steps_of(path)) == [*range(200), 1000]
