"""Kills with SIGKILL: at random moments, during saves, and at each point of a commit."""

from collections.abc import Iterator
import functools
import time

from faults.commits import MOMENTS
from faults.harness import KILL, Harness, ended, heartbeats, wait_for
from faults.table import Trial, fault

BITS = 'continues bit for bit'
REPEATED = 'steps repeated'


def _kills(harness: Harness, times: int, kill) -> Iterator[Trial]:
  """Kills a run again and again; each new process must continue it bit for bit."""
  name, killed = harness.new(), 0
  while killed < times:
    process, what = kill(name)
    if process.returncode == -KILL:
      killed += 1
    elif process.returncode != 0:
      yield Trial(what, f'exit code {process.returncode}')
      return
    yield from _judge(harness, name, what, process.returncode)
    if process.returncode == 0:
      harness.forget(name)
      name = harness.new()
  harness.run(name)
  if failure := harness.difference(name):
    yield Trial('at the end', failure)
  harness.forget(name)


def _judge(harness: Harness, name: str, what: str, code: int) -> Iterator[Trial]:
  failure = harness.difference(name, whole=code == 0)
  if code == -KILL or failure:
    yield Trial(what, failure, harness.repeated(name))


@fault('kill -9 at a random moment', BITS, full=30, unit=REPEATED)
def at_random(harness: Harness, times: int) -> Iterator[Trial]:
  def kill(name):
    process = harness.start(name, '--gin.Pace.seconds=0.05')
    seconds = harness.random.uniform(0.2, harness.run_seconds + 24 * 0.05)
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
      time.sleep(0.005)
    process.send_signal(KILL)
    process.wait()
    return process, f'{seconds:.2f} s after a start'

  return _kills(harness, times, kill)


@fault('kill -9 during a save', BITS, full=20, unit=REPEATED)
def during_a_save(harness: Harness, times: int) -> Iterator[Trial]:
  def kill(name):
    with heartbeats() as (options, beats):
      process = harness.start(name, '--gin.Pace.seconds=0.02', **options)
      number = harness.random.randint(1, 3)
      wait_for(functools.partial(beats.reached, 'save', number), process)
      seconds = harness.random.uniform(0, 0.15)
      time.sleep(seconds)
      process.send_signal(KILL)
      process.wait()
    return process, f'{seconds:.3f} s after the start of save {number} of a process'

  return _kills(harness, times, kill)


@fault(
  'kill -9 at each point of a commit and of its manifest', BITS, full=7, short=1, unit=REPEATED
)
def at_each_point(harness: Harness, times: int) -> Iterator[Trial]:
  for moment in list(MOMENTS)[:: max(1, len(MOMENTS) // times)][:times]:
    name = harness.new()
    flags = [
      f'--gin.KillIn.moment="{moment}"',
      f'--gin.KillIn.once="{harness.folder / name}.killed"',
      '--gin.train.hooks=(@KillIn(), @HashState())',
    ]
    code = ended(harness.start(name, *flags))
    failure = None if code == -KILL else f'exit code {code}: it was never killed'
    if failure is None:
      harness.run(name, *flags)
      failure = harness.difference(name)
    yield Trial(moment, failure, harness.repeated(name))
    harness.forget(name)
