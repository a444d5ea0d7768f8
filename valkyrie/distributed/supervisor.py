"""Runs a training command, ends it where it hangs, and starts it again where that can help.

    scripts/supervise --step_seconds=300 -- python -m valkyrie.main --gin_file=... --model_dir=...

A run tells what it is in the middle of through a pipe (`monitoring/heartbeat.py`). When nothing has
come for longer than that may take, its Python stacks are printed, its processes are killed, and the
reason becomes a line of MODEL_DIR/supervise.jsonl.
"""

import argparse
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from typing import Any

from valkyrie.distributed.heartbeat import PHASES, STACKS, VARIABLE

HANG = 86
# Preempted, hung, aborted by a library, killed (for memory, or with its machine).
RETRYABLE = (75, HANG, 128 + signal.SIGABRT, 128 + signal.SIGKILL)

_DEFAULT_SECONDS = {'start_up': 1800, 'compile': 3600, 'step': 900, 'save': 1800}
_SECONDS_FOR_STACKS = 2.0
_LONGEST_PAUSE = 300.0


@dataclasses.dataclass
class Heard:
  """What a run has told of itself."""

  phase: str = 'start_up'
  step: int | None = None
  saved: int = -1
  process: int | None = None  # which of several it is
  model_dir: str | None = None

  def update(self, facts: dict[str, Any]) -> None:
    """Takes in one line of the pipe."""
    for name, value in facts.items():
      setattr(self, name, value)


class Supervisor:
  """One command, run until it ends well, badly, or too often without progress."""

  def __init__(
    self, command: Sequence[str], seconds: dict[str, float], restarts: int, pause: float
  ):
    """Prepares the command.

    Args:
      command: the program and its arguments.
      seconds: for each of PHASES, how long may pass without a sign of life.
      restarts: how many there are in a row without a later step being saved.
      pause: seconds before the first restart, doubled for each further one without progress.
    """
    self._command = list(command)
    self._seconds = seconds
    self._restarts = restarts
    self._pause = pause
    self._child: subprocess.Popen | None = None
    self._told_to_stop = False

  def run(self) -> int:
    """The exit code of the last run."""
    for number in (signal.SIGTERM, signal.SIGINT):
      signal.signal(number, self._forward)
    heard, best, in_vain = Heard(), -1, 0
    while True:
      code, reason = self._run_once(heard)
      if heard.saved > best:
        best, in_vain = heard.saved, 0
      again = code in RETRYABLE and not self._told_to_stop and in_vain < self._restarts
      self._write_down(heard, code, reason, again)
      if not again:
        return code
      until = time.monotonic() + min(self._pause * 2**in_vain, _LONGEST_PAUSE)
      in_vain += 1
      while time.monotonic() < until:
        if self._told_to_stop:
          return code
        time.sleep(min(0.1, self._pause))

  def _run_once(self, heard: Heard) -> tuple[int, str]:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    self._child = subprocess.Popen(
      self._command,
      env={**os.environ, VARIABLE: str(writer)},
      pass_fds=(writer,),
      start_new_session=True,  # so that all its processes can be killed
    )
    os.close(writer)
    if self._told_to_stop:  # while it was started
      self._child.send_signal(signal.SIGTERM)
    try:
      reason = self._watch(self._child, reader, heard)
    finally:
      os.close(reader)
    if reason is not None:
      self._kill(self._child)
      return HANG, reason
    code = self._child.wait()
    code = 128 - code if code < 0 else code
    return code, f'exit code {code}'

  def _watch(self, child: subprocess.Popen, reader: int, heard: Heard) -> str | None:
    """Returns None when the child has ended, or why it counts as hung."""
    heard.phase, heard.step, rest, last = 'start_up', None, b'', time.monotonic()
    while True:
      ended = child.poll() is not None
      if select.select([reader], [], [], 0.0 if ended else 0.2)[0]:
        data = os.read(reader, 65536)
        if data:
          *lines, rest = (rest + data).split(b'\n')
          for line in lines:
            heard.update(json.loads(line))
          last = time.monotonic()
          continue
      if ended:
        return None
      silent = time.monotonic() - last
      if silent > self._seconds[heard.phase]:
        where = '' if heard.step is None else f' {heard.step}'
        return (
          f'no sign of life for {silent:.0f} s in {heard.phase}{where}; allowed are '
          f'--{heard.phase}_seconds={self._seconds[heard.phase]:g}'
        )

  def _kill(self, child: subprocess.Popen) -> None:
    child.send_signal(STACKS)
    time.sleep(_SECONDS_FOR_STACKS)
    with contextlib.suppress(ProcessLookupError):
      os.killpg(child.pid, signal.SIGKILL)
    child.wait()

  def _write_down(self, heard: Heard, code: int, reason: str, again: bool) -> None:
    what = 'starting again' if again else 'ending'
    print(
      f'supervise: {reason}; last saved step {heard.saved}; {what}', file=sys.stderr, flush=True
    )
    if heard.model_dir is not None:
      line = {'time': time.time(), 'code': code, 'reason': reason, **dataclasses.asdict(heard)}
      with open(pathlib.Path(heard.model_dir, 'supervise.jsonl'), 'a') as file:
        file.write(json.dumps(line) + '\n')

  def _forward(self, number: int, frame: Any) -> None:
    del frame
    self._told_to_stop = True
    if self._child is not None and self._child.poll() is None:
      self._child.send_signal(number)


def main(arguments: Sequence[str] | None = None) -> int:
  """The exit code of what the command line asks for."""
  parser = argparse.ArgumentParser(
    prog='scripts/supervise',
    usage='scripts/supervise [flags] -- COMMAND ...',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  for phase in PHASES:
    parser.add_argument(
      f'--{phase}_seconds',
      type=float,
      default=_DEFAULT_SECONDS[phase],
      metavar='S',
      help=f'silence allowed in {phase} (default: %(default)s)',
    )
  parser.add_argument(
    '--restarts',
    type=int,
    default=3,
    metavar='N',
    help='restarts in a row that save no later step (default: %(default)s)',
  )
  parser.add_argument(
    '--pause_seconds',
    type=float,
    default=5.0,
    metavar='S',
    help='before a restart, doubled each time without progress (default: %(default)s)',
  )
  parser.add_argument('command', nargs='+', metavar='COMMAND', help='after --')
  flags = parser.parse_args(arguments)
  seconds = {phase: getattr(flags, f'{phase}_seconds') for phase in PHASES}
  return Supervisor(flags.command, seconds, flags.restarts, flags.pause_seconds).run()


if __name__ == '__main__':
  sys.exit(main())
