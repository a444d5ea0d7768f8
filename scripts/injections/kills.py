"""Killed with SIGKILL: in a random moment, inside a save, in each phase of a commit."""

from collections.abc import Iterator
import functools
import time

from injections.commits import MOMENTS
from injections.laboratory import KILL, Laboratory, ended, heartbeats, wait_for
from injections.table import Trial, fault

BITS = 'goes on bit for bit'
AGAIN = 'steps done again'


def _lives(lab: Laboratory, times: int, kill) -> Iterator[Trial]:
  """Kills the lives of runs; each next one must go on as the one before would have."""
  name, killed = lab.new(), 0
  while killed < times:
    process, what = kill(name)
    if process.returncode == -KILL:
      killed += 1
    elif process.returncode != 0:
      yield Trial(what, f'exit code {process.returncode}')
      return
    yield from _judge(lab, name, what, process.returncode)
    if process.returncode == 0:
      lab.forget(name)
      name = lab.new()
  lab.run(name)
  if found := lab.difference(name):
    yield Trial('the end of it', found)
  lab.forget(name)


def _judge(lab: Laboratory, name: str, what: str, code: int) -> Iterator[Trial]:
  found = lab.difference(name, whole=code == 0)
  if code == -KILL or found:
    yield Trial(what, found, lab.done_again(name))


@fault('kill -9 at a random moment', BITS, full=30, unit=AGAIN)
def at_random(lab: Laboratory, times: int) -> Iterator[Trial]:
  def kill(name):
    process = lab.start(name, '--gin.Pace.seconds=0.05')
    seconds = lab.random.uniform(0.2, lab.run_seconds + 24 * 0.05)
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
      time.sleep(0.005)
    process.send_signal(KILL)
    process.wait()
    return process, f'{seconds:.2f} s after a start'

  return _lives(lab, times, kill)


@fault('kill -9 inside a save', BITS, full=20, unit=AGAIN)
def inside_a_save(lab: Laboratory, times: int) -> Iterator[Trial]:
  def kill(name):
    with heartbeats() as (told, ours):
      process = lab.start(name, '--gin.Pace.seconds=0.02', **told)
      number = lab.random.randint(1, 3)
      wait_for(functools.partial(ours.reached, 'save', number), process)
      seconds = lab.random.uniform(0, 0.15)
      time.sleep(seconds)
      process.send_signal(KILL)
      process.wait()
    return process, f'{seconds:.3f} s after save {number} of a life began'

  return _lives(lab, times, kill)


@fault('kill -9 in each phase of a commit and of its manifest', BITS, full=7, short=1, unit=AGAIN)
def in_each_phase(lab: Laboratory, times: int) -> Iterator[Trial]:
  for moment in list(MOMENTS)[:: max(1, len(MOMENTS) // times)][:times]:
    name = lab.new()
    flags = [
      f'--gin.DieIn.moment="{moment}"',
      f'--gin.DieIn.once="{lab.folder / name}.died"',
      '--gin.train.hooks=(@DieIn(), @HashState())',
    ]
    code = ended(lab.start(name, *flags))
    found = None if code == -KILL else f'exit code {code}: it was never killed'
    if found is None:
      lab.run(name, *flags)
      found = lab.difference(name)
    yield Trial(moment, found, lab.done_again(name))
    lab.forget(name)
