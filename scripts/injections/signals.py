"""SIGTERM and SIGINT, once or twice, in every stage."""

from collections.abc import Iterator
import functools
import time

from injections.harness import INT, TERM, Harness, ended, heartbeats, wait_for
from injections.table import Trial, fault

PREEMPTED = 75


@fault(
  'SIGTERM or SIGINT, once or twice, in any stage',
  'saves, ends with 75, continues bit for bit',
  full=20,
  unit='s until it ended',
)
def in_any_stage(harness: Harness, times: int) -> Iterator[Trial]:
  stages = ['step', 'save', 'start_up', 'step', 'compile']
  name = harness.new()
  for number in range(times):
    stage, twice = stages[number % len(stages)], number % 2 == 1
    with heartbeats() as (options, beats):
      process = harness.start(name, '--gin.Pace.seconds=0.05', **options)
      count = harness.random.randint(1, 4) if stage == 'step' else 1
      reached = wait_for(functools.partial(beats.reached, stage, count), process)
      time.sleep(harness.random.uniform(0, 0.1))
      began = time.monotonic()
      process.send_signal(TERM if number % 4 < 2 else INT)
      if twice:
        time.sleep(0.05)
        process.send_signal(INT)
      code = ended(process)
    what = f'{"twice" if twice else "once"} in {stage}'
    failure = harness.difference(name, whole=code == 0)
    if code == 0 or not reached:  # the run ended before the signal
      harness.forget(name)
      name = harness.new()
      yield Trial(f'{what}, at the end', failure)
      continue
    saved = harness.saved(name)
    done = [step for step, _ in harness.hashes(name)]
    if failure is None and code != PREEMPTED:
      failure = f'exit code {code}: {harness.said(name)[-300:]}'
    if failure is None and (saved[-1] if saved else 0) != (done[-1] if done else 0):
      failure = f'step {done[-1:]} was executed, but {saved} are saved'
    yield Trial(what, failure, time.monotonic() - began)
  harness.run(name)
  if (failure := harness.difference(name)) or harness.repeated(name):
    yield Trial('at the end', failure or 'steps were repeated')
  harness.forget(name)


@fault(
  'SIGTERM while a step hangs',
  'ends with 75 within Preemption.grace_seconds, names the newest checkpoint',
  full=3,
  unit='s after the signal, with 1 s of grace',
)
def while_it_hangs(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    at = 6 + number
    act = (
      f'--gin.Act.at={at}',
      '--gin.Act.action="deadlock"',
      '--gin.Preemption.grace_seconds=1.0',
    )
    process = harness.start(name, *act)
    wait_for((harness.folder / f'{name}.acted').exists, process)
    began = time.monotonic()
    process.send_signal(TERM)
    code = ended(process)
    seconds = time.monotonic() - began
    failure = None if code == PREEMPTED else f'exit code {code}'
    if 'the newest checkpoint is' not in harness.said(name):
      failure = 'no checkpoint was named'
    harness.run(name)
    yield Trial(f'in step {at}', failure or harness.difference(name), seconds)
    harness.forget(name)
