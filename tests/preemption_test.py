"""Asked to stop, a run stops in every phase, says what is saved, and leaves exit code 75."""

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
from valkyrie.distributed import heartbeat, processes
from valkyrie.distributed.preemption import Preemption
from valkyrie.errors import Diverged, Preempted
from valkyrie.run import train

ROOT = pathlib.Path(__file__).parents[1]

ACTS = '''
"""Does something in a run where it is told to."""

import os
import signal
import time

import gin
import jax.numpy as jnp
from valkyrie.run.evaluate import Evaluator


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


pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('preemption')
  tiny_run.write_stores(path / 'data', 'letters', 'abcdefgh')
  (path / 'acts.py').write_text(ACTS)
  return path


@pytest.fixture
def flags(folder, tmp_path):
  """The flags of a run of four steps in tmp_path/run, which saves nothing before the end."""
  more = 'import acts\ntrain.hooks = (@Act(),)\nAct.at = 0\nAct.what = ""'
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(folder / 'data', more=more))
  return [
    '--gin.train_steps=4', '--gin.checkpoint_every=4', '--gin.eval_every=4',
    '--gin.train.remat=False', '--gin.LanguageModel.remat=None',
    '--gin.LongformerAttention.document_start=0',
  ]  # fmt: skip


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
  """The same in a process of its own."""
  command = [sys.executable, '-m', 'valkyrie.main', f'--gin_file={tmp_path / "run.gin"}']
  command += [f'--model_dir={tmp_path / "run"}', '--gin_allow_import=acts', *flags, *more]
  return subprocess.Popen(
    command,
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(folder), 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
    stderr=subprocess.PIPE,
    text=True,
  )


def checkpoints(tmp_path):
  return sorted(path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir())


def test_during_compilation_nothing_is_saved(flags, folder, tmp_path):
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


def test_what_a_signal_in_start_up_is_turned_into_is_not_the_error_to_see():
  with pytest.raises(Preempted, match='SIGTERM before the first step'), Preemption():
    try:
      os.kill(os.getpid(), signal.SIGTERM)
      time.sleep(1)
    except Preempted as error:  # as inspect.signature does, which jax calls when it traces
      raise TypeError('unsupported callable') from error


@pytest.mark.parametrize('told', [['3', '5'], ['5', '3'], ['4', '5']])
def test_all_go_on_to_where_the_furthest_of_them_is(monkeypatch, told):
  calls = []

  def exchange(name, text, *seconds):
    calls.append((name, text, *seconds))
    return told if name == 'stop' else ['']

  monkeypatch.setattr(processes, 'exchange', exchange)
  with Preemption(grace_seconds=9.0) as stop:
    stop.ready(lambda: '')
    assert [stop.requested() for _ in range(3)] == [False] * 3
    os.kill(os.getpid(), signal.SIGTERM)
    while len(calls) < 2:  # asked of all, how far they are
      time.sleep(0.01)
    assert [stop.requested() for _ in range(4)] == [False, False, True, True]
  assert calls == [('ready', ''), ('stop', '3', 9.0)]


def builder_of(process):
  """The process that builds a token store for a run; None before there is one."""
  for pid in pathlib.Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split():
    if 'build_store' in pathlib.Path(f'/proc/{pid}/cmdline').read_text():
      return int(pid)
  return None


def test_while_a_store_is_built_its_builder_is_ended_too(flags, folder, tmp_path):
  elsewhere = ("--gin.task='python_stdlib'", f"--gin.TaskFeed.data_dir='{tmp_path}'")
  with start(flags, folder, tmp_path, *elsewhere) as process:
    while (builder := builder_of(process)) is None:
      assert process.poll() is None, process.stderr.read()
      time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.stderr.read()
  assert process.returncode == 75, said
  assert 'valkyrie: SIGINT before the first step' in said
  with pytest.raises(ProcessLookupError):
    os.kill(builder, 0)


def test_what_outlasts_the_grace_is_ended_and_the_newest_checkpoint_named(flags, folder, tmp_path):
  more = ('--gin.Act.at=3', '--gin.Act.what="hang"', '--gin.checkpoint_every=1')
  with start(flags, folder, tmp_path, *more, '--gin.Preemption.grace_seconds=0.5') as process:
    said = process.stderr.read()
  assert process.returncode == 75, said
  named = re.search(r'grace_seconds = 0.5; the newest checkpoint is (.*)\. Run the same', said)
  assert pathlib.Path(named.group(1)).is_dir()
  assert named.group(1).removeprefix(f'{tmp_path}/run/checkpoints/') in ('2', '3')


def test_during_an_evaluation_it_is_given_up_and_the_state_saved(train_here, tmp_path):
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with pytest.raises(Preempted, match=r'stopped after step 2 of 4; .*run/checkpoints/2\.'):
    train_here('--gin.train.evaluator=@Interrupted', '--gin.eval_every=2')
  assert checkpoints(tmp_path) == ['2']
  assert not (tmp_path / 'run' / 'eval' / 'metrics.jsonl').read_text()
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_an_error_in_the_loop_is_shown_and_what_was_trained_is_saved(
  train_here, tmp_path, monkeypatch
):
  reader, writer = os.pipe()
  monkeypatch.setenv(heartbeat.VARIABLE, str(writer))
  with pytest.raises(ValueError, match='a bug of the hook') as error:
    train_here('--gin.Act.at=3', '--gin.Act.what="fail"')
  assert 'What was trained until then was saved.' in error.value.__notes__
  assert checkpoints(tmp_path) == ['3']
  # What a supervisor has heard of it.
  os.close(writer)
  with open(reader) as lines:
    heard = [json.loads(line) for line in lines]
  assert heard == [
    {'phase': 'start_up', 'model_dir': str(tmp_path / 'run')},
    {'phase': 'compile'},
    *({'phase': 'step', 'step': step} for step in (1, 2, 3)),
    {'phase': 'save'},
    {'saved': 3},
  ]


def test_numbers_that_stay_infinite_end_the_run_and_name_the_documents(train_here, folder):
  budget = ('--gin.RefusedSteps.allowed=1', '--gin.RefusedSteps.window=3')
  with pytest.raises(Diverged) as end:
    train_here('--gin.train_steps=6', '--gin.learning_rate=1e30', *budget)
  assert end.value.exit_code == 76
  message = str(end.value)
  assert '2 of the last 3 steps' in message and 'step 3, which read' in message
  assert re.search(rf'documents of {folder}/data/.*: row 0: \d+', message)
