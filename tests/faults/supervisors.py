"""Supervisors that cannot write or hear, and supervisors that are killed."""

from collections.abc import Iterator
import sys

from faults.harness import HANG_UP, KILL, QUIT, Harness, ended, wait_for
from faults.supervision import SUPERVISE
from faults.table import Trial, fault

PREEMPTED = 75
BITS = 'continues bit for bit'
KILLED = ('--gin.Act.at=9', '--gin.Act.action="kill"')


@fault(
  'a supervisor whose file or whose messages cannot be written',
  f'goes on: restarts a killed run, which {BITS}',
  full=3,
)
def unwritable(harness: Harness, times: int) -> Iterator[Trial]:
  for what in ('a folder for supervise.jsonl', '2>&-', '2> /dev/full')[:times]:
    name, prefix = harness.new(), SUPERVISE
    if what.startswith('2>'):
      prefix = ('sh', '-c', f'exec "$@" {what}', 'sh', *SUPERVISE)
    else:
      (harness.folder / name / 'supervise.jsonl').mkdir(parents=True)
    failure = harness.outcome(name, harness.start(name, *KILLED, prefix=prefix))
    said = 'supervise.jsonl cannot be written (Is a directory)' in harness.said(name)
    if failure is None and not (said or what.startswith('2>')):
      failure = 'it was not said'
    yield Trial(what, failure)
    harness.forget(name)


@fault(
  'garbage and an unknown stage from a supervised run',
  'are ignored, the run is not disturbed',
  full=2,
)
def garbage(harness: Harness, times: int) -> Iterator[Trial]:
  for at in range(5, 5 + times):
    name = harness.new()
    act = (f'--gin.Act.at={at}', '--gin.Act.action="garbage"')
    failure = harness.outcome(name, harness.start(name, *act, prefix=SUPERVISE))
    found = [end['saved'] for end in harness.endings(name)]
    if failure is None and found != [24]:
      failure = f'supervise.jsonl has {found}'
    yield Trial(f'at step {at}', failure)
    harness.forget(name)


@fault(
  'SIGKILL, SIGHUP or SIGQUIT to a supervisor',
  f'its run saves, ends with 75, {BITS}',
  full=6,
)
def killed(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, signal = harness.new(), (KILL, HANG_UP, QUIT)[number % 3]
    place = harness.folder / f'{name}.code'
    prefix = ('env', '--default-signal=HUP,QUIT', *SUPERVISE)
    if signal == KILL:  # which leaves nobody who could wait for the run
      prefix += ('sh', '-c', f'"$@"; echo $? > {place}.new; mv {place}.new {place}', 'sh')
    process = harness.start(name, '--gin.Pace.seconds=0.2', prefix=prefix)
    wait_for(lambda name=name, at=number: len(harness.hashes(name)) > at, process)
    process.send_signal(signal)
    code = ended(process)
    if signal == KILL:
      wait_for(place.exists, None)
      code = int(place.read_text())
    failure = None if code == PREEMPTED else f'exit code {code}'
    done, saved = harness.hashes(name)[-1][0], harness.saved(name)[-1:]
    if failure is None and saved != [done]:
      failure = f'step {done} was executed, but {saved} are saved'
    harness.run(name)
    yield Trial(f'{signal.name} after step {number + 1}', failure or harness.difference(name))
    harness.forget(name)


# A program that closes the pipe of heartbeats, or has another file at its number.
BETWEEN = """
import os, subprocess, sys
reused, *command = sys.argv[1:]
descriptor = int(os.environ['VALKYRIE_HEARTBEAT'].partition(':')[0])
if reused:
  os.dup2(os.open(reused, os.O_RDWR | os.O_CREAT), descriptor)
sys.exit(subprocess.run(command, close_fds=not reused).returncode)
"""


@fault(
  'a program that closes the pipe between supervisor and run, or reuses its number',
  'is reported once, the run is not disturbed, the other file is not written',
  full=4,
)
def unheard(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name, reused = harness.new(), number % 2 == 1
    other = harness.folder / f'{name}.other'
    *supervise, end = SUPERVISE
    between = (sys.executable, '-c', BETWEEN, str(other) if reused else '')
    prefix = (*supervise, '--start_up_seconds=0.5', end, *between)
    failure = harness.outcome(name, harness.start(name, prefix=prefix))
    if harness.said(name).count('nothing was heard from the command') != 1:
      failure = failure or 'it was not said exactly once'
    if reused and other.read_bytes():
      failure = failure or 'the other file was written'
    yield Trial('its number is that of another file' if reused else 'closed', failure)
    harness.forget(name)
