"""A run that raises, stops, deadlocks or waits for data, under scripts/supervise."""

from collections.abc import Iterator
import functools
import pathlib
import sys
import time

from injections.laboratory import Laboratory, ended, mounted, wait_for
from injections.table import Trial, fault

HANG, BUG = 86, 70
DEADLINE = 8  # seconds in which a step must give a sign of life
SUPERVISE = (
  sys.executable, '-m', 'valkyrie.distributed.supervisor',
  f'--step_seconds={DEADLINE}', '--pause_seconds=0.1',
  '--',
)  # fmt: skip


def _hangs(lab: Laboratory, times: int, what: str, *flags: str) -> Iterator[Trial]:
  for number in range(times):
    name = lab.new()
    at = lab.random.randint(2, 20)
    process = lab.start(
      name, f'--gin.Act.at={at}', f'--gin.Act.what="{what}"', *flags, prefix=SUPERVISE
    )
    wait_for((lab.folder / f'{name}.acted').exists, process)
    began = time.monotonic()
    wait_for(functools.partial(lab.endings, name), process)
    seconds = time.monotonic() - began
    code = ended(process)
    ends = [end['code'] for end in lab.endings(name)]
    found = lab.difference(name)
    if code or ends != [HANG, 0]:
      found = f'exit code {code} after {ends}'
    elif seconds > DEADLINE + 10:
      found = f'gone after {seconds:.1f} s'
    elif what != 'stop' and f'in {_frame(what)}' not in lab.said(name):
      found = 'no stack was printed'
    yield Trial(f'{what} at step {at}, number {number}', found, seconds)
    lab.forget(name)


def _frame(what: str) -> str:
  return {'deadlock': '_deadlock', 'stall': '_stall'}[what]


_GONE = f's until it is gone, of {DEADLINE} + 10'
_PROMISE = 'ended with its stacks and the reason, started again, bit for bit'


@fault('a deadlock in Python, supervised', _PROMISE, full=4, short=1, unit=_GONE)
def deadlock(lab: Laboratory, times: int) -> Iterator[Trial]:
  yield from _hangs(lab, times, 'deadlock')


@fault(
  'SIGSTOP, supervised', 'ended with the reason, started again, bit for bit', full=4, unit=_GONE
)
def stopped(lab: Laboratory, times: int) -> Iterator[Trial]:
  yield from _hangs(lab, times, 'stop')


@fault('a loader that stalls, supervised', _PROMISE, full=4, unit=_GONE)
def stalled(lab: Laboratory, times: int) -> Iterator[Trial]:
  feed = ('--gin.train.feed=@train/FaultyFeed', '--gin.FaultyFeed.what="stall"')
  yield from _hangs(lab, times, 'stall', *feed)


@fault('kill -9, supervised', 'started again, bit for bit', full=4)
def killed(lab: Laboratory, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = lab.new()
    process = lab.start(name, '--gin.Act.at=9', '--gin.Act.what="die"', prefix=SUPERVISE)
    code = ended(process)
    found = lab.difference(name) if code == 0 else f'exit code {code}'
    yield Trial('at step 9', found)
    lab.forget(name)


@fault('an exception in the loop', 'is shown, saves, ends with 70, goes on bit for bit', full=5)
def raised(lab: Laboratory, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = lab.new()
    said = 'What was trained until then was saved.'
    yield from _bug(lab, name, 'fail', said, lab.folder / name / 'ballast')
    lab.forget(name)


@fault(
  'a fault inside the emergency save',
  'the exception is shown all the same, goes on bit for bit',
  full=5,
  short=1,
  unit='steps done again',
)
def raised_twice(lab: Laboratory, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = lab.new()
    with mounted(lab.folder / name) as disk:
      yield from _bug(lab, name, 'fail to save', 'could not be saved', disk / 'ballast')


def _bug(
  lab: Laboratory, name: str, what: str, said: str, ballast: pathlib.Path
) -> Iterator[Trial]:
  at = lab.random.randint(2, 23)
  act = (f'--gin.Act.at={at}', f'--gin.Act.what="{what}"')
  code = ended(lab.start(name, *act))
  last_words, found = lab.said(name), None
  if code != BUG:
    found = f'exit code {code}: {last_words[-300:]}'
  elif not ('an injected bug' in last_words and said in last_words):
    found = f'it said {last_words[-400:]}'
  ballast.unlink(missing_ok=True)
  lab.run(name, *act)
  yield Trial(f'at step {at}', found or lab.difference(name), lab.done_again(name))
