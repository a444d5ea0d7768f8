"""scripts/faults: each fault is injected a few times into real runs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def faults(*arguments):
  command = [sys.executable, str(ROOT / 'scripts' / 'faults.py'), *arguments]
  environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
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
  assert len(rows) > 15
  for row in rows:
    assert row.get('unavailable') or row['injected'] == row['kept'] > 0
    assert f'| {row["fault"]} | {row["injected"]} |' in done.stdout


def test_a_broken_promise_is_counted_and_printed(monkeypatch):
  monkeypatch.syspath_prepend(ROOT / 'scripts')
  from faults import conclusion, measure  # noqa: PLC0415
  from injections.table import Fault, Trial, Unavailable  # noqa: PLC0415

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
  text, code = conclusion(rows, 60.0)
  assert code == 1
  assert '| broken | 2 | kept | 1 | 3.5 s |' in text
  assert '| failing | 2 | kept | 1 |  |' in text
  assert '| unavailable | 0 | kept | needs root |  |' in text
  assert '2 of 4 kept, in 1.0 minutes.' in text
  assert 'BROKEN, broken: the second: it was lost' in text and 'OSError: no such thing' in text
  assert conclusion(rows[2:], 60.0)[1] == 0
