"""Files and folders that are not the run's own: of users, of copies, of other programs."""

from collections.abc import Iterator
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

from faults.disks import STORAGE, _fill, _killed
from faults.file_systems import NO_LOCKS
from faults.harness import ROOT, Harness, ended, wait_for
from faults.table import Trial, fault

_KILL = ('--gin.Act.at=14', '--gin.Act.action="kill"')


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
  files = (path for path in sorted(folder.rglob('*')) if path.is_file())
  return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@fault(
  'folders of a user beside the steps, and what 0.2.0 has left of a save',
  'stay and are named, continues bit for bit',
  full=3,
)
def folders_beside(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    harness.run(name, *_KILL, code=-9)
    place, step = harness.folder / name / 'checkpoints', harness.saved(name)[-1]
    kinds = ('before_i_deleted', 'unfinished-forensics', 'unfinished', 'deleted', '1.deleted')
    names = [f'{step + number}.{kind}' for kind in kinds]
    for each in names:
      shutil.copytree(place / str(step), place / each)
    before = {each: _contents(place / each) for each in names}
    harness.run(name)
    failure = harness.difference(name)
    if before != {each: _contents(place / each) for each in names}:
      failure = failure or 'a folder of a user was changed'
    if not all(each in harness.said(name) for each in names):
      failure = failure or 'they were not named'
    yield Trial(f'of step {step + number}', failure)
    harness.forget(name)


@fault(
  'a copy of a run by hard links (cp -al), which trains on',
  'changes no file of the first one; both continue bit for bit',
  full=2,
)
def hard_links(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name, copy = harness.new(), harness.new()
    harness.run(name, *_KILL, code=-9)
    subprocess.run(['cp', '-al', harness.folder / name, harness.folder / copy], check=True)
    before = _contents(harness.folder / name)
    harness.run(copy)
    failure = None if _contents(harness.folder / name) == before else 'the first one was changed'
    harness.run(name)
    failure = failure or harness.difference(copy, whole=False) or harness.difference(name)
    yield Trial('after step 14', failure)
    harness.forget(name)
    harness.forget(copy)


@fault('a link in the place of a file of a run', 'is refused with 74, its target stays', full=3)
def links(harness: Harness, times: int) -> Iterator[Trial]:
  for file in ('trainer.lock', 'metrics.jsonl', 'eval/metrics.jsonl')[:times]:
    name = harness.new()
    precious, place = harness.folder / f'{name}.precious', harness.folder / name / file
    precious.write_text('precious')
    place.parent.mkdir(parents=True)
    place.symlink_to(precious)
    failure = harness.ending(name, harness.start(name), STORAGE)
    if f'{place} is a symbolic link' not in harness.said(name):
      failure = failure or 'it was not named'
    if precious.read_text() != 'precious':
      failure = failure or 'its target was changed'
    yield Trial(file, failure)
    harness.forget(name)


@fault('a changed value in config.json of a run', 'ends with 78 and is named', full=2)
def changed_configuration(harness: Harness, times: int) -> Iterator[Trial]:
  for mode in ('eval', 'train')[:times]:
    name = harness.new()
    harness.run(name, *_KILL, code=-9)
    file = harness.folder / name / 'config.json'
    data = json.loads(file.read_text())
    data['statements']['LanguageModel.layers'] = '3'
    file.write_text(json.dumps(data))
    done = subprocess.run(
      [sys.executable, '-m', 'valkyrie.main', f'--model_dir={file.parent}', f'--run_mode={mode}',
       *harness.flags(name)],
      env=harness.environment(), capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    named = 'LanguageModel.layers is 3' in done.stderr
    said = f'{done.returncode}: {done.stderr[-300:]}'
    yield Trial(mode, None if done.returncode == 78 and named else said)
    harness.forget(name)


@fault('a shared lock of another program on trainer.lock', 'ends with 75 and is named', full=1)
def shared_lock(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    harness.run(name, *_KILL, code=-9)
    with open(harness.folder / name / 'trainer.lock') as file:
      fcntl.flock(file, fcntl.LOCK_SH)
      failure = harness.ending(name, harness.start(name), 75)
    if f'process {os.getpid()} (' not in harness.said(name):
      failure = failure or 'it was not named'
    harness.run(name)
    yield Trial('flock', failure or harness.difference(name))
    harness.forget(name)


@fault(
  'no locks: a trainer that was paused until another one had its lease',
  'ends with 74 and writes no line',
  full=2,
)
def paused(harness: Harness, times: int) -> Iterator[Trial]:
  for at in range(3, 3 + times):
    name = harness.new()
    unlocked = harness.customized(f'{name}.python', NO_LOCKS)
    run = harness.folder / name
    process = harness.start(name, '--gin.Pace.seconds=0.3', environment=unlocked)
    wait_for(lambda name=name, at=at: len(harness.hashes(name)) >= at, process)
    process.send_signal(signal.SIGSTOP)
    lease = run / 'trainer.lease'
    content = {**json.loads(lease.read_text()), 'token': '0' * 32, 'host': 'another'}
    new = run / 'new'
    new.write_text(json.dumps(content))
    new.replace(lease)
    before = _contents(run)
    process.send_signal(signal.SIGCONT)
    code = ended(process)
    failure = None if code == STORAGE else f'exit code {code}: {harness.said(name)[-300:]}'
    after = _contents(run)
    changed = [file for file in before if before[file] != after.get(file)]
    yield Trial(f'after step {at}', failure or (f'{changed} were changed' if changed else None))
    harness.forget(name)


@fault(
  'a disk that is full to the last byte, and a lower Checkpoints.keep',
  'makes room, continues bit for bit',
  full=2,
)
def lower_keep(harness: Harness, times: int) -> Iterator[Trial]:
  for left in range(0, 4096 * times, 4096):
    # Killed then, a run has two old steps. The last save and the picture of the losses need more
    # than the room of one.
    with _killed(harness, at=22) as (name, run, ballast):
      _fill(ballast, left)
      harness.run(name, f'--model_dir={run}', '--gin.Checkpoints.keep=1')
      yield Trial(f'{left} bytes left', harness.difference(name))
