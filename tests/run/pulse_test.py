"""A run from the command line: train, evaluate, infer, be killed, and resume bit for bit."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import tiny_run

from valkyrie import __version__
from valkyrie.config.parse import WRITTEN_BY

ROOT = pathlib.Path(__file__).parents[2]

HASHES = '''
"""Writes a hash of every train state, and dies or asks for an end where it is told to."""

import hashlib
import os
import signal

import gin
import jax
import numpy as np


@gin.configurable
class HashState:
  def __init__(self, path, die_after=None, ask_after=None):
    self.path, self.die_after, self.ask_after = path, die_after, ask_after

  def __call__(self, step, state, metrics):
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
      leaf = np.asarray(leaf)
      digest.update(f'{path} {leaf.dtype} {leaf.shape}'.encode() + leaf.tobytes())
    with open(self.path, 'a') as file:
      print(step, digest.hexdigest(), file=file, flush=True)
    if step == self.die_after:
      os.kill(os.getpid(), signal.SIGKILL)
    if step == self.ask_after:
      os.kill(os.getpid(), signal.SIGTERM)
      os.kill(os.getpid(), signal.SIGINT)
'''

FIELDS = {
  'step', 'tokens', 'loss', 'bits_per_token', 'bits_per_byte', 'grad_norm', 'learning_rate',
  'step_seconds', 'tokens_per_second', 'tokens_per_second_per_device',
  'tflops_per_second_per_device', 'mfu', 'phase', 'skipped', 'perplexity', 'targets', 'goodput',
}  # fmt: skip
OF_THE_MACHINE = {
  'step_seconds', 'tokens_per_second', 'tokens_per_second_per_device',
  'tflops_per_second_per_device', 'mfu', 'host_memory_peak', 'device_memory_peak', 'goodput',
}  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('pulse')
  tiny_run.write_stores(path / 'data', 'letters', 'abcdefgh')
  (path / 'state_hashes.py').write_text(HASHES)
  more = 'import state_hashes\ntrain.hooks = (@HashState(),)'
  (path / 'run.gin').write_text(
    tiny_run.gin_text(path / 'data', layers=2, mixers=tiny_run.BOTH, quick='', more=more)
  )
  return path


@pytest.fixture(scope='module')
def valkyrie(folder):
  """Starts the command on model_dir `name`, or checks its end: (exit code, output, errors)."""

  def start(name, *arguments, **world):
    command = [sys.executable, '-m', 'valkyrie.main', f'--gin_file={folder / "run.gin"}']
    command += [f'--model_dir={folder / name}', '--gin_allow_import=state_hashes']
    command += [f'--gin.HashState.path="{folder / name}.hashes"']
    command += ['--gin.train_steps=6', '--gin.checkpoint_every=2', '--gin.eval_every=4', *arguments]
    return subprocess.Popen(
      command,
      cwd=ROOT,
      env={
        **os.environ,
        'PYTHONPATH': str(folder),
        # Fusions as users have them.
        'XLA_FLAGS': '--xla_force_host_platform_device_count=8 '
        '--xla_cpu_parallel_codegen_split_count=1 --xla_disable_hlo_passes=hlo-verifier',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # six steps do not repay a good compilation
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'compiled'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        **world,
      },
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  return start


def finished(process, code=0):
  out, errors = process.communicate(timeout=300)
  assert process.returncode == code, errors
  return out, errors


@pytest.fixture(scope='module')
def runs(folder, valkyrie):
  """(a run of 6 steps, one killed after step 5 and resumed, what the resumed one said).

  The resumed one has another time zone, locale and hash seed.
  """
  finished(valkyrie('whole'))  # compiles what the others read
  finished(valkyrie('killed', '--gin.HashState.die_after=5'), -signal.SIGKILL)
  _, said = finished(
    valkyrie('killed', TZ='Pacific/Kiritimati', LC_ALL='tr_TR.UTF-8', PYTHONHASHSEED='7')
  )
  return folder / 'whole', folder / 'killed', said


def hashes(model_dir):
  """[(step, hash)] in the order written."""
  lines = pathlib.Path(f'{model_dir}.hashes').read_text().splitlines()
  return [tuple(line.split()) for line in lines]


@pytest.mark.invariant(10)
def test_a_killed_run_resumes_bit_for_bit(runs):
  whole, killed, said = runs
  expected, found = hashes(whole), hashes(killed)
  assert [step for step, _ in expected] == list('123456')
  assert len(dict(expected)) == len(set(dict(expected).values()))
  before, after = found[:5], found[5:]
  # The save of step 4 was under way when the process died at step 5: whole, or step 2 counts.
  assert after in (expected[4:], expected[2:])
  assert before == expected[:5]
  assert f'resuming after step {int(after[0][0]) - 1}' in said


@pytest.mark.invariant(10)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_bit_for_bit(runs, folder, valkyrie):
  _, said = finished(valkyrie('asked', '--gin.HashState.ask_after=4'), 75)
  assert said.index('handlers ready') < said.index('SIGTERM: stopping after the running step')
  done = len(hashes(folder / 'asked'))
  assert f'valkyrie: stopped after step {done} of 6; the newest checkpoint is {folder}' in said
  # The save of step 4 was under way.
  assert done in (4, 5) and (folder / 'asked' / 'checkpoints' / str(done)).is_dir()
  finished(valkyrie('asked'))
  assert hashes(folder / 'asked') == hashes(runs[0])


def test_a_resumed_run_reports_the_same_numbers(runs):
  whole, killed = map(tiny_run.metrics, runs[:2])
  assert list(whole) == list(killed) == list(range(1, 7))
  for step, line in whole.items():
    assert set(line) >= FIELDS
    for name in set(line) - OF_THE_MACHINE:
      assert killed[step][name] == line[name]
  assert whole[6]['tokens'] == 6 * 8 * 32
  assert tiny_run.metrics(runs[0], 'eval') == tiny_run.metrics(runs[1], 'eval')


def test_what_a_run_leaves_behind(runs):
  run, _, _ = runs
  assert sorted(file.name for file in (run / 'checkpoints').iterdir()) == ['2', '4', '6']
  assert 'chunk_size = 16' in (run / 'config.gin').read_text()
  # What was constructed, with its defaults.
  assert 'Checkpoints.keep = 3' in (run / 'operative_config.gin').read_text()
  config = json.loads((run / 'config.json').read_text())
  assert (config['written_by'], config['macros']['train_steps']) == (WRITTEN_BY, 6)
  record = json.loads((run / 'checkpoints/6/record.json').read_text())
  assert config['version'] == record['versions']['valkyrie'] == __version__
  assert (run / 'loss_by_position.png').stat().st_size
  info = (run / 'model_info.txt').read_text()
  assert 'model/embedding' in info and 'vocabulary' in info and 'float32' in info
  from tensorboard.backend.event_processing import event_accumulator  # noqa: PLC0415 - TensorFlow

  for stream, expected in (
    ('train', {'learning/loss', 'throughput/tokens_per_second', 'configuration'}),
    ('eval', {'validation/loss', 'validation/loss_by_position'}),
  ):
    events = event_accumulator.EventAccumulator(str(run / stream))
    events.Reload()
    assert expected <= set(events.Tags()['tensors'])


def test_evaluation_and_continuation_of_a_run(runs, valkyrie):
  run, _, _ = runs
  before = {file for file in run.rglob('*') if 'events' not in file.name}
  prompt = 'abcdefgh' * 5 + 'a'  # two chunks and a half
  arguments = ('--run_mode=infer', f'--prompt={prompt}', '--gin.infer.max_tokens=20')
  evaluating = valkyrie('whole', '--run_mode=eval', '--gin.evaluate.cuts=("state",)')
  inferring = valkyrie('whole', *arguments)
  out, _ = finished(evaluating)
  loss = tiny_run.metrics(run, 'eval')[6]['loss']
  assert out.startswith(f'step 6, validation: loss {loss:.4f}')
  loss = tiny_run.metrics(run, 'eval_cut_state')[6]['loss']
  assert f'\nstep 6, validation, state carry cut between chunks: loss {loss:.4f}' in out
  text, _ = finished(inferring)
  assert text.startswith(prompt) and len(text) > len(prompt)
  assert finished(valkyrie('whole', *arguments))[0] == text
  after = {file for file in run.rglob('*') if 'events' not in file.name}
  cut = run / 'eval_cut_state'
  assert after - before == {cut, cut / 'metrics.jsonl', cut / 'data.json'}
