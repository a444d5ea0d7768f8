"""Asked to stop, in every phase, once or twice."""

from collections.abc import Iterator
import functools
import time

from injections.laboratory import INT, TERM, Laboratory, ended, heartbeats, wait_for
from injections.table import Trial, fault

PREEMPTED = 75


@fault(
  'SIGTERM or SIGINT, once or twice, in any phase',
  'saves, ends with 75, goes on bit for bit',
  full=20,
  unit='s to the end',
)
def in_any_phase(lab: Laboratory, times: int) -> Iterator[Trial]:
  phases = ['step', 'save', 'start_up', 'step', 'compile']
  name = lab.new()
  for number in range(times):
    phase, twice = phases[number % len(phases)], number % 2 == 1
    with heartbeats() as (told, ours):
      process = lab.start(name, '--gin.Pace.seconds=0.05', **told)
      beats = lab.random.randint(1, 4) if phase == 'step' else 1
      reached = wait_for(functools.partial(ours.reached, phase, beats), process)
      time.sleep(lab.random.uniform(0, 0.1))
      began = time.monotonic()
      process.send_signal(TERM if number % 4 < 2 else INT)
      if twice:
        time.sleep(0.05)
        process.send_signal(INT)
      code = ended(process)
    what = f'{"twice" if twice else "once"} in {phase}'
    found = lab.difference(name, whole=code == 0)
    if code == 0 or not reached:  # it was done before the signal came
      lab.forget(name)
      name = lab.new()
      yield Trial(f'{what}, at the end', found)
      continue
    saved = lab.saved(name)
    done = [step for step, _ in lab.hashes(name)]
    if found is None and code != PREEMPTED:
      found = f'exit code {code}: {lab.said(name)[-300:]}'
    if found is None and (saved[-1] if saved else 0) != (done[-1] if done else 0):
      found = f'step {done[-1:]} was done, but {saved} are saved'
    yield Trial(what, found, time.monotonic() - began)
  lab.run(name)
  if (found := lab.difference(name)) or lab.done_again(name):
    yield Trial('the end of it', found or 'steps were done again')
  lab.forget(name)


@fault(
  'SIGTERM while a step hangs',
  'ends with 75 within Preemption.grace_seconds, names the newest checkpoint',
  full=3,
  unit='s after the signal, with 1 s of grace',
)
def while_it_hangs(lab: Laboratory, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = lab.new()
    at = 6 + number
    act = (f'--gin.Act.at={at}', '--gin.Act.what="deadlock"', '--gin.Preemption.grace_seconds=1.0')
    process = lab.start(name, *act)
    wait_for((lab.folder / f'{name}.acted').exists, process)
    began = time.monotonic()
    process.send_signal(TERM)
    code = ended(process)
    seconds = time.monotonic() - began
    found = None if code == PREEMPTED else f'exit code {code}'
    if 'the newest checkpoint is' not in lab.said(name):
      found = 'no checkpoint was named'
    lab.run(name)
    yield Trial(f'in step {at}', found or lab.difference(name), seconds)
    lab.forget(name)
