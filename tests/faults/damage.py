"""Damaged checkpoints, and leaks of many saves and restores."""

from collections.abc import Iterator
import json
import os
import pathlib
import shutil
import subprocess
import sys

from faults.harness import ROOT, Harness
from faults.table import Trial, fault
from valkyrie.checkpoint.manager import Checkpoints, open_to_read
from valkyrie.errors import StorageError

OLDER = 'uses the step before, keeps the damaged one'


def _files(step: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in step.rglob('*') if path.is_file())


def _newest(run: pathlib.Path) -> int | None:
  with open_to_read(run) as checkpoints:
    return checkpoints.latest_step()


def _judge(run: pathlib.Path, older: int) -> str | None:
  newest = _newest(run)
  return None if newest == older else f'step {newest} was used'


@fault('one flipped bit, in any file of a checkpoint', OLDER, full=200, short=40)
def flipped_bit(harness: Harness, times: int) -> Iterator[Trial]:
  run = pathlib.Path(shutil.copytree(harness.folder / 'reference', harness.folder / harness.new()))
  *_, older, newest = sorted(int(path.name) for path in (run / 'checkpoints').iterdir())
  files = _files(run / 'checkpoints' / str(newest))
  for number in range(times):
    file = files[number % len(files)]  # each in turn, since few files hold most of the bits
    whole = file.read_bytes()
    bit = harness.random.randrange(8 * len(whole))
    altered = bytearray(whole)
    altered[bit // 8] ^= 1 << bit % 8
    file.write_bytes(altered)
    yield Trial(f'bit {bit} of {file.relative_to(run)}', _judge(run, older))
    file.write_bytes(whole)
  if _newest(run) != newest:
    yield Trial('after all bits are restored', 'the newest step is not used')


def _cut(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


def _zero(path: pathlib.Path) -> None:
  path.write_bytes(bytes(path.stat().st_size))


def _empty(path: pathlib.Path) -> None:
  os.truncate(path, 0)


@fault('each file of a checkpoint cut, emptied, zeroed or deleted', OLDER, full=200, short=30)
def lost_files(harness: Harness, times: int) -> Iterator[Trial]:
  run = pathlib.Path(shutil.copytree(harness.folder / 'reference', harness.folder / harness.new()))
  *_, older, newest = sorted(int(path.name) for path in (run / 'checkpoints').iterdir())
  damages = (_cut, _zero, _empty, pathlib.Path.unlink)
  files = _files(run / 'checkpoints' / str(newest))
  cases = [(file, damage) for file in files for damage in damages]
  for file, damage in cases[:: max(1, len(cases) // times)][:times]:
    whole = file.read_bytes()
    damage(file)
    yield Trial(f'{damage.__name__} {file.relative_to(run)}', _judge(run, older))
    file.write_bytes(whole)


@fault('a damaged step of a run that continues', f'{OLDER}, continues bit for bit', full=5)
def continues(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    harness.run(name, '--gin.Act.at=14', '--gin.Act.action="kill"', code=-9)
    checkpoints = harness.folder / name / 'checkpoints'
    newest = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    step = checkpoints / str(newest)
    if number % 2:
      shutil.rmtree(step)
      step.mkdir()
    else:
      _cut(harness.random.choice([file for file in _files(step) if file.stat().st_size]))
    harness.run(name)
    failure = harness.difference(name)
    if not (harness.folder / name / 'set_aside' / str(newest)).is_dir():
      failure = 'the damaged step was not kept'
    yield Trial(f'step {newest}', failure)
    harness.forget(name)


@fault(
  'every step damaged', 'ends with 74, changes nothing, does not start afresh', full=20, short=3
)
def all_damaged(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    run = pathlib.Path(
      shutil.copytree(harness.folder / 'reference', harness.folder / harness.new())
    )
    for step in (run / 'checkpoints').iterdir():
      _cut(harness.random.choice([file for file in _files(step) if file.stat().st_size]))
    before = {path: path.read_bytes() for path in _files(run / 'checkpoints')}
    try:
      with Checkpoints().open(run) as checkpoints:
        failure = f'step {checkpoints.latest_step()} was used'
    except StorageError:
      after = {path: path.read_bytes() for path in _files(run / 'checkpoints')}
      failure = None if after == before else 'files were changed'
    yield Trial(str(run), failure)
    shutil.rmtree(run)


@fault(
  'a save and a restore in one process',
  'no more files, threads or steps, and no more memory than tensorstore leaks',
  full=100,
  short=5,
  unit='KiB of memory',
)
def leaks(harness: Harness, times: int) -> Iterator[Trial]:
  name = harness.new()
  command = [sys.executable, '-m', 'faults.growth', str(harness.folder / name), str(times)]
  # In an arena for each thread, malloc keeps megabytes for later, which are no leak.
  environment = harness.environment(MALLOC_ARENA_MAX='1')
  done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
  more = json.loads(done.stdout)
  # tensorstore's Python bindings never free the lists in which they count bytes and describe
  # arrays; Orbax requests about 55 of them for a save and a restore.
  limits = {'files': 0, 'threads': 2, 'steps': 0, 'KiB': 64 * times + 1024}
  grown = [f'{kind} +{more[kind]}' for kind in more if more[kind] > limits[kind]]
  for number in range(times - 1):
    yield Trial(f'save and restore {number}')
  yield Trial('all of them', ', '.join(grown) or None, more['KiB'] / times)
  harness.forget(name)
