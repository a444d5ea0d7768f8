"""Full and read-only disks, and other names of directories."""

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import shutil
import subprocess

from faults import spoiled_arrays
from faults.harness import STEPS, Harness, ended, mounted, wait_for
from faults.table import Trial, fault
from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.checkpoint.steps import DiskSteps

STORAGE = 74


@contextlib.contextmanager
def _killed(harness: Harness, at: int = 14) -> Iterator[tuple[str, pathlib.Path, pathlib.Path]]:
  """A run on a small disk, killed at a step: (its name, its directory, the place of ballast)."""
  name = harness.new()
  with mounted(harness.folder / f'{name}.disk') as disk:
    run = f'--model_dir={disk / "run"}'
    harness.run(name, run, f'--gin.Act.at={at}', '--gin.Act.action="kill"', code=-9)
    yield name, disk / 'run', disk / 'ballast'
  harness.forget(name)


def _fill(ballast: pathlib.Path, left: int) -> None:
  """Fills a disk but for `left` bytes, and those that a run writes meanwhile."""
  room = os.statvfs(ballast.parent)
  with contextlib.suppress(OSError):
    ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - left))


@fault(
  'a full disk, freed while the run trains',
  'is reported, the last step is saved, all bit for bit',
  full=3,
)
def freed_disk(harness: Harness, times: int) -> Iterator[Trial]:
  for left in range(4096, 4096 * (times + 1), 4096):
    with _killed(harness) as (name, run, ballast):
      done = len(harness.hashes(name))
      process = harness.start(name, f'--model_dir={run}', '--gin.Pace.seconds=0.3')
      wait_for(lambda name=name, done=done: len(harness.hashes(name)) > done, process)
      _fill(ballast, left)
      wait_for(lambda name=name: 'could not be saved' in harness.said(name), process)
      ballast.unlink()
      code = ended(process)
      saved = DiskSteps(run).find()
      failure = None if code == 0 else f'exit code {code}: {harness.said(name)[-300:]}'
      if failure is None and saved[-1:] != [STEPS]:
        failure = f'{saved} are saved'
      yield Trial(f'{left} bytes left', failure or harness.difference(name))


