"""Disks that are full or cannot be written, and directories that are not what they seem."""

from collections.abc import Iterator
import os
import pathlib
import subprocess

from injections.laboratory import Laboratory, ended, mounted, wait_for
from injections.table import Trial, fault

STORAGE = 74


@fault(
  'a full disk, freed later', 'ends with 74, leaves no litter, goes on bit for bit', full=5, short=1
)
def full_disk(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = lab.new()
    with mounted(lab.folder / f'{name}.disk') as disk:
      run = f'--model_dir={disk / "run"}'
      lab.run(name, run, '--gin.Act.at=14', '--gin.Act.what="die"', code=-9)
      room = os.statvfs(disk)
      ballast = room.f_bavail * room.f_frsize - 4096 * (number + 1)
      (disk / 'ballast').write_bytes(bytes(ballast))
      before = {path.name for path in (disk / 'run' / 'checkpoints').iterdir()}
      code = ended(lab.start(name, run))
      after = {path.name for path in (disk / 'run' / 'checkpoints').iterdir()}
      found = None if code == STORAGE else f'exit code {code}: {lab.said(name)[-300:]}'
      if found is None and not after <= before | {path for path in before if path.isdecimal()}:
        found = f'{after - before} were left'
      (disk / 'ballast').unlink()
      lab.run(name, run)
      yield Trial(f'{4 * (number + 1)} KiB left', found or lab.difference(name))
    lab.forget(name)


@fault(
  'a disk mounted to read only',
  'ends with 74 before it compiles, goes on afterwards',
  full=2,
  short=1,
)
def read_only(lab: Laboratory, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = lab.new()
    with mounted(lab.folder / f'{name}.disk') as disk:
      run = f'--model_dir={disk / "run"}'
      lab.run(name, run, '--gin.Act.at=10', '--gin.Act.what="die"', code=-9)
      remount = ['mount', '-o', 'remount,ro', str(disk)]
      subprocess.run(remount, check=True)
      said = len(lab.said(name))
      code = ended(lab.start(name, run))
      words = lab.said(name)[said:]
      found = None if code == STORAGE and 'Read-only file system' in words else f'{code}: {words}'
      if 'compiling' in words:
        found = 'it compiled first'
      subprocess.run([*remount[:2], 'remount,rw', str(disk)], check=True)
      lab.run(name, run)
      yield Trial('after step 10', found or lab.difference(name))
    lab.forget(name)


@fault('a relative and a symlinked model directory', 'the same run, bit for bit', full=4)
def other_names(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = lab.new()
    link = lab.folder / f'{name}.link'
    link.symlink_to(name)
    ways = [('--model_dir=' + name, lab.folder), (f'--model_dir={link}', pathlib.Path('/'))]
    first, second = ways if number % 2 == 0 else ways[::-1]
    (lab.folder / name).mkdir()
    lab.run(name, first[0], '--gin.Act.at=13', '--gin.Act.what="die"', code=-9, cwd=first[1])
    lab.run(name, second[0], cwd=second[1])
    found = lab.difference(name)
    if not lab.done_again(name) <= 8:
      found = found or 'it started afresh'
    yield Trial(f'{first[0]}, then {second[0]}', found)
    lab.forget(name)


@fault('a step directory that is a symlink', 'is refused with 74', full=2)
def linked_step(lab: Laboratory, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = lab.new()
    lab.run(name, '--gin.Act.at=13', '--gin.Act.what="die"', code=-9)
    step = max((lab.folder / name / 'checkpoints').glob('[0-9]'), key=lambda path: int(path.name))
    step.rename(lab.folder / f'{name}.elsewhere')
    step.symlink_to(lab.folder / f'{name}.elsewhere')
    code = ended(lab.start(name))
    found = None if 'is a symbolic link' in lab.said(name) else 'no word of it'
    yield Trial(step.name, found if code == STORAGE else f'exit code {code}')
    step.unlink()
    (lab.folder / f'{name}.elsewhere').rename(step)
    lab.forget(name)


@fault(
  'a second trainer on the same directory',
  'is refused with 74, the first is not disturbed',
  full=3,
)
def second_trainer(lab: Laboratory, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = lab.new()
    first = lab.start(name, '--gin.Pace.seconds=0.3')
    wait_for(lambda name=name: len(lab.hashes(name)) > 1, first)
    second = ended(lab.start(name, f'--gin.HashState.path="{lab.folder / name}.second"'))
    found = None if second == STORAGE else f'exit code {second}'
    if found is None and f'process {first.pid} on' not in lab.said(name):
      found = 'the first was not named'
    if (code := ended(first)) and found is None:
      found = f'the first ended with {code}'
    yield Trial('while it trains', found or lab.difference(name))
    lab.forget(name)
