"""The first seconds of a start: signals, and two trainers at once."""

from collections.abc import Iterator
import re
import time

from faults.harness import INT, KILL, TERM, Harness, ended, wait_for
from faults.table import Trial, fault

PREEMPTED, STORAGE = 75, 74
# Before Python hears the signals, they end a process as they end any other.
ENDINGS = {TERM: (PREEMPTED, -TERM), INT: (PREEMPTED, -INT, 130)}
_SECONDS = 3.0  # of a start in which the signal comes


@fault(
  'SIGTERM or SIGINT in the first seconds of a start',
  'ends at once as a signal does or with 75, no traceback, continues bit for bit',
  full=24,
  unit='s until it ended',
)
def ended_early(harness: Harness, times: int) -> Iterator[Trial]:
  name = harness.new()
  for number in range(times):
    signal, seconds = (INT if number % 3 == 2 else TERM), _SECONDS * number / times
    said = len(harness.said(name)) if number else 0
    process = harness.start(name)
    time.sleep(seconds)
    began = time.monotonic()
    process.send_signal(signal)
    code = ended(process)
    took, words, failure = time.monotonic() - began, harness.said(name)[said:], None
    if code not in ENDINGS[signal]:
      failure = f'exit code {code}: {words[-400:]}'
    elif trace := re.search('Traceback|Exception ignored', words):
      failure = f'a traceback: {words[trace.start() :][:900]}'
    yield Trial(f'{signal.name} after {seconds:.2f} s', failure, took)
  harness.run(name)
  if failure := harness.difference(name):
    yield Trial('at the end', failure)
  harness.forget(name)


@fault(
  'two trainers on one directory, started at once',
  'one is refused with 74, the other one trains bit for bit',
  full=20,
)
def two_at_once(harness: Harness, times: int) -> Iterator[Trial]:
  for number in range(times):
    name = harness.new()
    both = [harness.start(name) for _ in range(2)]
    first = both[0]
    wait_for(lambda both=both: any(p.poll() is not None for p in both), first)
    refused = [process for process in both if process.poll() == STORAGE]
    wait_for(lambda name=name: len(harness.hashes(name)) >= 2, first)
    running = [process for process in both if process.poll() is None]
    failure = harness.difference(name, whole=False)
    if len(refused) != 1 or len(running) != 1:
      codes = [process.poll() for process in both]
      failure = f'exit codes {codes}: {harness.said(name)[-400:]}'
    for process in running:
      process.send_signal(KILL)
      process.wait()
    yield Trial(f'number {number}', failure)
    harness.forget(name)
