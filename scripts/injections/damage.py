"""Checkpoints that were damaged on disk, and saves and restores without end."""

from collections.abc import Iterator
import gc
import os
import pathlib
import resource
import shutil
import threading

import jax

from injections.laboratory import Laboratory
from injections.table import Trial, fault
from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.errors import StorageError

OLDER = 'the step before is used, the damaged one is kept'


def _files(step: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in step.rglob('*') if path.is_file())


def _newest(run: pathlib.Path, read_only: bool = True) -> int | None:
  with Checkpoints().open(run, read_only=read_only) as checkpoints:
    return checkpoints.latest_step()


def _judge(run: pathlib.Path, older: int) -> str | None:
  newest = _newest(run)
  return None if newest == older else f'step {newest} was used'


@fault('one flipped bit, in any file of a checkpoint', OLDER, full=200, short=40)
def flipped_bit(lab: Laboratory, times: int) -> Iterator[Trial]:
  run = pathlib.Path(shutil.copytree(lab.folder / 'reference', lab.folder / lab.new()))
  *_, older, newest = sorted(int(path.name) for path in (run / 'checkpoints').iterdir())
  files = _files(run / 'checkpoints' / str(newest))
  for number in range(times):
    file = files[number % len(files)]  # each in turn: most bits are in few files
    whole = file.read_bytes()
    bit = lab.random.randrange(8 * len(whole))
    altered = bytearray(whole)
    altered[bit // 8] ^= 1 << bit % 8
    file.write_bytes(altered)
    yield Trial(f'bit {bit} of {file.relative_to(run)}', _judge(run, older))
    file.write_bytes(whole)
  if _newest(run) != newest:
    yield Trial('nothing is flipped any more', 'the newest step is not used')


def _cut(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


def _zero(path: pathlib.Path) -> None:
  path.write_bytes(bytes(path.stat().st_size))


def _empty(path: pathlib.Path) -> None:
  os.truncate(path, 0)


@fault('each file of a checkpoint cut, emptied, zeroed or deleted', OLDER, full=200, short=30)
def lost_files(lab: Laboratory, times: int) -> Iterator[Trial]:
  run = pathlib.Path(shutil.copytree(lab.folder / 'reference', lab.folder / lab.new()))
  *_, older, newest = sorted(int(path.name) for path in (run / 'checkpoints').iterdir())
  harms = (_cut, _zero, _empty, pathlib.Path.unlink)
  cases = [(file, harm) for file in _files(run / 'checkpoints' / str(newest)) for harm in harms]
  for file, harm in cases[:: max(1, len(cases) // times)][:times]:
    whole = file.read_bytes()
    harm(file)
    yield Trial(f'{harm.__name__} {file.relative_to(run)}', _judge(run, older))
    file.write_bytes(whole)


@fault('a damaged step, and the run goes on', f'{OLDER}, goes on bit for bit', full=5)
def goes_on(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = lab.new()
    lab.run(name, '--gin.Act.at=14', '--gin.Act.what="die"', code=-9)
    checkpoints = lab.folder / name / 'checkpoints'
    newest = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal())
    step = checkpoints / str(newest)
    if number % 2:
      shutil.rmtree(step)
      step.mkdir()
    else:
      _cut(lab.random.choice([file for file in _files(step) if file.stat().st_size]))
    lab.run(name)
    found = lab.difference(name)
    if not (lab.folder / name / 'set_aside' / str(newest)).is_dir():
      found = 'the damaged step is gone'
    yield Trial(f'step {newest}', found)
    lab.forget(name)


@fault(
  'every step damaged', 'ends with 74, touches nothing, starts nothing afresh', full=20, short=3
)
def all_damaged(lab: Laboratory, times: int) -> Iterator[Trial]:
  for _ in range(times):
    run = pathlib.Path(shutil.copytree(lab.folder / 'reference', lab.folder / lab.new()))
    for step in (run / 'checkpoints').iterdir():
      _cut(lab.random.choice([file for file in _files(step) if file.stat().st_size]))
    before = {path: path.read_bytes() for path in _files(run / 'checkpoints')}
    try:
      found = f'step {_newest(run, read_only=False)} was used'
    except StorageError:
      after = {path: path.read_bytes() for path in _files(run / 'checkpoints')}
      found = None if after == before else 'files were changed'
    yield Trial(str(run), found)
    shutil.rmtree(run)


@fault(
  'a save and a restore in one process',
  'no file, thread or step more, and no memory but what tensorstore loses',
  full=100,
  short=20,
  unit='KiB of memory',
)
def without_end(lab: Laboratory, times: int) -> Iterator[Trial]:
  run = lab.folder / lab.new()
  state = {'w': jax.random.normal(jax.random.key(0), (512, 512)), 'n': jax.numpy.int32(3)}
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  measured = {}
  with Checkpoints(keep=2).open(run) as checkpoints:
    for step in range(1, times + 11):
      checkpoints.save(step, state, {'step': step})
      checkpoints.wait()
      checkpoints.restore(target)
      if step == 10 or step == times + 10:  # the first ones fill caches
        gc.collect()
        measured[step] = _in_use(run)
  began, now = measured[10], measured[times + 10]
  more = {name: now[name] - began[name] for name in now}
  # Its Python bindings never free the lists in which they count bytes and describe arrays, of which
  # Orbax asks for some 55 a pair.
  limits = {'files': 0, 'threads': 2, 'steps': 0, 'KiB': 64 * times + 4096}
  grown = [f'{name} +{more[name]}' for name in more if more[name] > limits[name]]
  for number in range(times - 1):
    yield Trial(f'save and restore {number}')
  yield Trial('all of them', ', '.join(grown) or None, more['KiB'] / times)


def _in_use(run: pathlib.Path) -> dict[str, int]:
  return {
    'files': len(os.listdir('/proc/self/fd')),
    'threads': threading.active_count(),
    'steps': len(list((run / 'checkpoints').iterdir())),
    'KiB': int(pathlib.Path('/proc/self/statm').read_text().split()[1])
    * resource.getpagesize()
    // 1024,
  }
