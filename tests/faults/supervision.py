"""Supervised runs that hang or are killed, and exceptions in the loop."""

from collections.abc import Iterator
import functools
import os
import pathlib
import signal
import sys
import time

from faults.harness import Harness, ended, mounted, wait_for
from faults.table import Trial, fault

HANG, BUG = 86, 70
DEADLINE = 8  # seconds between heartbeats in a step
SUPERVISE = (
  sys.executable, '-m', 'valkyrie.distributed.supervisor',
  f'--step_seconds={DEADLINE}', '--pause_seconds=0.1',
  '--',
)  # fmt: skip


def _hangs(harness: Harness, times: int, action: str, *flags: str) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    at = harness.random.randint(2, 20)
    process = harness.start(
      name, f'--gin.Act.at={at}', f'--gin.Act.action="{action}"', *flags, prefix=SUPERVISE
    )
    wait_for((harness.folder / f'{name}.acted').exists, process)
    began = time.monotonic()
    wait_for(functools.partial(harness.endings, name), process)
    seconds = time.monotonic() - began
    code = ended(process)
    ends = [end['code'] for end in harness.endings(name)]
    failure = harness.difference(name)
    if code or ends != [HANG, 0]:
      failure = f'exit code {code} after {ends}'
    elif seconds > DEADLINE + 10:
      failure = f'it ended after {seconds:.1f} s'
    elif action != 'stop' and f'in {_frame(action)}' not in harness.said(name):
      failure = 'no stack was printed'
    yield Trial(f'{action} at step {at}, number {number}', failure, seconds)
    harness.forget(name)


def _frame(action: str) -> str:
  return {'deadlock': '_deadlock', 'stall': '_stall'}[action]


_ENDED = f's until it ended, limit {DEADLINE} + 10'
_PROMISE = 'ended with its stacks and the reason, restarted, continues bit for bit'


@fault('a deadlock in Python, supervised', _PROMISE, full=4, unit=_ENDED)
def deadlock(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _hangs(harness, times, 'deadlock')


@fault(
  'SIGSTOP, supervised',
  'ended with the reason, restarted, continues bit for bit',
  full=4,
  unit=_ENDED,
)
def stopped(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _hangs(harness, times, 'stop')


@fault('a loader that stalls, supervised', _PROMISE, full=4, unit=_ENDED)
def stalled(harness: Harness, times: int) -> Iterator[Trial]:
  feed = ('--gin.train.feed=@train/FaultyFeed', '--gin.FaultyFeed.fault="stall"')
  yield from _hangs(harness, times, 'stall', *feed)


@fault(
  'Ctrl-Z and fg, with a supervisor and without',
  'goes on, bit for bit, and is not restarted',
  full=4,
)
def paused(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, supervised = harness.new(), number % 2 == 0
    process = harness.start(
      name, '--gin.Pace.seconds=0.1', prefix=SUPERVISE if supervised else (), process_group=0
    )
    wait_for(lambda name=name: len(harness.hashes(name)) >= 3, process)
    os.killpg(process.pid, signal.SIGTSTP)  # as the terminal does
    time.sleep(1)
    done = len(harness.hashes(name))
    time.sleep(DEADLINE + 4)
    went_on = len(harness.hashes(name)) > done
    os.killpg(process.pid, signal.SIGCONT)
    failure = harness.outcome(name, process)
    if went_on or harness.repeated(name):
      failure = 'it was not stopped' if went_on else 'it was restarted'
    yield Trial(f'{"" if supervised else "not "}supervised, after step {done}', failure)
    harness.forget(name)


@fault('kill -9, supervised', 'restarted, continues bit for bit', full=4)
def killed(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    process = harness.start(name, '--gin.Act.at=9', '--gin.Act.action="kill"', prefix=SUPERVISE)
    yield Trial('at step 9', harness.outcome(name, process))
    harness.forget(name)


@fault(
  'an exception in the loop',
  'is printed, saves, ends with 70, continues bit for bit',
  full=5,
)
def raised(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    message = 'The state before the error was saved.'
    yield from _bug(harness, name, 'fail', message, harness.folder / name / 'ballast')
    harness.forget(name)


@fault(
  'an error during the emergency save',
  'the first exception is printed, continues bit for bit',
  full=5,
  unit='steps repeated',
)
def raised_in_the_save(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name = harness.new()
    with mounted(harness.folder / name) as disk:
      yield from _bug(harness, name, 'fail to save', 'could not be saved', disk / 'ballast')


def _bug(
  harness: Harness, name: str, action: str, message: str, ballast: pathlib.Path
) -> Iterator[Trial]:
  at = harness.random.randint(2, 23)
  act = (f'--gin.Act.at={at}', f'--gin.Act.action="{action}"')
  code = ended(harness.start(name, *act))
  output, failure = harness.said(name), None
  if code != BUG:
    failure = f'exit code {code}: {output[-300:]}'
  elif not ('an injected bug' in output and message in output):
    failure = f'the output is {output[-400:]}'
  ballast.unlink(missing_ok=True)
  harness.run(name, *act)
  yield Trial(f'at step {at}', failure or harness.difference(name), harness.repeated(name))


@fault(
  'an error of a device in the loop, supervised',
  'ends with 71, is restarted, continues bit for bit',
  full=4,
  short=1,
)
def device_failed(harness: Harness, times: int) -> Iterator[Trial]:
  for _ in range(times):
    name, at = harness.new(), harness.random.randint(2, 23)
    act = (f'--gin.Act.at={at}', '--gin.Act.action="fail as a device"')
    process = harness.start(name, *act, prefix=SUPERVISE)
    failure = harness.outcome(name, process)
    codes = [end['code'] for end in harness.endings(name)]
    if failure is None and (codes != [71, 0] or 'enable_command_buffer' not in harness.said(name)):
      failure = f'exit codes {codes}: {harness.said(name)[-400:]}'
    yield Trial(f'at step {at}', failure)
    harness.forget(name)


@fault(
  'a tracker that does not return',
  'the run goes on and ends, names the tracker, bit for bit',
  full=3,
)
def tracker_hangs(harness: Harness, times: int) -> Iterator[Trial]:
  for method in ('write', 'end', 'start')[:times]:
    name = harness.new()
    flags = ('--gin.train.trackers=(@HangingTracker(),)', f'--gin.HangingTracker.method="{method}"')
    failure = harness.outcome(name, harness.start(name, *flags))
    line = 'the tracker HangingTracker is left out, with its last calls'
    if failure is None and line not in harness.said(name):
      failure = harness.said(name)[-400:]
    yield Trial(method, failure)
    harness.forget(name)