@fault(
  'an input/output error of one save, or of three',
  'is reported, and the run saves again, all bit for bit',
  full=3,
  short=1,
)
def broken_saves(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, failures = harness.new(), 1 + number % 2 * 2
    hooks = f'--gin.FailSaves.times={failures}', '--gin.train.hooks=(@FailSaves(), @HashState())'
    failure = harness.ending(name, harness.start(name, *hooks))
    said = harness.said(name).count('Input/output error; the steps before are unchanged')
    if failure is None and (said != failures or harness.saved(name)[-1:] != [STEPS]):
      failure = f'{said} failures were reported, {harness.saved(name)} are saved'
    yield Trial(f'{failures} of the first saves', failure or harness.difference(name))
    harness.forget(name)


@fault(
  'an Orbax that loses its index, an array, a part or a bit of the first save',
  'is reported, the step does not count, and the run saves again, all bit for bit',
  full=4,
)
def spoiled_save(harness: Harness, times: int) -> Iterator[Trial]:
  for lost in spoiled_arrays.LOST[:times]:
    name = harness.new()
    hooks = f'--gin.SpoilSave.lost="{lost}"', '--gin.train.hooks=(@SpoilSave(), @HashState())'
    failure = harness.ending(name, harness.start(name, *hooks))
    said = harness.said(name).count('what was written ')
    if failure is None and (said != 1 or harness.saved(name)[-1:] != [STEPS]):
      failure = f'{said} failures were reported, {harness.saved(name)} are saved'
    yield Trial(f'{lost} is lost', failure or harness.difference(name))
    harness.forget(name)


@fault(
  'a disk that stays full, and is freed for the next start',
  'ends with 74 when its patience is over, leaves no files, continues bit for bit',
  full=5,
)
def full_disk(harness: Harness, times: int) -> Iterator[Trial]:
  for left in range(4096, 4096 * (times + 1), 4096):
    with _killed(harness) as (name, run, ballast):
      _fill(ballast, left)
      checkpoints, flag = run / 'checkpoints', f'--model_dir={run}'
      before = {path.name for path in checkpoints.iterdir()}
      code = ended(harness.start(name, flag, '--gin.Checkpoints.patience=0'))
      new = {path.name for path in checkpoints.iterdir()} - before
      failure = None if code == STORAGE else f'exit code {code}: {harness.said(name)[-300:]}'
      if failure is None and new:
        failure = f'{new} were left'
      ballast.unlink()
      harness.run(name, flag)
      yield Trial(f'{left} bytes left', failure or harness.difference(name))


@fault(
  'a disk remounted read-only',
  'ends with 74 before compilation, continues afterwards',
  full=2,
)
def read_only(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    with _killed(harness, at=10) as (name, place, _):
      run = f'--model_dir={place}'
      remount = ['mount', '-o', 'remount,ro', str(place.parent)]
      subprocess.run(remount, check=True)
      said = len(harness.said(name))
      code = ended(harness.start(name, run))
      words = harness.said(name)[said:]
      failure = None if code == STORAGE and 'Read-only file system' in words else f'{code}: {words}'
      if 'compiling' in words:
        failure = 'it compiled before it ended'
      subprocess.run([*remount[:2], 'remount,rw', str(place.parent)], check=True)
      harness.run(name, run)
      yield Trial('after step 10', failure or harness.difference(name))


@fault('a relative and a symlinked model directory', 'the same run, bit for bit', full=4)
def other_names(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    link = harness.folder / f'{name}.link'
    link.symlink_to(name)
    ways = [('--model_dir=' + name, harness.folder), (f'--model_dir={link}', pathlib.Path('/'))]
    first, second = ways if number % 2 == 0 else ways[::-1]
    (harness.folder / name).mkdir()
    harness.run(name, first[0], '--gin.Act.at=13', '--gin.Act.action="kill"', code=-9, cwd=first[1])
    harness.run(name, second[0], cwd=second[1])
    failure = harness.difference(name)
    if not harness.repeated(name) <= 8:
      failure = failure or 'it started again from step 0'
    yield Trial(f'{first[0]}, then {second[0]}', failure)
    harness.forget(name)


@fault(
  'a model directory that libraries read as a pattern, a bucket or another folder',
  'the same run, bit for bit',
  full=6,
)
def odd_names(harness: Harness, times: int) -> Iterator[Trial]:
  for odd in ('lr=[1e-3]', 'a**?b', 'back\\slash', 'gs:', 'new\nline', 'a#b 100%')[:times]:
    name = harness.new()
    run = f'--model_dir={harness.folder / name / odd}'
    harness.run(name, run, '--gin.Act.at=13', '--gin.Act.action="kill"', code=-9)
    harness.run(name, run)
    failure = harness.difference(name)
    if not harness.repeated(name) <= 8:
      failure = failure or 'it started again from step 0'
    found = [path.name for path in (harness.folder / name).iterdir()]
    yield Trial(repr(odd), failure or (None if found == [odd] else f'{found} were made'))
    harness.forget(name)


@fault(
  'a model directory or a cache whose path is no UTF-8',
  'is refused with 78 before anything is compiled',
  full=2,
)
def other_bytes(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    place = os.fsdecode(bytes(harness.folder / name) + b'\xff')
    flags, world = [(f'--model_dir={place}',), ()][number], [{}, {'VALKYRIE_CACHE': place}][number]
    code = ended(harness.start(name, *flags, environment=world))
    said = harness.said(name)
    failure = None if code == 78 and 'must be UTF-8' in said else f'{code}: {said[-300:]}'
    if failure is None and os.path.exists(place):
      failure = 'it was made'
    yield Trial(('--model_dir', 'VALKYRIE_CACHE')[number], failure)
    harness.forget(name)


@fault('a step directory that is a symlink', 'is refused with 74', full=2)
def linked_step(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    harness.run(name, '--gin.Act.at=13', '--gin.Act.action="kill"', code=-9)
    step = max(
      (harness.folder / name / 'checkpoints').glob('[0-9]'), key=lambda path: int(path.name)
    )
    step.rename(harness.folder / f'{name}.elsewhere')
    step.symlink_to(harness.folder / f'{name}.elsewhere')
    code = ended(harness.start(name))
    failure = None if 'is a symbolic link' in harness.said(name) else 'the link was not reported'
    yield Trial(step.name, failure if code == STORAGE else f'exit code {code}')
    step.unlink()
    (harness.folder / f'{name}.elsewhere').rename(step)
    harness.forget(name)


@fault(
  'a directory that is renamed while its run trains, and another run in its place',
  'ends with 74 and writes nothing there; both continue bit for bit',
  full=3,
)
def renamed(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, moved = harness.new(), harness.new()
    place = harness.folder / name
    hashes = f'--gin.HashState.path="{harness.folder / moved}.hashes"'
    first = harness.start(name, '--gin.Pace.seconds=0.3', hashes)
    wait_for(lambda run=moved, least=1 + 3 * number: len(harness.hashes(run)) > least, first)
    place.rename(harness.folder / moved)
    second = harness.start(name)
    failure = harness.ending(name, first, STORAGE)
    if (code := ended(second)) and failure is None:
      failure = f'the other one ended with {code}: {harness.said(name)[-300:]}'
    harness.run(moved)
    for run in (name, moved):
      failure = failure or harness.difference(run)
    yield Trial(f'after step {2 + 3 * number}', failure)
    harness.forget(name)
    harness.forget(moved)


@fault(
  'an old step that cannot be deleted',
  'is reported, the run goes on, and deletes it later',
  full=3,
)
def undeletable(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    harness.run(name, '--gin.Act.at=14', '--gin.Act.action="kill"', code=-9)
    oldest = harness.folder / name / 'checkpoints' / str(harness.saved(name)[0])
    with mounted(oldest / ('busy', 'state/busy', 'state/d/busy')[number % 3]):
      harness.run(name)
      failure = harness.difference(name)
      if 'cannot be deleted (Device or resource busy)' not in harness.said(name):
        failure = failure or 'it was not reported'
    with Checkpoints().open(harness.folder / name):
      left = [path.name for path in oldest.parent.iterdir() if not path.name.isdecimal()]
    yield Trial(oldest.name, failure or (f'{left} are left' if left else None))
    harness.forget(name)


@fault(
  'a second trainer on the same directory',
  'is refused with 74, the first one is not disturbed',
  full=3,
)
def second_trainer(harness: Harness, times: int) -> Iterator[Trial]:
  for at in range(3, 3 + times):
    name = harness.new()
    yield Trial(f'after step {at}', refused_beside(harness, name, at))
    harness.forget(name)


def refused_beside(
  harness: Harness, name: str, at: int, prefix: tuple[str, ...] = (), **options
) -> str | None:
  """Why a trainer disturbs one that waits after a step, or is not refused; None otherwise.

  `prefix` stands before the command of the second one.
  """
  first = harness.start_and_hold(name, at, **options)
  hashes = f'--gin.HashState.path="{harness.folder / name}.second"'
  second = harness.start(name, hashes, prefix=prefix, **options)
  failure = harness.ending(name, second, STORAGE)
  if f'process {first.pid} on' not in harness.said(name):
    failure = failure or 'the first one was not named'
  harness.release(name)
  return failure or harness.outcome(name, first)


def _lacks_lines(harness: Harness, name: str, metrics: pathlib.Path) -> bool:
  content = metrics.read_bytes()
  return content.endswith(b'\n') and content.count(b'\n') < len(harness.hashes(name)) - 1


@fault(
  'a disk that is full in the middle of a line of metrics',
  'the lines are whole, and written when there is room; all bit for bit',
  full=3,
)
def in_a_line(harness: Harness, times: int) -> Iterator[Trial]:
  for at in range(3, 3 + times):
    name = harness.new()
    with mounted(harness.folder / f'{name}.disk') as disk:
      run, metrics = f'--model_dir={disk / "run"}', disk / 'run' / 'metrics.jsonl'
      process = harness.start(name, run, '--gin.Pace.seconds=0.3', '--gin.checkpoint_every=100')
      wait_for(lambda name=name, at=at: len(harness.hashes(name)) >= at, process)
      _fill(disk / 'ballast', 0)
      # Half a line is cut off at once: fewer lines than steps are in the file.
      short = wait_for(lambda name=name, file=metrics: _lacks_lines(harness, name, file), process)
      wait_for(lambda name=name: len(harness.hashes(name)) >= STEPS - 2, process)
      (disk / 'ballast').unlink()
      failure = harness.ending(name, process)
      if failure is None and not short:
        failure = 'the disk was never full'
      for file in sorted((disk / 'run').rglob('*.jsonl')):
        lines = list(map(json.loads, file.read_text().splitlines()))
        if file == metrics and [line['step'] for line in lines] != [*range(1, STEPS + 1)]:
          failure = failure or f'{file} has {len(lines)} lines'
    yield Trial(f'after step {at}', failure or harness.difference(name))
    harness.forget(name)


@fault(
  'a disk that is full for seconds, under a run with TensorBoard and evaluations',
  'the run goes on; every line, event and picture is there; all bit for bit',
  full=3,
)
def full_for_seconds(harness: Harness, times: int) -> Iterator[Trial]:
  for at in range(3, 3 + times):
    name = harness.new()
    with mounted(harness.folder / f'{name}.disk') as disk:
      flags = (
        f'--model_dir={disk / "run"}', '--gin.Pace.seconds=0.3', '--gin.checkpoint_every=100',
        '--gin.eval_every=2', '--gin.create_writers.tensorboard=True',
      )  # fmt: skip
      process = harness.start(name, *flags)
      wait_for(lambda name=name, at=at: len(harness.hashes(name)) >= at, process)
      _fill(disk / 'ballast', 0)
      refused = wait_for(lambda name=name: 'is tried again' in harness.said(name), process)
      (disk / 'ballast').unlink()
      failure = harness.ending(name, process)
      if failure is None and not refused:
        failure = 'nothing was refused'
      evaluated = [
        json.loads(line)['step']
        for line in (disk / 'run/eval/metrics.jsonl').read_text().splitlines()
      ]
      if failure is None and evaluated != [*range(2, STEPS + 1, 2)]:
        failure = f'steps {evaluated} are evaluated'
      if failure is None and 'is left out' in harness.said(name):
        failure = harness.said(name)[-400:]
      if failure is None and (shown := _shown(disk / 'run/train')) != [*range(1, STEPS + 1)]:
        failure = f'TensorBoard shows the steps {shown}'
    yield Trial(f'after step {at}', failure or harness.difference(name))
    harness.forget(name)


@fault(
  'a disk that is full for seconds when a run is evaluated',
  'the evaluation says that it waits, and goes on when there is room',
  full=1,
)
def full_under_an_evaluation(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    with mounted(harness.folder / f'{name}.disk') as disk:
      run, ballast = disk / 'run', disk / 'ballast'
      shutil.copytree(harness.folder / 'reference', run)
      shutil.rmtree(run / 'eval')
      _fill(ballast, 0)
      process = harness.start(name, f'--model_dir={run}', '--run_mode=eval')
      waits = wait_for(lambda name=name: 'tried again for up to' in harness.said(name), process)
      ballast.unlink()
      failure = harness.ending(name, process)
      if failure is None and not waits:
        failure = 'nothing was refused'
      if failure is None:
        (line,) = map(json.loads, (run / 'eval/metrics.jsonl').read_text().splitlines())
        failure = None if line['step'] == STEPS else f'step {line["step"]} is evaluated'
    yield Trial('a new stream', failure)
    harness.forget(name)


def _shown(folder: pathlib.Path) -> list[int]:
  """The steps whose loss TensorBoard shows."""
  from tensorboard.backend.event_processing import plugin_event_accumulator  # noqa: PLC0415

  events = plugin_event_accumulator.EventAccumulator(str(folder))
  events.Reload()
  return [event.step for event in events.Tensors('learning/loss')]
