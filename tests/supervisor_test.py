"""A run that hangs is ended with its stacks, and started again only where that helps."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# Stands in for a training run: counts its starts, and does what its nth argument says.
RUN = """
import os, pathlib, signal, sys, time
from valkyrie.distributed import heartbeat

folder = pathlib.Path(sys.argv[1])
starts = len(list(folder.glob('start.*')))
(folder / f'start.{starts}').touch()
heartbeat.start(str(folder))

def hang_in_a_place_with_a_name():
  time.sleep(1000)

for word in sys.argv[2 + min(starts, len(sys.argv) - 3)].split():
  name, _, number = word.partition('=')
  if name in ('compile', 'step', 'save'):
    heartbeat.beat(phase=name, **({'step': int(number)} if number else {}))
  elif name == 'saved':
    heartbeat.beat(saved=int(number))
  elif name == 'hang':
    hang_in_a_place_with_a_name()
  elif name == 'stop':
    os.kill(os.getpid(), signal.SIGSTOP)
  elif name == 'kill':
    os.kill(os.getpid(), int(number))
  elif name == 'wait':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / 'waiting').touch()
    time.sleep(1000)
  else:
    sys.exit(int(name))
"""


@pytest.fixture
def supervise(tmp_path):
  """Starts the supervisor on a run that does the given things at its starts."""
  (tmp_path / 'run.py').write_text(RUN)

  def start(*starts, flags=()):
    command = [str(ROOT / 'scripts' / 'supervise'), '--pause_seconds=0.01', *flags, '--']
    command += [sys.executable, str(tmp_path / 'run.py'), str(tmp_path), *starts]
    return subprocess.Popen(
      command,
      env={**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHON': sys.executable},
      stderr=subprocess.PIPE,
      text=True,
    )

  return start


def ended(process):
  _, said = process.communicate(timeout=120)
  return process.returncode, said


def starts(tmp_path):
  return len(list(tmp_path.glob('start.*')))


@pytest.mark.parametrize('code', [0, 65, 70, 74, 76, 78])
def test_other_endings_are_passed_on(supervise, tmp_path, code):
  assert ended(supervise(f'compile step=1 {code}', '0'))[0] == code
  assert starts(tmp_path) == 1


def test_it_starts_again_where_that_can_help(supervise, tmp_path):
  code, said = ended(supervise('75', 'step=1 kill=6', 'saved=2 kill=9', '0'))
  assert (code, starts(tmp_path)) == (0, 4)
  for reason in ('exit code 75', 'exit code 134', 'exit code 137'):
    assert f'supervise: {reason}' in said
  lines = [json.loads(line) for line in (tmp_path / 'supervise.jsonl').read_text().splitlines()]
  assert [line['code'] for line in lines] == [75, 134, 137, 0]
  assert [line['saved'] for line in lines] == [-1, -1, 2, 2]


def test_it_gives_up_where_no_later_step_is_saved(supervise, tmp_path):
  code, _ = ended(supervise('saved=3 75', 'saved=5 75', 'saved=5 75', flags=['--restarts=2']))
  assert (code, starts(tmp_path)) == (75, 4)  # two that saved later steps, two in vain


@pytest.mark.parametrize(
  'doing, flag, reason',
  [
    ('hang', '--start_up_seconds=1', 'in start_up; allowed are --start_up_seconds=1'),
    ('compile hang', '--compile_seconds=1', 'in compile; allowed'),
    ('compile step=7 hang', '--step_seconds=1', 'in step 7; allowed'),
    ('step=8 save stop', '--save_seconds=1', 'in save 8; allowed'),
  ],
)
def test_a_hang_is_ended_with_its_stacks_and_its_reason(supervise, tmp_path, doing, flag, reason):
  code, said = ended(supervise(doing, flags=[flag, '--restarts=0']))
  assert (code, starts(tmp_path)) == (86, 1)
  assert reason in said
  # A process that the kernel has stopped runs no Python.
  assert ('hang_in_a_place_with_a_name' in said) == ('hang' in doing)
  assert reason in json.loads((tmp_path / 'supervise.jsonl').read_text())['reason']


def test_a_supervisor_that_is_told_to_stop_tells_the_run_and_does_not_start_again(
  supervise, tmp_path
):
  process = supervise('step=1 wait', '0')
  while not (tmp_path / 'waiting').exists():
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  assert ended(process)[0] == 75
  assert starts(tmp_path) == 1
