"""File systems that have no locks, or cannot flush directories."""

from collections.abc import Iterator

from faults.disks import STORAGE, refused_beside
from faults.harness import Harness, another_container, ended
from faults.table import Trial, fault

# Executed at the start of Python.
NO_LOCKS = """
import errno, fcntl, os
_flock = fcntl.flock

def flock(file, how):
  descriptor = file if isinstance(file, int) else file.fileno()
  if os.readlink(f'/proc/self/fd/{descriptor}').startswith('/dev/shm/'):
    return _flock(file, how)
  raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = flock
"""
NO_SYNC = """
import errno, os, stat
_fsync = os.fsync

def fsync(file):
  if stat.S_ISDIR(os.fstat(file).st_mode):
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
  _fsync(file)

os.fsync = fsync
"""


_REFUSED = 'is refused with 74, the first one is not disturbed'


@fault('no locks: a second trainer on the same directory', _REFUSED, full=2)
def second_trainer(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _second_trainer(harness, times)


@fault('no locks: a second trainer in another container with the same host name', _REFUSED, full=2)
def in_another_container(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _second_trainer(harness, times, another_container())


def _second_trainer(harness: Harness, times: int, prefix: tuple[str, ...] = ()) -> Iterator[Trial]:
  for at in range(3, 3 + times):
    name = harness.new()
    unlocked = harness.customized(f'{name}.python', NO_LOCKS)
    failure = refused_beside(harness, name, at, prefix, environment=unlocked)
    if (harness.folder / name / 'trainer.lease').exists():
      failure = failure or 'its lease was left'
    yield Trial(f'after step {at}', failure)
    harness.forget(name)


@fault('no locks: kill -9', 'frees the lease, continues bit for bit', full=2)
def killed(harness: Harness, times: int) -> Iterator[Trial]:
  for at in range(9, 9 + times):
    name = harness.new()
    unlocked = harness.customized(f'{name}.python', NO_LOCKS)
    act = (f'--gin.Act.at={at}', '--gin.Act.action="kill"')
    harness.run(name, *act, code=-9, environment=unlocked)
    left = (harness.folder / name / 'trainer.lease').exists()
    harness.run(name, environment=unlocked)
    yield Trial(f'at step {at}', harness.difference(name) if left else 'there was no lease')
    harness.forget(name)


@fault('no flushes of directories', 'ends with 74 before compilation', full=1)
def not_flushed(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    code = ended(harness.start(name, environment=harness.customized(f'{name}.python', NO_SYNC)))
    said = harness.said(name)
    failure = None if code == STORAGE and 'Invalid argument' in said else f'{code}: {said[-300:]}'
    yield Trial('EINVAL', 'it compiled before' if 'compiling' in said else failure)
    harness.forget(name)
