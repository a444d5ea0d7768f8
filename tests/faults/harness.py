"""The harness of fault injection: command line runs of a tiny model, without TensorFlow."""

from collections.abc import Iterator, Mapping
import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np

from faults import quick_compiler
from faults.table import Unavailable
from valkyrie.checkpoint.steps import DiskSteps
from valkyrie.data import store_writer, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.distributed.heartbeat import VARIABLE, address
from valkyrie.monitoring.json_lines import by_step, read_lines

ROOT = pathlib.Path(__file__).resolve().parents[2]
BYTES = vocabularies.ByteVocabulary()
STEPS, ROWS, TOKENS = 24, 4, 32  # steps of a run, rows of a batch, tokens of a row in a step
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else [0]
PATIENCE = 300.0  # seconds after which a run that should end counts as hanging

GIN = """
seed = 0
batch_size = {rows}
chunk_size = 16
chunks = 2
backprop_chunks = 2
train_steps = {steps}
log_every = 1
eval_every = 1000
checkpoint_every = 4
learning_rate = 3e-3
warmup_steps = 4

include 'gin/run.gin'
include 'gin/models/toy.gin'
include 'gin/partition/{partition}.gin'
include 'gin/curriculum/constant.gin'
include 'gin/data/python_stdlib.gin'

import faults.commits
import faults.faulty
import faults.hooks

task = 'letters'
TaskFeed.data_dir = '{data}'
train.hooks = (@HashState(), @Pace(), @Act())
StepSettings.remat_chunks = False
create_writers.tensorboard = False
LanguageModel.remat_policy = None
LanguageModel.layers = 1
"""


