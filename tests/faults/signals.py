"""Signals that ask a run to stop, in every stage, and standard error that nobody reads."""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import os
import time

from faults.harness import HANG_UP, INT, QUIT, TERM, Harness, ended, heartbeats, wait_for
from faults.table import Trial, fault

PREEMPTED = 75


@fault(
  'SIGTERM or SIGINT, once or twice, in any stage',
  'saves, ends with 75, continues bit for bit',
  full=20,
  unit='s until it ended',
)
def in_any_stage(harness: Harness, times: int) -> Iterator[Trial]:
  yield from _in_stages(harness, times, (TERM, TERM, INT, INT))


@fault(
  'SIGHUP or SIGQUIT, as of a terminal that is closed, in any stage',
  'saves, ends with 75, continues bit for bit',
  full=10,
  unit='s until it ended',
)
def of_a_terminal(harness: Harness, times: int) -> Iterator[Trial]:
  heard = ('env', '--default-signal=HUP,QUIT')  # also where nohup has started the table
  yield from _in_stages(harness, times, (HANG_UP, QUIT), heard)


def _in_stages(
  harness: Harness, times: int, signals: Sequence[int], prefix: tuple[str, ...] = ()
) -> Iterator[Trial]:
  stages = ['step', 'save', 'start_up', 'step', 'compile']
  name = harness.new()
  for number in range(times):
    stage, twice = stages[number % len(stages)], number % 2 == 1
    with heartbeats() as (options, beats):
      process = harness.start(name, '--gin.Pace.seconds=0.05', prefix=prefix, **options)
      count = harness.random.randint(1, 4) if stage == 'step' else 1
      reached = wait_for(functools.partial(beats.reached, stage, count), process)
      time.sleep(harness.random.uniform(0, 0.1))
      began = time.monotonic()
      process.send_signal(signals[number % len(signals)])
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


@fault('SIGHUP under nohup', 'does not disturb the run', full=2)
def under_nohup(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, at = harness.new(), 5 * (1 + number)
    process = harness.start(name, '--gin.Pace.seconds=0.05', prefix=('nohup',))
    wait_for(lambda name=name, at=at: len(harness.hashes(name)) >= at, process)
    process.send_signal(HANG_UP)
    yield Trial(f'after step {at}', harness.outcome(name, process))
    harness.forget(name)


# Shells that start a run, with its command as their arguments.
UNREAD = {
  'a reader that goes away': '"$@" 2>&1 | head -1; exit ${PIPESTATUS[0]}',
  'a full device': '"$@" 2> /dev/full',
  'closed': '"$@" 2>&-',
}


@fault(
  'standard error full, closed, or with a reader that goes away',
  'does not disturb the run',
  full=3,
)
def unread(harness: Harness, times: int) -> Iterator[Trial]:
  for what in list(UNREAD)[:times]:
    name = harness.new()
    process = harness.start(name, prefix=('bash', '-c', UNREAD[what], 'bash'))
    yield Trial(what, harness.outcome(name, process))
    harness.forget(name)


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
  """The writing end of a pipe that is full, and that nobody reads."""
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  with contextlib.suppress(BlockingIOError):
    while True:
      os.write(writer, bytes(4096))
  os.set_blocking(writer, True)
  try:
    yield writer
  finally:
    os.close(reader)
    os.close(writer)


@fault(
  'standard streams on a full pipe that nobody reads, and a signal',
  'the run goes on, saves on the signal, ends with 75, continues bit for bit',
  full=4,
)
def full_streams(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, sent = harness.new(), (TERM, INT, HANG_UP, QUIT)[number % 4]
    redirected = 'exec env --default-signal=HUP,QUIT "$@" >&$PIPE 2>&$PIPE'
    with full_pipe() as pipe:
      process = harness.start(
        name,
        '--gin.Pace.seconds=0.05',
        prefix=('bash', '-c', redirected, 'bash'),
        environment={'PIPE': str(pipe)},
        pass_fds=(pipe,),
      )
      wait_for(lambda name=name: len(harness.hashes(name)) >= 4, process)
      process.send_signal(sent)
      failure = harness.ending(name, process, PREEMPTED)
    if failure is None and harness.saved(name)[-1:] != [harness.hashes(name)[-1][0]]:
      failure = f'{harness.saved(name)} are saved'
    harness.run(name)
    yield Trial(f'{sent.name} after step 4', failure or harness.difference(name))
    harness.forget(name)
