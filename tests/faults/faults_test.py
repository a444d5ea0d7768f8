"""scripts/faults: one fault for each kind of promise is injected into real runs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def faults(*arguments):
  command = [sys.executable, '-m', 'faults', *arguments]
  environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{ROOT}/tests:{ROOT}/scripts/experiments'}
  environment.pop('XLA_FLAGS', None)  # one device, which is faster than eight
  return subprocess.run(
    command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
  )


@pytest.mark.invariant(15)
def test_all_promises_of_the_short_table_are_kept(tmp_path):
  file = tmp_path / 'rows.jsonl'
  done = faults('--short', f'--json={file}')
  assert done.returncode == 0, done.stdout + done.stderr[-2000:]
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  assert len(rows) == 15
  for row in rows:
    assert row.get('unavailable') or row['injected'] == row['kept'] > 0
    assert f'| {row["fault"]} | {row["injected"]} |' in done.stdout


def test_a_broken_promise_is_counted_and_printed(monkeypatch):
  from faults.__main__ import conclusion  # noqa: PLC0415
  from faults.rows import measure  # noqa: PLC0415
  from faults.table import Fault, Trial, Unavailable  # noqa: PLC0415

  def breaks(harness, times):
    yield Trial('the first', cost=2.0)
    yield Trial('the second', 'it was lost', cost=3.5)

  def fails(harness, times):
    yield Trial('the first')
    raise OSError('no such thing')

  def cannot(harness, times):
    raise Unavailable('needs root')
    yield

  rows = [
    measure(Fault(name, 'kept', inject, 2, 2, 's'), None, 2)
    for name, inject in (('broken', breaks), ('failing', fails), ('unavailable', cannot))
  ]
  rows[0]['seconds'] = 60.0
  text, code = conclusion(rows)
  assert code == 1
  assert '| broken | 2 | kept | 1 | 3.5 s |' in text
  assert '| failing | 2 | kept | 1 |  |' in text
  assert '| unavailable | 0 | kept | needs root |  |' in text
  assert '2 of 4 kept, in 1.0 minutes.' in text
  assert 'BROKEN, broken: the second: it was lost' in text and 'OSError: no such thing' in text
  assert conclusion(rows[2:])[1] == 0


@pytest.fixture
def results(monkeypatch, tmp_path):
  """Opens the results of a commit in a file."""
  from faults.results import Results  # noqa: PLC0415

  def opened(commit='a1', short=False, seed=0):
    return Results(tmp_path / 'rows.jsonl', commit, short, seed)

  return opened


def row_of(name, **more):
  row = {'fault': name, 'injected': 3, 'promise': 'kept', 'kept': 3, 'worst': '', 'seconds': 30.0}
  return {**row, 'broken': [], **more}


def test_a_table_that_was_stopped_goes_on_with_the_results_of_its_commit(results, tmp_path):
  results().add(row_of('one'))
  with (tmp_path / 'rows.jsonl').open('a') as file:
    file.write('{"commit": "a1", "fau')  # a kill in the midst of a line
  found = results()
  assert list(found.rows) == ['one']
  found.add(row_of('two', unavailable='needs root'))
  assert list(results().rows) == ['one']  # the next machine may have root
  for other in ({'commit': 'b2'}, {'short': True}, {'seed': 1}, {'commit': None}):
    assert not results(**other).rows


def test_the_page_has_the_newest_result_of_each_row(results):
  from faults.results import rows_of  # noqa: PLC0415
  from faults.table import Fault  # noqa: PLC0415

  faults = [Fault(name, 'kept', iter, 3, 0, '') for name in ('one', 'two', 'three')]
  page = 'Before\n<!-- faults: scripts/faults -->\nold\n<!-- end of faults -->\nAfter'
  found = results()
  found.add(row_of('two'))
  found.add(row_of('three', unavailable='needs root'))
  written = found.documented(faults, page)
  assert written.startswith('Before\n') and written.endswith('-->\nAfter') and 'old' not in written
  assert '1 of 3 rows, 3 faults' in written
  found = results('b2')
  found.add(row_of('one'))
  written = found.documented(faults, written)
  assert [(row['fault'], row['commit']) for row in rows_of(written)] == [
    ('one', 'b2'),
    ('two', 'a1'),
  ]
  assert found.documented(faults, written) == written
  faults[1] = Fault('two', 'another promise', iter, 3, 0, '')
  assert [row['fault'] for row in rows_of(found.documented(faults, written))] == ['one']
  for other in (results(short=True), results(commit=None)):
    other.rows = found.rows
    assert other.documented(faults, page) is None


def test_a_text_that_no_row_has_is_said():
  done = faults('--only', 'no such row')
  assert done.returncode == 2
  assert "no row has a name with 'no such row'" in done.stderr
