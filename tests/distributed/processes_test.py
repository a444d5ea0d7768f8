"""Runs of two processes with four devices each, compared with one process with eight devices.

The processes connect through the loopback address. A hook in one of them injects a fault.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from held_ports import held_port
import jax
import layouts
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.errors import ConfigurationError

ROOT = pathlib.Path(__file__).parents[2]
BESIDE = '''
"""A feed that hashes its batches, and a hook that injects a fault into a process."""

import hashlib
import os
import pathlib
import signal
import time

import gin
import jax
from valkyrie.data.feed import TaskFeed
from valkyrie.errors import DataError


@gin.configurable
class LoggedFeed(TaskFeed):
  def read(self, position, length, rows=None):
    batch = super().read(position, length, rows)
    with open(os.environ['READ'], 'a') as file:
      for number, row in enumerate(rows):
        digest = hashlib.sha256(b''.join(leaf[number].tobytes() for leaf in batch))
        print(position, row, digest.hexdigest(), file=file)
    return batch


@gin.configurable
class Act:
  """Reads from ACTS, for each start of the run, a step, a process and an action."""

  def __init__(self):
    acts = [act.split() for act in os.environ['ACTS'].split(',')]
    starts = pathlib.Path(f'{os.environ["READ"]}.start.{jax.process_index()}')
    with starts.open('a') as file:
      file.write('.')
    number = starts.stat().st_size - 1
    self.step, self.process, self.what = acts[number] if number < len(acts) else ('0', '0', 'none')

  def __call__(self, step, state, metrics):
    if step != int(self.step) or jax.process_index() != int(self.process):
      return
    if self.what == 'stop':
      os.kill(os.getpid(), signal.SIGTERM)
      os.kill(os.getpid(), signal.SIGINT)
    elif self.what == 'refuse':
      raise DataError('a damaged document')
    elif self.what == 'wait':
      while not pathlib.Path(f'{os.environ["READ"]}.go').exists():
        time.sleep(0.05)
'''
DEVICES = '--xla_force_host_platform_device_count'
# Rows and weights of layers, time, and products over processes: the others do less of the same.
LAYOUTS = ('fsdp', 'context_fsdp', 'tensor2d')
FLAGS = (
  '--gin.train_steps=8', '--gin.checkpoint_every=2', '--gin.Checkpoints.keep=9',
  '--gin.eval_every=3',
  '--gin.create_writers.tensorboard=False',
  '--gin_allow_import=beside',
)  # fmt: skip


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('processes')
  tiny_run.write_stores(path / 'data', 'letters', 'abcdefgh')
  (path / 'beside.py').write_text(BESIDE)
  more = 'import beside\ntrain.hooks = (@Act(),)\ntrain.feed = @train/LoggedFeed'
  (path / 'fsdp.gin').write_text(tiny_run.gin_text(path / 'data', 'fsdp', more=more))
  return path


def start(folder, count, *arguments, acts='0 0 none', command=(sys.executable,), read='read'):
  """Starts the processes of a run, with 8 devices together."""
  address = f'127.0.0.1:{held_port()}'
  tests = ROOT / 'tests'
  folders = (ROOT, ROOT / 'docs' / 'examples', tests / 'support', folder)
  return [
    subprocess.Popen(
      [*command, *arguments, *([f'--coordinator={address}', f'--process={process}',
        f'--processes={count}', '--join_seconds=60'] if count > 1 else [])],
      cwd=ROOT,
      env={
        **os.environ,
        'PYTHONPATH': os.pathsep.join(map(str, folders)),
        'PYTHON': sys.executable,
        'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} {DEVICES}={8 // count}',
        'JAX_COMPILATION_CACHE_DIR': str(folder / 'cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'ACTS': acts,
        'READ': str(folder / read),
      },
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(count)
  ]  # fmt: skip


def run(folder, gin_file, name, count=2, acts='0 0 none', supervisor=(), read='read'):
  """[(exit code, standard error)] of the processes of a run in folder/name."""
  arguments = ['-m', 'valkyrie.main', f'--gin_file={folder / gin_file}.gin', *FLAGS]
  arguments += [f'--model_dir={folder / name}']
  command = (*supervisor, sys.executable)
  processes = start(folder, count, *arguments, acts=acts, command=command, read=read)
  return [(process.returncode, said) for process in processes for said in process.communicate()[1:]]


def steps(folder, name):
  return sorted(int(path.name) for path in (folder / name / 'checkpoints').iterdir())


def read(folder, name):
  """{(position, row): hash} of the tokens read; repeated reads have the same hash."""
  lines = [line.split() for line in (folder / name).read_text().splitlines()]
  found = {(position, row): digest for position, row, digest in lines}
  assert len(found) == len({tuple(line) for line in lines})
  return found


@pytest.mark.invariant(10)
def test_two_processes_resume_a_run_of_one_and_one_process_resumes_a_run_of_two(folder):
  ((code, said),) = run(folder, 'fsdp', 'whole', 1, read='read_by_one')
  assert code == 0, said

  # The checkpoint of the run of one process after two steps.
  shutil.copytree(folder / 'whole' / 'checkpoints' / '2', folder / 'shared' / 'checkpoints' / '2')
  ended = run(folder, 'fsdp', 'shared', acts='4 1 stop')
  for code, said in ended:
    assert code == 75, said
    assert 'resuming after step 2 from' in said and 'handlers ready' in said
  done = steps(folder, 'shared')[-1]
  assert 4 <= done < 8
  assert all(f'stopped after step {done} of 8' in said for _, said in ended)
  assert 'SIGTERM: stopping' in ended[1][1] and 'process 1 is stopping' in ended[0][1]

  ((code, said),) = run(folder, 'fsdp', 'shared', 1)
  assert code == 0 and f'resuming after step {done} from' in said, said
  assert steps(folder, 'shared')[-1] == 8

  expected = read(folder, 'read_by_one')
  assert read(folder, 'read') == {at: expected[at] for at in expected if int(at[0]) >= 2 * 32}
  expected, found = (tiny_run.metrics(folder / name) for name in ('whole', 'shared'))
  assert list(expected)[2:] == list(found) == list(range(3, 9))
  assert found[3]['host_memory_peak_process'] in (0, 1) and found[3]['host_memory_peak'] > 2**20
  assert 'host_memory_peak_process' not in expected[3]
  for step in found:
    np.testing.assert_allclose(found[step]['loss'], expected[step]['loss'], rtol=1e-4)
  evaluated = [tiny_run.metrics(folder / name, 'eval')[8]['loss'] for name in ('whole', 'shared')]
  np.testing.assert_allclose(*evaluated, rtol=1e-4)


def test_a_second_process_of_a_number_is_refused_and_disturbs_nobody(folder):
  arguments = ['-m', 'valkyrie.main', f'--gin_file={folder / "fsdp.gin"}', *FLAGS]
  arguments += [
    f'--gin.{name}=100000' for name in ('train_steps', 'checkpoint_every', 'eval_every')
  ]
  arguments.append('--gin.Optimizer.train_steps=8')  # the step that others have compiled
  both = start(
    folder, 2, *arguments, f'--model_dir={folder / "twice"}', acts='1 1 wait', read='read_twice'
  )
  said = ''
  while 'compiling' not in said:
    said += both[1].stderr.readline()
    assert both[1].poll() is None, said
  environment = {**os.environ, 'PYTHONPATH': f'{ROOT}:{folder}'}
  for number, process in enumerate(both):
    third = subprocess.run(
      process.args, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert third.returncode == 75
    assert f'process {process.pid} on ' in third.stderr
    assert f'is process {number} of the run in {folder}/twice already' in third.stderr
  assert [process.poll() for process in both] == [None, None]
  (folder / 'read_twice.go').touch()
  both[0].send_signal(signal.SIGTERM)
  for process in both:
    _, said = process.communicate()
    assert process.returncode == 75, said


@pytest.mark.invariant(14)
def test_a_data_error_of_one_process_ends_both_with_65(folder):
  supervise = [str(ROOT / 'scripts' / 'supervise'), '--pause_seconds=0.1', '--']
  ended = run(
    folder, 'fsdp', 'faults', acts='3 1 refuse', supervisor=supervise, read='read_in_faults'
  )
  for code, said in ended:
    assert code == 65, said
  assert 'valkyrie: a damaged document' in ended[1][1]
  assert 'valkyrie: process 1 ended with exit code 65' in ended[0][1]
  lines = map(json.loads, (folder / 'faults' / 'supervise.jsonl').read_text().splitlines())
  assert sorted((line['process'], line['code']) for line in lines) == [(0, 65), (1, 65)]


@pytest.mark.invariant(6)
def test_two_processes_compute_the_gradient_of_one_device(folder):
  arguments = (str(ROOT / 'tests' / 'support' / 'two_processes.py'), str(folder), *LAYOUTS)
  for process in start(folder, 2, *arguments):
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert said.count('other bindings:') == 1
    assert 'The gin bindings of process 1 differ from process 0:' in said
    assert 'StepSettings.seed = 1, but 0 in process 0' in said and 'TaskFeed.task' not in said
    assert said.count('other tokens:') == 1
    assert 'In step 6, processes 0 and 1 read different tokens in row 5' in said
  expected = layouts.gradients('single', 'float32')[0]
  for name in LAYOUTS:
    with np.load(folder / f'{name}.npz') as file:
      found = jax.tree.unflatten(jax.tree.structure(expected), list(file.values()))
    gradient, carry, sums = found
    np.testing.assert_allclose(sums.loss, expected[2].loss, rtol=1e-5)
    assert (sums.weight, sums.beyond_window) == (expected[2].weight, expected[2].beyond_window)
    assert layouts.relative(gradient, expected[0]) <= 1e-5
    assert layouts.relative(carry, expected[1]) <= 1e-5


LISTENS = """
import sys
from valkyrie.distributed import processes
processes._POLL_SECONDS = 1e-5
address, process = (flag.partition('=')[2] for flag in sys.argv[1:3])
processes.join(processes.member(address, '2', int(process)), 60)
processes.latest('size', -1)
processes.latest('size', int(process))
assert processes.exchange('name', f'of {process}') == ['of 0', 'of 1']
assert processes.latest('size', int(process)) == {0: 0, 1: 1}
"""


LATE = """
import os, time
leave = os._exit
os._exit = lambda code: (time.sleep(int(process)), leave(code))  # process 0 has gone before
processes.end(75)
"""


@pytest.mark.parametrize('more, code', [('', 0), ('', 0), (LATE, 75)])
def test_processes_that_listen_all_the_time_end_well(folder, more, code):
  for process in start(folder, 2, '-c', LISTENS + more):
    said = process.communicate()[1]
    assert process.returncode == code, said


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--process=1'], 'need --processes=N'),
    (['--processes=2'], '--processes=2 and --process=None do not fit together'),
    (['--processes=2', '--process=2'], '--process=2 do not fit together.* counted from 0'),
    (['--processes=x', '--process=0'], '--processes=x and'),
    (
      ['--processes=2', '--process=0', '--coordinator=here'],
      '--coordinator=here is not an address. Use HOST:PORT',
    ),
    (['--processes=auto', '--process=1'], '--processes=auto detects --coordinator and --process'),
  ],
)
def test_flags_that_do_not_fit_together_are_refused(flags, message, tmp_path):
  with pytest.raises(ConfigurationError, match=message) as error:
    main.run(['--gin_file=gin/tiny_cpu.gin', f'--model_dir={tmp_path / "run"}', *flags])
  assert error.value.exit_code == 78
  assert not any(tmp_path.iterdir())


def test_a_process_that_no_other_joins_ends_with_75(folder):
  (process,) = start(
    folder,
    1,
    '-m',
    'valkyrie.main',
    f'--gin_file={folder / "fsdp"}.gin',
    f'--model_dir={folder / "alone"}',
    '--processes=2',
    '--process=1',
    f'--coordinator=127.0.0.1:{held_port()}',
    '--join_seconds=1',
    *FLAGS,
  )
  said = process.communicate()[1]
  assert process.returncode == 75
  assert 'did not connect at 127.0.0.1' in said and '--join_seconds=1 have passed' in said
