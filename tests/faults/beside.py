"""Faults beside the steps of a run: compiled programs, small files, streams, secrets, strangers."""

from collections.abc import Iterator
import gzip
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

from faults.harness import STEPS, Harness, ended, mounted
from faults.table import Trial, fault
from valkyrie.checkpoint.steps import DiskSteps

STORAGE, CONFIGURATION, DATA = 74, 78, 65


def _refused(harness: Harness, name: str, code: int, codes: tuple[int, ...]) -> str | None:
  """What is wrong with an end that a message should explain."""
  said = harness.said(name)
  is_right = code in codes and 'Traceback' not in said and '\nvalkyrie: ' in f'\n{said}'
  return None if is_right else f'exit code {code}: {said[-400:]}'


@fault(
  'one flipped bit in each file of the compile cache',
  'is passed over, the run continues bit for bit',
  full=4,
)
def compiled(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    folder = harness.folder / f'{name}.compiled'
    shutil.copytree(harness.folder / 'compiled', folder)
    for file in folder.rglob('*'):
      if file.is_file() and file.stat().st_size:
        content = bytearray(file.read_bytes())
        content[len(content) * (2 * number + 1) // (2 * times)] ^= 1 << number
        file.write_bytes(content)
    process = harness.start(name, environment={'JAX_COMPILATION_CACHE_DIR': str(folder)})
    yield Trial(f'bit {number}', harness.outcome(name, process))
    harness.forget(name)


BESIDE = ('config.gin', 'config.json', 'operative_config.gin', 'model_info.txt', 'eval/data.json')


@fault(
  'the small files of a run cut by a kill',
  'are whole after the next start, which continues bit for bit',
  full=2,
)
def halves(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    kill = ('--gin.Act.at=13', '--gin.Act.action="kill"')
    harness.run(name, *kill, code=-9)
    files = [harness.folder / name / file for file in BESIDE]
    whole = [file.read_bytes() for file in files]
    for file, content in zip(files, whole, strict=True):
      file.write_bytes(content[: number * len(content) // 2])
    harness.run(name, *kill)
    left = [file.name for file, b in zip(files, whole, strict=True) if file.read_bytes() != b]
    yield Trial(
      ('emptied', 'cut')[number % 2], f'{left} differ' if left else harness.difference(name)
    )
    harness.forget(name)


@fault('eval --follow of a run that stops early', 'evaluates its last step and ends', full=1)
def follower(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    harness.run(name, '--gin.learning_rate=0.0', '--gin.eval_every=4', '--gin.train.patience=1')
    saved = harness.saved(name)
    code = ended(harness.start(name, '--run_mode=eval', '--follow'), 60.0)
    done = [
      json.loads(line)['step']
      for line in (harness.folder / name / 'eval_whole/metrics.jsonl').read_text().splitlines()
    ]
    failure = None if code == 0 and done == saved else f'{code}: {done} of {saved}'
    yield Trial(f'step {saved[-1]}', failure if saved[-1] < STEPS else 'it did not stop early')
    harness.forget(name)


# {what: a shell that runs "$@" so}
STREAMS = {
  'all closed': '"$@" <&- >&- 2>&-',
  'a full device': '"$@" > /dev/full 2>&1',
  'a reader that goes away': '"$@" 2>&1 | head -1; exit ${PIPESTATUS[0]}',
}


@fault(
  'standard streams that are full, closed, or lose their reader, in training and evaluation',
  'do not disturb the run',
  full=3,
)
def streams(harness: Harness, times: int) -> Iterator[Trial]:
  for what in list(STREAMS)[:times]:
    name = harness.new()
    prefix = ('bash', '-c', STREAMS[what], 'bash')
    failure = harness.outcome(name, harness.start(name, prefix=prefix))
    evaluation = harness.start(name, '--run_mode=eval', prefix=prefix)
    failure = failure or harness.ending(name, evaluation)
    if not (harness.folder / name / 'eval/metrics.jsonl').read_text():
      failure = failure or 'there is no evaluation'
    yield Trial(what, failure)
    harness.forget(name)


@fault(
  'a full disk, and the same command with a lower Checkpoints.keep',
  'frees steps before it saves, never the newest, and continues bit for bit',
  full=1,
)
def lower_keep(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    with mounted(harness.folder / f'{name}.disk') as disk:
      run, place = disk / 'run', f'--model_dir={disk / "run"}'
      harness.run(name, place, '--gin.Act.at=14', '--gin.Act.action="kill"', code=-9)
      room, (*_, newest) = os.statvfs(disk), DiskSteps(run).find()
      left = DiskSteps(run).files(newest).size() // 2
      (disk / 'ballast').write_bytes(bytes(room.f_bavail * room.f_frsize - left))
      patience = '--gin.Checkpoints.patience=0'
      failure = harness.ending(name, harness.start(name, place, patience), STORAGE)
      failure = failure or harness.ending(
        name, harness.start(name, place, patience, '--gin.Checkpoints.keep=1')
      )
      yield Trial(f'{left} bytes left', failure or harness.difference(name))
    harness.forget(name)


# So often the process cannot open a file to write whose name has this, in a folder whose path has
# this. A run reaches its folder by a descriptor.
_FULL = """
import errno, os, sys
left = {times!r}
def full(event, arguments):
  global left
  if event == 'open' and isinstance(arguments[0], str) and {file!r} in arguments[0]:
    folder = os.path.realpath(os.path.dirname(arguments[0]))
    if {place!r} in folder + '/' and arguments[2] & os.O_CREAT and left > 0:
      left -= 1
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])
sys.addaudithook(full)
"""
# The process cannot make a folder of this name; TensorFlow, which writes into it, has no hooks.
_NO_FOLDER = """
import errno, os, sys
def full(event, arguments):
  if event == 'os.mkdir' and os.path.basename(os.fspath(arguments[0])) == {folder!r}:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])
sys.addaudithook(full)
"""
MADE_PATIENTLY = (
  'model_info.txt', 'config.gin', 'config.json', 'operative_config.gin', 'data.json',
  'metrics.jsonl', 'refused_steps.jsonl',
)  # fmt: skip
MADE = (*MADE_PATIENTLY, 'trainer.lock', 'record.json', 'manifest.sha256')


def _full(name: str, file: str, refusals: int = 10**9) -> str:
  """Code that refuses a file of a run, so often."""
  return _FULL.format(file=file, place=f'/{name}/', times=refusals)


@fault(
  'a disk that is full just when one of the files of a run is made',
  'ends with 74 when its patience is over, and continues bit for bit when there is room',
  full=len(MADE),
)
def one_file(harness: Harness, times: int) -> Iterator[Trial]:
  for file in MADE[:times]:
    name = harness.new()
    world = harness.customized(name, _full(name, file))
    flags = ('--gin.Checkpoints.patience=0', '--gin.create_writers.patience=0')
    flags += ('--gin.create_writers.tensorboard=True', '--gin.eval_every=12')
    code = ended(harness.start(name, *flags, environment=world))
    failure = _refused(harness, name, code, (STORAGE,))
    (harness.folder / name / 'sitecustomize.py').unlink()
    harness.run(name, *flags)
    yield Trial(file, failure or harness.difference(name))
    harness.forget(name)


@fault(
  'a disk that is full for seconds just when one of the files of a run is made',
  'is reported, and the run goes on when there is room, bit for bit',
  full=len(MADE_PATIENTLY),
)
def one_file_for_seconds(harness: Harness, times: int) -> Iterator[Trial]:
  for file in MADE_PATIENTLY[:times]:
    name = harness.new()
    world = harness.customized(name, _full(name, file, refusals=2))
    failure = harness.outcome(name, harness.start(name, environment=world))
    if failure is None and harness.said(name).count('tried again for up to') != 1:
      failure = 'it was not reported'
    yield Trial(file, failure)
    harness.forget(name)


@fault(
  'a disk that takes no picture or no event files',
  'is reported, and the run goes on to its end, bit for bit',
  full=2,
)
def one_watcher(harness: Harness, times: int) -> Iterator[Trial]:
  for file in ('loss_by_position', 'train')[:times]:
    name = harness.new()
    code = _NO_FOLDER.format(folder=file)
    if file == 'loss_by_position':
      code = _full(name, file)
    world = harness.customized(name, code)
    flags = ('--gin.create_writers.tensorboard=True', '--gin.eval_every=12')
    failure = harness.outcome(name, harness.start(name, *flags, environment=world))
    if failure is None and 'No space left on device' not in harness.said(name):
      failure = 'it was not reported'
    yield Trial(file, failure)
    harness.forget(name)


SECRET = 'swordfish'


@fault('a secret that is named env:NAME', 'reaches its user, and no file of the run', full=1)
def named_secret(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    flags = [
      f'--gin.LogIn.{each}="env:MY_KEY"' for each in ('api_key', 'token', 'headers', 'others')
    ]
    hooks = '--gin.train.hooks=(@LogIn(), @HashState())'
    process = harness.start(name, *flags, hooks, '--gin.train_steps=2')
    failure = _refused(harness, name, ended(process), (CONFIGURATION,))
    harness.run(name, *flags, hooks, steps=2, environment={'MY_KEY': SECRET})
    files = [file for file in (harness.folder / name).rglob('*') if file.is_file()]
    found = [file.name for file in files if SECRET.encode() in file.read_bytes()]
    yield Trial('of a hook', failure or (f'found in {found}' if found else None))
    harness.forget(name)


DEEP = b'[' * 100_000
# (file, content, exit code), of an evaluation or a report.
STRANGE = (
  ('metrics.jsonl', DEEP + b'\n', STORAGE),
  ('config.json', DEEP, CONFIGURATION),
  ('config.json', b'{"written_by": 7, "imports": 7, "statements": 7}', CONFIGURATION),
  ('config.json', b'\xff\xfe', CONFIGURATION),
  ('metrics.jsonl', b'{"step": [1], "phase": {}}\n', STORAGE),
  ('trainer.lock', b'\xff' * 100, 0),
)


@fault(
  'files of a stranger with 100,000 brackets, other types or bytes that are not UTF-8',
  'are read, or end with 74 or 78, the file and the reason on a line',
  full=len(STRANGE),
)
def strange(harness: Harness, times: int) -> Iterator[Trial]:
  for file, content, expected in STRANGE[:times]:
    name = harness.new()
    run = pathlib.Path(shutil.copytree(harness.folder / 'reference', harness.folder / name))
    (run / file).write_bytes(content)
    command = [sys.executable, '-m', 'valkyrie.monitoring.html_report', str(run)]
    if file != 'metrics.jsonl':
      command = harness.command(name, '--run_mode=eval')
    command = [each for each in command if not each.startswith('--gin_file')]
    world = harness.environment()
    done = subprocess.run(command, cwd=run, env=world, capture_output=True, text=True, check=False)
    is_right = done.returncode == expected and 'Traceback' not in done.stderr
    if expected:
      is_right &= (
        re.search(rf'^valkyrie: .*{re.escape(file)}', done.stderr, re.MULTILINE) is not None
      )
    yield Trial(file, None if is_right else f'exit code {done.returncode}: {done.stderr[-400:]}')
    harness.forget(name)


@fault(
  'a line of 1 GB in 4.4 MB of gz',
  'ends with 65, the file is named',
  full=1,
)
def long_line(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    folder = harness.folder / f'{name}.text'
    folder.mkdir()
    with gzip.open(folder / 'a.jsonl.gz', 'wb', compresslevel=1) as file:
      file.write(b'{"text": "')
      for _ in range(1000):
        file.write(b'a' * 10**6)
      file.write(b'"}\n')
    flags = ('--gin_file=gin/data/text.gin', f'--gin.text="{folder}"')
    stores = harness.folder / f'{name}.stores'
    process = harness.start(name, *flags, f'--gin.TaskFeed.data_dir="{stores}"')
    failure = _refused(harness, name, ended(process), (DATA,))
    yield Trial(
      'a.jsonl.gz', failure or (None if 'a.jsonl.gz' in harness.said(name) else 'no name')
    )
    harness.forget(name)
