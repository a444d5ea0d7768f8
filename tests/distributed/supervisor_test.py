"""The supervisor ends a hanging run with its stacks, and restarts a run after some exit codes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from valkyrie.distributed.supervisor import RunStatus

ROOT = pathlib.Path(__file__).parents[2]

# A substitute for a training run: counts its starts, and performs the actions of its nth argument.
RUN = """
import os, pathlib, signal, sys, time
from valkyrie.distributed import heartbeat

folder = pathlib.Path(sys.argv[1])
starts = len(list(folder.glob('start.*')))
(folder / f'start.{starts}').touch()
heartbeat.start(str(folder))

def hang_in_a_named_function():
  time.sleep(1000)

def is_held(folder):
  descriptors = pathlib.Path('/proc', str(os.getppid()), 'fd')
  return any(os.path.realpath(each) == str(folder) for each in descriptors.iterdir())

def wait_until_held(folder):
  until = time.monotonic() + 5
  while not is_held(folder) and time.monotonic() < until:
    time.sleep(0.01)

for word in sys.argv[2 + min(starts, len(sys.argv) - 3)].split():
  name, _, number = word.partition('=')
  if name in ('compile', 'step', 'save'):
    heartbeat.beat(stage=name, **({'step': int(number)} if number else {}))
  elif name == 'transient':
    heartbeat.beat(transient=True)
  elif name == 'garbage':
    descriptor = int(os.environ[heartbeat.VARIABLE].partition(':')[0])
    for line in (b'{', b'[1]', b'{"stage": "dance"}', b'{"saved": "x"}', b'{"other": 1}', bytes(9)):
      os.write(descriptor, line + b'\\n')
  elif name == 'saved':
    heartbeat.beat(saved=int(number))
  elif name == 'move':
    wait_until_held(folder)
    folder.rename(folder.with_name('moved'))
    folder.mkdir()
    (folder / 'start.0').touch()
  elif name == 'hang':
    hang_in_a_named_function()
  elif name == 'stop':
    os.kill(os.getpid(), signal.SIGSTOP)
  elif name == 'kill':
    os.kill(os.getpid(), int(number))
  elif name == 'sleep':
    (folder / 'asleep').write_text(str(os.getpid()))
    time.sleep(2)
  elif name == 'progress':
    for _ in range(25):
      time.sleep(0.2)
      heartbeat.beat()
  elif name == 'wait_and_beat':
    def end(*_):
      (folder / 'ended').touch()
      sys.exit(75)
    signal.signal(signal.SIGTERM, end)
    (folder / 'waiting').write_text(str(os.getpid()))
    while True:
      heartbeat.beat(step=1)
      time.sleep(0.05)
  elif name == 'wait':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (folder / 'waiting').touch()
    time.sleep(1000)
  else:
    sys.exit(int(name))
"""


@pytest.fixture
def supervise(tmp_path):
  """Starts the supervisor on a run that performs the given actions, one text for each start."""
  (tmp_path / 'run.py').write_text(RUN)

  def start(*starts, flags=(), between=None, folder=tmp_path):
    command = [str(ROOT / 'scripts' / 'supervise'), '--pause_seconds=0.01', *flags, '--']
    command += [sys.executable, between] if between else []
    command += [sys.executable, str(tmp_path / 'run.py'), str(folder), *starts]
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
def test_other_exit_codes_are_returned_without_a_restart(supervise, tmp_path, code):
  assert ended(supervise(f'compile step=1 {code}', '0'))[0] == code
  assert starts(tmp_path) == 1


def test_a_run_that_storage_has_ended_is_restarted(supervise, tmp_path):
  code, _ = ended(supervise('step=3 saved=2 transient 74', '74'))
  assert (code, starts(tmp_path)) == (74, 2)  # the second ending was another one


def test_garbage_in_the_pipe_is_ignored(supervise, tmp_path):
  code, said = ended(supervise('step=3 saved=2 garbage 0'))
  assert code == 0 and said == 'supervise: exit code 0; last saved step 2; ending\n'


def test_nothing_that_cannot_be_written_ends_the_supervisor(supervise, tmp_path):
  (tmp_path / 'supervise.jsonl').mkdir()
  code, said = ended(supervise('75', 'saved=2 0'))
  assert code == 0 and 'supervise.jsonl is not a file' in said
  process = supervise('75', 'saved=2 9')
  process.stderr.close()
  assert process.wait(60) == 9


def test_a_command_that_does_not_exist_is_named(supervise):
  command = [ROOT / 'scripts' / 'supervise', '--', '/no/such/command']
  environment = {**os.environ, 'PYTHON': sys.executable}
  done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
  assert done.returncode == 127
  assert '/no/such/command cannot be started (No such file or directory)' in done.stderr


@pytest.mark.parametrize('how', ['closed', 'reused'])
def test_a_command_that_cannot_be_heard_is_not_killed(supervise, tmp_path, how):
  """A program between supervisor and run closes the pipe; a file may have its number then."""
  between = tmp_path / 'between.py'
  open_again = 'os.dup2(os.open(sys.argv[3] + "/other", os.O_RDWR | os.O_CREAT), descriptor)'
  between.write_text(f"""
