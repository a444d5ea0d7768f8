"""A run that is asked to stop by a signal saves, reports its checkpoint, and ends with 75."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import gin
import pytest
import tiny_run

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.distributed import console, heartbeat, processes
from valkyrie.distributed.preemption import Preemption
from valkyrie.errors import Diverged, Preempted, UsageError
from valkyrie.run import train

ROOT = pathlib.Path(__file__).parents[2]

ACTS = '''
"""A hook and an evaluator that send a signal to their own process."""

import os
import signal
import time

import gin
import jax.numpy as jnp
from valkyrie.run.evaluator import Evaluator


@gin.configurable
class Act:
  def __init__(self, at, what):
    self.at, self.what = at, what

  def __call__(self, step, state, metrics):
    if step == self.at:
      if self.what == 'fail':
        raise ValueError('a bug of the hook')
      os.kill(os.getpid(), signal.SIGINT)
      if self.what == 'hang':
        time.sleep(1000)


@gin.configurable
class Interrupted(Evaluator):
  def __call__(self, params, *, stop, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop():
      time.sleep(0.01)
    return super().__call__(params, stop=stop, **options)

'''


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('preemption')
  tiny_run.write_stores(path / 'data', 'letters', 'abcdefgh')
  (path / 'acts.py').write_text(ACTS)
  return path


@pytest.fixture
def flags(folder, tmp_path):
  """The flags of a run of four steps in tmp_path/run, which saves only after the last one."""
  more = 'import acts\ntrain.hooks = (@Act(),)\nAct.at = 0\nAct.what = ""'
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(folder / 'data', more=more))
  return [f'--gin.{name}=4' for name in ('train_steps', 'checkpoint_every', 'eval_every')]


@pytest.fixture
def train_here(flags, folder, tmp_path, monkeypatch):
  """Trains in this process."""
  monkeypatch.syspath_prepend(folder)

  def run(*more):
    gin.clear_config(clear_constants=True)
    file = str(tmp_path / 'run.gin')
    load_gin([file], [*flags, *more], allowed_imports=['acts'], modules=main.CONFIGURABLE_MODULES)
    train.train(model_dir=str(tmp_path / 'run'))

  return run


def start(flags, folder, tmp_path, *more):
  """Trains in another process."""
  command = [sys.executable, '-m', 'valkyrie.main', f'--gin_file={tmp_path / "run.gin"}']
  command += [f'--model_dir={tmp_path / "run"}', '--gin_allow_import=acts', *flags, *more]
  return subprocess.Popen(
    command,
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(folder)},
    stderr=subprocess.PIPE,
    text=True,
  )


def checkpoints(tmp_path):
  return sorted(path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir())


def test_a_signal_during_compilation_saves_nothing(flags, folder, tmp_path):
  with start(flags, folder, tmp_path) as process:
    said = ''
    while 'compiling a step' not in said:
      said += process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    said += process.stderr.read()
  assert process.returncode == 75, said
  assert 'handlers ready' not in said
  assert 'valkyrie: SIGTERM before the first step: nothing was saved. Run the same' in said
  assert checkpoints(tmp_path) == []


def test_preempted_is_raised_even_if_start_up_replaces_it_by_another_error():
  with pytest.raises(Preempted, match='SIGTERM before the first step'), Preemption():
    try:
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(1)
    except Preempted as error:  # like inspect.signature, which jax calls while it traces
      raise TypeError('unsupported callable') from error


@pytest.fixture
def handlers():
  before = {number: signal.getsignal(number) for number in console.STOP_SIGNALS}
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs ignore it
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


def test_an_interrupt_ends_a_program_that_imports(tmp_path):
  """Whatever the module does with KeyboardInterrupt."""
  (tmp_path / 'importing.py').write_text(
    'import signal\ntry:\n  signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n  pass\n'
  )
  code = (
    'import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); '
    'from valkyrie import main; sys.argv[1:] = ["--gin_file=gin/tiny_cpu.gin"]; '
    'main.main(modules=["importing"])'
  )
  environment = {**os.environ, 'PYTHONPATH': f'{ROOT}{os.pathsep}{tmp_path}'}
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, env=environment, capture_output=True, check=False
  )
  assert (done.returncode, done.stderr) == (-signal.SIGINT, b'')


def test_a_program_ends_without_the_exit_handlers_of_libraries():
  """XLA's crash if a signal has interrupted a compilation, which goes on in other threads."""
  code = (
    'import atexit, ctypes, sys; from valkyrie import main; c = ctypes.CDLL(None); '
    'c.__cxa_atexit(c.abort, None, None); atexit.register(print, "of Python"); '
    'atexit.register(sys.stderr.close); '  # as the handlers of a library do
    'sys.argv[1:] = ["--gin.train_steps"]; print("printed", end=" "); sys.exit(main.main())'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert (done.returncode, done.stdout) == (UsageError.exit_code, 'printed of Python\n')


def test_an_error_in_place_of_an_interrupt_is_an_interrupt(handlers):
  with pytest.raises(KeyboardInterrupt), console.of_a_program():
    console.raise_interrupts()
    try:
      signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:  # as of an extension that was being imported
      raise ImportError('while initializing the extension') from error


def test_a_signal_where_nothing_can_be_raised_prints_no_traceback(capfd):
  class Signaled:
    def __del__(self):
      signal.raise_signal(signal.SIGTERM)

  with Preemption():
    Signaled()
  assert capfd.readouterr().err == ''


def test_a_second_signal_does_not_disturb_the_end_of_a_program(handlers):
  def signaled_twice():
    try:
      with Preemption():
        signal.raise_signal(signal.SIGTERM)
    finally:
      signal.raise_signal(signal.SIGINT)

  with pytest.raises(KeyboardInterrupt):  # in a notebook
    signaled_twice()
  with pytest.raises(Preempted), console.of_a_program():
    signaled_twice()


@pytest.mark.invariant(14)
@pytest.mark.parametrize('counts', [[3, 5], [5, 3], [4, 5]])
def test_all_processes_stop_after_the_largest_number_of_calls(monkeypatch, counts):
  calls = []

  def exchange(name, value, *seconds):
    calls.append((name, value, *seconds))
    return counts if name == 'stop' else [None]

  monkeypatch.setattr(processes, 'exchange', exchange)
  with Preemption(grace_seconds=9.0) as stop:
    stop.ready(lambda: '')
    assert [stop.requested() for _ in range(3)] == [False] * 3
    os.kill(os.getpid(), signal.SIGTERM)
    while len(calls) < 2:  # the exchange of the counts
      time.sleep(0.01)
    assert [stop.requested() for _ in range(4)] == [False, False, True, True]
  assert calls == [('ready', None), ('stop', 3, 9.0)]


def builder_of(process):
  """Waits for the process that builds a token store for a run, and returns its number."""
  children = pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children')
  while True:
    for pid in children.read_text().split():
      if 'build_store' in pathlib.Path(f'/proc/{pid}/cmdline').read_text():
        return int(pid)
    assert process.poll() is None, process.stderr.read()
    time.sleep(0.02)


def is_running(pid):
  """Whether a process has not ended; one that nobody has waited for has ended too."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_a_signal_while_a_store_is_built_ends_its_builder_too(flags, folder, tmp_path):
  elsewhere = ("--gin.task='python_stdlib'", f"--gin.TaskFeed.data_dir='{tmp_path}'")
  with start(flags, folder, tmp_path, *elsewhere) as process:
    builder = builder_of(process)
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
  assert process.returncode == 75, said
  assert 'valkyrie: SIGINT before the first step' in said
  while is_running(builder):
    time.sleep(0.02)


def test_a_killed_run_ends_the_builder_of_its_store(flags, folder, tmp_path):
  elsewhere = ("--gin.task='python_stdlib'", f"--gin.TaskFeed.data_dir='{tmp_path}'")
  with start(flags, folder, tmp_path, *elsewhere) as process:
    builder = builder_of(process)
    process.kill()
    while is_running(builder):
      time.sleep(0.02)


@pytest.mark.parametrize('number', [signal.SIGHUP, signal.SIGQUIT])
def test_a_closed_terminal_stops_a_run(number, hang_up):
  hang_up(signal.SIG_DFL)
  with Preemption() as stop:
    stop.ready(str)
    os.kill(os.getpid(), number)
    while not stop.requested():
      time.sleep(0.01)


def test_nohup_is_respected(hang_up):
  hang_up(signal.SIG_IGN)
  with Preemption() as stop:
    stop.ready(str)
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.2)
    assert not stop.requested()
  assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_step_longer_than_the_grace_is_ended_and_the_checkpoint_named(flags, folder, tmp_path):
  more = ('--gin.Act.at=3', '--gin.Act.what="hang"', '--gin.checkpoint_every=1')
  with start(flags, folder, tmp_path, *more, '--gin.Preemption.grace_seconds=0.5') as process:
    said = process.stderr.read()
  assert process.returncode == 75, said
  named = re.search(r'grace_seconds = 0.5; the newest checkpoint is (.*)\. Run the same', said)
  # The save of the last step may be on its way to the disk when the process ends.
  assert named.group(1).removeprefix(f'{tmp_path}/run/checkpoints/') in checkpoints(tmp_path)


def test_a_signal_during_an_evaluation_ends_it_and_saves_the_state(train_here, tmp_path):
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with pytest.raises(Preempted, match=r'stopped after step 2 of 4; .*run/checkpoints/2\.'):
    train_here('--gin.train.evaluator=@Interrupted', '--gin.eval_every=2')
  assert checkpoints(tmp_path) == ['2']
  assert not (tmp_path / 'run' / 'eval' / 'metrics.jsonl').read_text()
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_after_an_error_in_the_loop_the_state_is_saved(train_here, tmp_path, monkeypatch):
  reader, writer = os.pipe()
  monkeypatch.setenv(heartbeat.VARIABLE, heartbeat.address(writer))
  with pytest.raises(ValueError, match='a bug of the hook') as error:
    train_here('--gin.Act.at=3', '--gin.Act.what="fail"')
  assert 'The state before the error was saved.' in error.value.__notes__
  assert checkpoints(tmp_path) == ['3']
  assert list(tiny_run.metrics(tmp_path / 'run')) == [1, 2, 3], 'what is saved has its lines'
  # The heartbeats that a supervisor has received.
  os.close(writer)
  with open(reader) as lines:
    beats = [json.loads(line) for line in lines]
  assert beats == [
    {'stage': 'start_up', 'model_dir': str(tmp_path / 'run')},
    {'stage': 'compile'},
    *({'stage': 'step', 'step': step} for step in (1, 2, 3)),
    {'stage': 'save'},
    {'saved': 3},
  ]


def test_repeated_steps_that_are_not_finite_end_the_run_and_name_the_documents(train_here, folder):
  budget = ('--gin.RefusedSteps.allowed=1', '--gin.RefusedSteps.window=3')
  with pytest.raises(Diverged) as end:
    train_here('--gin.train_steps=6', '--gin.learning_rate=1e30', *budget)
  assert end.value.exit_code == 76
  message = str(end.value)
  assert '2 of the last 3 steps' in message and 'step 3, which read' in message
  assert re.search(rf'documents of {folder}/data/.*: row 0: \d+', message)