class Harness:
  """A folder of runs that share a token store, gin files and compiled programs.

  Attributes:
    folder: the folder.
    random: the generator of random moments and places, with the seed of the command line.
    expected: {step: hash of the train state} of an undisturbed run.
  """

  def __init__(self, folder: pathlib.Path, seed: int):
    self.folder = folder
    self.random = random.Random(seed)
    self._runs = 0
    write_store(folder / 'data', 'letters', 'train', texts('abcdefgh', 24, seed=0))
    write_store(folder / 'data', 'letters', 'validation', texts('abcdefgh', 8, seed=1))
    for partition in ('single', 'zero1'):
      (folder / f'{partition}.gin').write_text(
        GIN.format(rows=ROWS, steps=STEPS, partition=partition, data=folder / 'data')
      )
    self.run('reference')  # fills the cache of compiled programs
    self.expected = dict(self.hashes('reference'))
    assert list(self.expected) == list(range(1, STEPS + 1))

  @functools.cached_property
  def run_seconds(self) -> float:
    """The duration of an undisturbed run whose programs are compiled."""
    began = time.monotonic()
    self.run('timed')
    return time.monotonic() - began

  def new(self) -> str:
    """A new name of a run."""
    self._runs += 1
    return f'run{self._runs}'

  def command(self, name: str, *flags: str, partition: str = 'single') -> list[str]:
    """The command line of run `name`."""
    model_dir = [f'--model_dir={self.folder / name}']
    if any(flag.startswith('--model_dir') for flag in flags):
      model_dir = []
    file = f'--gin_file={self.folder / partition}.gin'
    command = [sys.executable, '-m', 'valkyrie.main', file, *self.flags(name), *model_dir]
    return [*command, *flags]

  def flags(self, name: str) -> list[str]:
    """The flags that the gin files of this harness need."""
    place = self.folder / name
    return [
      '--gin_allow_import=faults',
      f'--gin.HashState.path="{place}.hashes"',
      f'--gin.Act.once="{place}.acted"',
    ]

  def environment(self, devices: int = 1, **more: str) -> dict[str, str]:
    """The environment of the processes of a run."""
    return {
      **os.environ,
      'PYTHONPATH': os.pathsep.join(map(str, (ROOT, ROOT / 'tests', ROOT / 'docs' / 'examples'))),
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'{quick_compiler.FLAGS} --xla_force_host_platform_device_count={devices}',
      'JAX_COMPILATION_CACHE_DIR': str(self.folder / 'compiled'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
      **more,
    }

  def customized(self, name: str, code: str) -> dict[str, str]:
    """The environment of processes that execute `code`, a text of Python, as they start."""
    folder = self.folder / name
    folder.mkdir(exist_ok=True)
    (folder / 'sitecustomize.py').write_text(code)
    return {'PYTHONPATH': f'{folder}{os.pathsep}{self.environment()["PYTHONPATH"]}'}

  def start(
    self,
    name: str,
    *flags: str,
    partition: str = 'single',
    devices: int = 1,
    environment: Mapping[str, str] | None = None,
    cwd: pathlib.Path = ROOT,
    prefix: tuple[str, ...] = (),
    **options,
  ) -> subprocess.Popen:
    """Starts or resumes run `name`, and appends its output to NAME.log."""
    with open(self.folder / f'{name}.log', 'ab') as log:
      return subprocess.Popen(
        [*prefix, *self.command(name, *flags, partition=partition)],
        cwd=cwd,
        env=self.environment(devices, **(environment or {})),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        **options,
      )

  def start_and_hold(self, name: str, at: int, *flags: str, **options) -> subprocess.Popen:
    """Starts a run, and returns when it waits after a step, until `release`."""
    hold = (f'--gin.Act.at={at}', '--gin.Act.action="wait"')
    process = self.start(name, *hold, *flags, **options)
    wait_for((self.folder / f'{name}.acted').exists, process)
    return process

  def release(self, name: str) -> None:
    """Lets a run that waits go on."""
    (self.folder / f'{name}.acted').unlink()

  def run(self, name: str, *flags: str, steps: int = STEPS, code: int = 0, **options) -> None:
    """Runs `name` to its end, and checks its exit code."""
    process = self.start(name, f'--gin.train_steps={steps}', *flags, **options)
    if failure := self.ending(name, process, code):
      raise AssertionError(failure)

  def ending(self, name: str, process: subprocess.Popen, code: int = 0) -> str | None:
    """Waits for the end of a process of a run; None if it ends with this exit code."""
    if (found := ended(process)) == code:
      return None
    return f'exit code {found}, expected {code}: {self.said(name)[-400:]}'

  def outcome(self, name: str, process: subprocess.Popen) -> str | None:
    """Waits for the end of a run; None if it ends well, as an undisturbed one."""
    return self.ending(name, process) or self.difference(name)

  def said(self, name: str) -> str:
    """The output of all processes of a run."""
    return (self.folder / f'{name}.log').read_text(errors='replace')

  def hashes(self, name: str) -> list[tuple[int, str]]:
    """(step, hash of the train state after it), in the order of execution."""
    path = self.folder / f'{name}.hashes'
    text = path.read_text() if path.exists() else ''
    complete, _, _ = text.rpartition('\n')  # the process may be writing the rest
    lines = complete.splitlines()
    return [(int(step), digest) for step, digest in map(str.split, lines)]

  def difference(
    self, name: str, whole: bool = True, expected: Mapping[int, str] | None = None
  ) -> str | None:
    """The first difference from an undisturbed run; None if all states are bit-identical."""
    found, expected = self.hashes(name), expected or self.expected
    for step, digest in found:
      if expected.get(step) != digest:
        return f'the state after step {step} differs'
    if whole and (missing := set(expected) - {step for step, _ in found}):
      return f'steps {sorted(missing)} are missing'
    return self._missing_lines(name)

  def _missing_lines(self, name: str) -> str | None:
    """The saved steps that metrics.jsonl lacks."""
    path = self.folder / name / 'metrics.jsonl'
    if not path.exists():  # it was not reached, or is in a directory of another name
      return None
    steps = set(by_step(path))
    newest = max(self.saved(name), default=0)
    if missing := set(range(1, newest + 1)) - steps:
      return f'metrics.jsonl lacks steps {sorted(missing)}, and step {newest} is saved'
    return None

  def repeated(self, name: str) -> int:
    """The largest number of steps that a resumed run has repeated."""
    steps = [step for step, _ in self.hashes(name)]
    falls = [before + 1 - after for before, after in itertools.pairwise(steps)]
    return max([fall for fall in falls if fall > 0] or [0])

  def endings(self, name: str) -> list[dict]:
    """The lines that the supervisors of a run have written, one for each ended process."""
    return read_lines(self.folder / name / 'supervise.jsonl')

  def saved(self, name: str) -> list[int]:
    """The saved steps in order."""
    return DiskSteps(self.folder / name).find()

  def forget(self, name: str) -> None:
    """Deletes a run."""
    shutil.rmtree(self.folder / name, ignore_errors=True)
    for path in self.folder.glob(f'{name}.*'):
      if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
      else:
        path.unlink()


def keep_to(core: int) -> None:
  """Binds this process and its children to one core, except on macOS."""
  with contextlib.suppress(AttributeError):
    os.sched_setaffinity(0, {core})


def ended(process: subprocess.Popen, within: float = PATIENCE) -> int:
  """Waits for the end of a process, and returns its exit code; kills it after the time limit."""
  try:
    return process.wait(within)
  except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
    raise AssertionError(f'the process did not end within {within:g} s') from None


def wait_for(condition, process: subprocess.Popen | None, seconds: float = PATIENCE) -> bool:
  """Waits until a condition holds; False if the process, where there is one, ends before."""
  until = time.monotonic() + seconds
  while not condition():
    if process is not None and process.poll() is not None:
      return bool(condition())
    if time.monotonic() > until:
      if process is not None:
        process.kill()
      raise AssertionError(f'the condition did not hold within {seconds:g} s')
    time.sleep(0.005)
  return True


def texts(letters: str, count: int, seed: int) -> list[str]:
  """Random texts of 12 to 39 letters."""
  generator = np.random.default_rng(seed)
  return [''.join(generator.choice(list(letters), n)) for n in generator.integers(12, 40, count)]


def write_store(data: pathlib.Path, task: str, split: str, documents: list[str]) -> pathlib.Path:
  """A token store of these texts, in two shards."""
  selection = Selection(task, split, BYTES)
  path = store_path(selection, str(data))
  store_writer.StoreWriter(path, selection, {}, shards=2).write(
    lambda shard: [
      store_writer.Document(np.asarray(BYTES.encode(text)), len(text))
      for text in documents[shard::2]
    ]
  )
  return path


@contextlib.contextmanager
def heartbeats() -> Iterator[tuple[dict, 'Heartbeats']]:
  """A pipe for the heartbeats of a run: (options of its start, the reading end)."""
  reader, writer = os.pipe()
  os.set_blocking(reader, False)
  try:
    yield {'environment': {VARIABLE: address(writer)}, 'pass_fds': (writer,)}, Heartbeats(reader)
  finally:
    os.close(reader)
    os.close(writer)


class Heartbeats:
  """The reading end of a pipe of heartbeats."""

  def __init__(self, reader: int):
    self._reader = reader
    self._text = b''

  def reached(self, stage: str, times: int) -> bool:
    """Whether a stage was reported at least so many times."""
    with contextlib.suppress(BlockingIOError):
      self._text += os.read(self._reader, 65536)
    lines = map(json.loads, self._text.split(b'\n')[:-1])
    return sum(line.get('stage') == stage for line in lines) >= times


@contextlib.contextmanager
def mounted(place: pathlib.Path, size: str = '8m') -> Iterator[pathlib.Path]:
  """A temporary file system in memory."""
  place.mkdir()
  mounting = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(place)]
  done = subprocess.run(mounting, capture_output=True, text=True, check=False)
  if done.returncode:
    raise Unavailable(f'a file system cannot be mounted here: {done.stderr.strip()}')
  handle = os.open(place, os.O_RDONLY)  # stays valid where a directory above is renamed
  try:
    yield place
  finally:
    now = os.readlink(f'/proc/self/fd/{handle}')
    os.close(handle)
    subprocess.run(['umount', '--lazy', now], check=True)


@functools.cache
def another_container() -> tuple[str, ...]:
  """A prefix under which a command has other PIDs and other memory, but the same host name."""
  command = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
  prefix = ('unshare', '--pid', '--fork', '--kill-child', '--mount-proc', 'sh', '-c', command, 'sh')
  try:
    subprocess.run([*prefix, 'true'], check=True, capture_output=True, text=True)
  except (OSError, subprocess.CalledProcessError) as error:
    why = getattr(error, 'stderr', None) or error
    raise Unavailable(f'a process cannot have other PIDs here: {why}') from error
  return prefix


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
HANG_UP, QUIT = signal.SIGHUP, signal.SIGQUIT