import os, subprocess, sys
descriptor = int(os.environ['VALKYRIE_HEARTBEAT'].partition(':')[0])
{open_again if how == 'reused' else 'os.close(descriptor)'}
sys.exit(subprocess.run(sys.argv[1:], close_fds={how == 'closed'}).returncode)
""")
  code, said = ended(
    supervise('step=1 sleep 0', flags=['--start_up_seconds=0.5'], between=str(between))
  )
  assert code == 0, said
  assert said.count('nothing was heard from the command, which is therefore not watched') == 1
  assert how == 'closed' or not (tmp_path / 'other').read_text()


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGHUP, signal.SIGQUIT])
def test_a_run_whose_supervisor_is_gone_saves_and_ends(supervise, tmp_path, number, hang_up):
  hang_up(signal.SIG_DFL)
  process = supervise('wait_and_beat')
  while not (tmp_path / 'waiting').exists():
    time.sleep(0.02)
  process.send_signal(number)
  process.wait(60)
  while not (tmp_path / 'ended').exists():
    time.sleep(0.02)
  assert starts(tmp_path) == 1


def test_a_run_is_restarted_after_the_retryable_exit_codes(supervise, tmp_path):
  code, said = ended(supervise('75', 'step=1 kill=6', 'saved=2 kill=9', '71', '0'))
  assert (code, starts(tmp_path)) == (0, 5)
  for reason in ('exit code 75', 'exit code 134', 'exit code 137'):
    assert f'supervise: {reason}' in said
  lines = [json.loads(line) for line in (tmp_path / 'supervise.jsonl').read_text().splitlines()]
  assert [line['code'] for line in lines] == [75, 134, 137, 71, 0]
  assert [line['saved'] for line in lines] == [-1, -1, 2, 2, 2]


def test_an_ending_is_written_into_the_folder_in_which_the_run_worked(supervise, tmp_path):
  folder = tmp_path / 'run'
  folder.mkdir()
  assert ended(supervise('saved=3 move 75', 'saved=4 0', folder=folder))[0] == 0
  files = [tmp_path / name / 'supervise.jsonl' for name in ('moved', 'run')]
  assert [[json.loads(file.read_text())['saved']] for file in files] == [[3], [4]]


def test_restarts_that_save_no_later_step_are_limited(supervise, tmp_path):
  code, _ = ended(supervise('saved=3 75', 'saved=5 75', 'saved=5 75', flags=['--restarts=2']))
  assert (code, starts(tmp_path)) == (75, 4)  # two saved later steps, two did not


@pytest.mark.parametrize(
  'actions, flag, reason',
  [
    ('hang', '--start_up_seconds=1', 'in start_up: the limit is --start_up_seconds=1'),
    ('compile hang', '--compile_seconds=1', 'in compile: the limit'),
    ('compile step=7 hang', '--step_seconds=1', 'in step 7: the limit'),
    ('step=8 save stop', '--save_seconds=1', 'in save 8: the limit'),
  ],
)
def test_a_hang_is_ended_with_its_stacks_and_its_reason(supervise, tmp_path, actions, flag, reason):
  code, said = ended(supervise(actions, flags=[flag, '--restarts=0']))
  assert (code, starts(tmp_path)) == (86, 1)
  assert reason in said
  # A process that SIGSTOP has stopped runs no Python, and prints no stack.
  assert ('hang_in_a_named_function' in said) == ('hang' in actions)
  assert reason in json.loads((tmp_path / 'supervise.jsonl').read_text())['reason']


def test_sigterm_is_forwarded_to_the_run_which_is_not_restarted(supervise, tmp_path):
  process = supervise('step=1 wait', '0')
  while not (tmp_path / 'waiting').exists():
    time.sleep(0.02)
  process.send_signal(signal.SIGTERM)
  assert ended(process)[0] == 75
  assert starts(tmp_path) == 1


def test_progress_in_a_stage_is_no_silence(supervise):
  code, said = ended(supervise('progress 0', flags=['--start_up_seconds=4']))
  assert code == 0, said


def state_of(pid):
  return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]


def wait_for_state(pid, *states):
  while state_of(pid) not in states:
    time.sleep(0.02)


def test_ctrl_z_stops_the_run_of_a_supervisor_too_and_both_go_on(supervise, tmp_path):
  process = supervise('wait_and_beat')
  while not (tmp_path / 'waiting').exists() or not (tmp_path / 'waiting').read_text():
    time.sleep(0.02)
  run = int((tmp_path / 'waiting').read_text())
  process.send_signal(signal.SIGTSTP)
  for pid in (process.pid, run):
    wait_for_state(pid, 'T')
  process.send_signal(signal.SIGCONT)
  wait_for_state(run, 'R', 'S')
  process.send_signal(signal.SIGTERM)
  assert ended(process)[0] == 75 and starts(tmp_path) == 1


def test_the_time_in_which_all_were_stopped_is_no_silence(supervise, tmp_path):
  process = supervise('step=1 sleep 0', flags=['--step_seconds=5'])
  while not (tmp_path / 'asleep').exists() or not (tmp_path / 'asleep').read_text():
    time.sleep(0.02)
  run = int((tmp_path / 'asleep').read_text())
  for number in (signal.SIGSTOP, signal.SIGCONT):
    for pid in (process.pid, run):
      os.kill(pid, number)
    if number == signal.SIGSTOP:
      time.sleep(6)
  code, said = ended(process)
  assert code == 0 and 'no heartbeat' not in said


def test_a_heartbeat_without_fields_is_not_that_of_a_run():
  status = RunStatus()
  assert not status.update(b'{}') and status.update(b'{"stage": "step"}')
