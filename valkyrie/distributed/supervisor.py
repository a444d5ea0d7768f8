"""A supervisor of a training command: it ends a hanging run and restarts it after some exit codes.

    valkyrie-supervise --step_seconds=300 -- python -m valkyrie.main --gin_file=... --model_dir=...

A run reports its stage through a pipe (`distributed/heartbeat.py`). When a run is silent for longer
than the limit of its stage, the supervisor prints its Python stacks, kills all its processes, and
appends the reason to supervise.jsonl in the folder of the run, also if that was renamed. A command
that never sends a heartbeat is not killed: a program between the two probably closes the pipe.
"""

import argparse
from collections.abc import Sequence
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import resource
import select
import signal
import subprocess
import sys
import time
from typing import Any

from valkyrie import foreign
from valkyrie.distributed import console
from valkyrie.distributed.heartbeat import STACKS, VARIABLE, address
from valkyrie.errors import ValkyrieError, reason_of
from valkyrie.storage import appended, bucket
from valkyrie.storage.held_folder import HeldFolder

HANG = 86  # the exit code of a run that was killed because it was silent
# A failed device, preempted, hung, aborted by a library, killed (by the kernel or its machine).
RETRYABLE = (71, 75, HANG, 128 + signal.SIGABRT, 128 + signal.SIGKILL)

# The stages of a run, with the longest silence between two heartbeats.
_SECONDS: dict[str, float] = {'start_up': 1800, 'compile': 3600, 'step': 900, 'save': 1800}
_SECONDS_FOR_STACKS = 2.0
_LONGEST_LOOK = 1.0  # seconds; a look at the pipe takes longer only if this process was stopped
_LONGEST_PAUSE = 300.0
_REPORTS = 'supervise.jsonl'
_NOT_FOUND = 127  # as a shell's


@dataclasses.dataclass
class RunStatus:
  """The status of a run, as its heartbeats report it."""

  stage: str = 'start_up'  # a key of _SECONDS
  step: int | None = None  # the step that began last
  saved: int = -1  # the newest saved step
  process: int | None = None  # the number of the process, in a run of several
  model_dir: str | None = None
  transient: bool = False  # whether a storage error that may pass has ended the run

  def update(self, line: bytes) -> bool:
    """Reads a heartbeat; returns whether a run has sent it. Other lines change nothing.

    A heartbeat without fields may come from a program that only builds a token store.
    """
    try:
      facts = foreign.json_object(line)
    except ValueError:
      return False
    kinds = {'stage': str, 'model_dir': str, 'transient': bool}
    are_fields = facts.keys() <= vars(self).keys()
    right = [type(value) is kinds.get(name, int) for name, value in facts.items()]
    if not are_fields or not all(right):
      return False
    if facts.get('stage', 'step') not in _SECONDS:
      return False
    vars(self).update(facts)
    return bool(facts)


@dataclasses.dataclass
class Supervisor:
  """Runs a command until it succeeds, fails for good, or restarts too often without progress."""

  command: Sequence[str]  # the program and its arguments
  seconds: dict[str, float]  # the longest silence between two heartbeats, by stage
  restarts: int  # the largest number of consecutive restarts that save no later step
  pause: float  # seconds before the first restart; doubled after each restart without progress
  _child: subprocess.Popen | None = dataclasses.field(default=None, init=False)
  _folder: HeldFolder | None = dataclasses.field(default=None, init=False)  # of the run
  _stopping: bool = dataclasses.field(default=False, init=False)

  def run(self) -> int:
    """Runs the command, and returns the exit code of the last run."""
    for number in console.heard_signals():
      signal.signal(number, self._forward)
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
      signal.signal(signal.SIGTSTP, self._pause)
    status = RunStatus()
    newest = -1
    in_vain = 0
    while True:
      code, reason = self._run_once(status)
      if status.saved > newest:
        newest = status.saved
        in_vain = 0
      may_succeed = code in RETRYABLE or status.transient
      again = may_succeed and not self._stopping and in_vain < self.restarts
      self._report(status, code, reason, again)
      pause = min(self.pause * 2**in_vain, _LONGEST_PAUSE)
      until = time.monotonic() + pause
      in_vain += 1
      while again and time.monotonic() < until and not self._stopping:
        time.sleep(min(0.1, self.pause))
      if not again or self._stopping:
        return code

  def _run_once(self, status: RunStatus) -> tuple[int, str]:
    """Runs the command once; returns its exit code and why it ended."""
    self._let_go()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
      child = self._child = subprocess.Popen(
        self.command,
        env={**os.environ, VARIABLE: address(writer)},
        stdout=console.of_a_child(sys.stdout),
        stderr=console.of_a_child(sys.stderr),
        pass_fds=(writer,),
        start_new_session=True,  # so that all its processes can be killed
      )
    except OSError as error:
      os.close(reader)
      return _NOT_FOUND, f'{self.command[0]} cannot be started ({error.strerror})'
    finally:
      os.close(writer)
    if self._stopping:  # a signal came while the command was started
      child.send_signal(signal.SIGTERM)
    with open(reader, 'rb', buffering=0) as pipe:
      reason = self._watch(child, pipe, status)
    if reason is not None:
      child.send_signal(STACKS)
      time.sleep(_SECONDS_FOR_STACKS)
      with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
      child.wait()
      return HANG, reason
    code = child.wait()
    if code < 0:  # it was ended by a signal
      code = 128 - code
    reason = f'exit code {code}'
    if code == 128 + signal.SIGKILL:
      peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
      gib = peak / 2**30 if sys.platform == 'darwin' else peak / 2**20  # from bytes, or from KiB
      reason += f' (killed, often by the kernel for its memory: it has held up to {gib:.1f} GiB)'
    return code, reason

  def _watch(self, child: subprocess.Popen, pipe: io.FileIO, status: RunStatus) -> str | None:
    """Returns None when the child has ended, or why it is considered to hang."""
    status.stage = 'start_up'
    status.step = None
    status.transient = False
    rest = b''
    silent = 0.0
    heard = False
    told = False
    last = time.monotonic()
    while True:
      ended = child.poll() is not None
      data = self._read(pipe, 0.0 if ended else 0.2)
      if data:
        *lines, rest = (rest + data).split(b'\n')
        rest = rest[-65536:]  # a heartbeat is shorter
        are_heartbeats = [status.update(line) for line in lines]
        heard |= any(are_heartbeats)
        self._hold(status.model_dir)
        last = time.monotonic()
        silent = 0.0
        continue
      if ended:
        return None
      now = time.monotonic()
      silent += min(now - last, _LONGEST_LOOK)  # a machine or container may have paused both
      last = now
      limit = self.seconds[status.stage]
      if silent > limit and not heard:
        if not told:
          _say(
            'nothing was heard from the command, which is therefore not watched. A program between '
            'the two may close file descriptors, as subprocess of Python does: start the command '
            'without it, or let it pass them on'
          )
        told = True
      elif silent > limit:
        stage = status.stage
        if status.step is not None:
          stage += f' {status.step}'
        flag = f'--{status.stage}_seconds={limit:g}'
        return f'no heartbeat for {silent:.0f} s in {stage}: the limit is {flag}'

  def _hold(self, model_dir: str | None) -> None:
    """Holds the folder of the run, which its path may name no longer when the run ends."""
    is_held = self._folder is not None
    if is_held or model_dir is None or bucket.is_bucket(model_dir):
      return
    with contextlib.suppress(OSError):  # it is not there yet: the next heartbeat tries again
      self._folder = HeldFolder(model_dir)

  def _let_go(self) -> None:
    """Lets the folder go: the next run may work in another one, by the same path."""
    if self._folder is not None:
      self._folder.release()
    self._folder = None

  def _read(self, pipe: io.FileIO, seconds: float) -> bytes | None:
    """What the pipe brings in so many seconds; empty or None without anything."""
    readable, _, _ = select.select([pipe], [], [], seconds)
    if not readable:
      return None
    return pipe.read(65536)

  def _report(
    self,
    status: RunStatus,
    code: int,
    reason: str,
    again: bool,
  ) -> None:
    action = 'ending'
    if again:
      action = 'restarting'
    saved = 'no step saved since the start'
    if status.saved >= 0:
      saved = f'last saved step {status.saved}'
    _say(f'{reason}; {saved}; {action}')
    if status.model_dir is not None:
      status_fields = dataclasses.asdict(status)
      facts = {'time': time.time(), 'code': code, 'reason': reason, **status_fields}
      text = json.dumps(facts)
      line = f'{text}\n'.encode()
      try:
        if bucket.is_bucket(status.model_dir):
          run_bucket = bucket.Bucket(status.model_dir)
          run_bucket.append(_REPORTS, line)
        else:
          file = pathlib.Path(status.model_dir, _REPORTS)
          appended.append(file, line)
      except ValkyrieError as error:
        _say(str(error))
      except OSError as error:
        place = f'{status.model_dir}/{_REPORTS}'
        _say(f'{place} cannot be written ({reason_of(error)})')

  def _forward(self, number: int, frame: Any) -> None:
    self._stopping = True
    if self._child is not None:
      self._child.send_signal(signal.SIGTERM)  # which does nothing if the child has ended

  def _pause(self, number: int, frame: Any) -> None:
    """Stops the run, then this process, as Ctrl-Z does; `fg` continues both.

    The run has a session of its own, where SIGTSTP would do nothing.
    """
    self._signal_all(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    self._signal_all(signal.SIGCONT)

  def _signal_all(self, number: signal.Signals) -> None:
    if self._child is not None and self._child.poll() is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._child.pid, number)


def _say(message: str) -> None:
  print(f'supervise: {message}', file=sys.stderr, flush=True)


@console.lasting_streams()
def main(arguments: Sequence[str] | None = None) -> int:
  """Supervises the command of the command line, and returns its exit code."""
  parser = argparse.ArgumentParser(
    prog='valkyrie-supervise',
    usage='valkyrie-supervise [flags] -- COMMAND ...',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  rows = []
  for stage, default in _SECONDS.items():
    rows.append((stage, default, f'longest silence in the stage {stage}'))
  rows.append(('pause', 5.0, 'pause before a restart, doubled each time without progress'))
  for name, default, text in rows:
    told = f'{text} (default: {default})'
    parser.add_argument(f'--{name}_seconds', type=float, default=default, metavar='S', help=told)
  told = 'consecutive restarts that save no later step (default: 3)'
  parser.add_argument('--restarts', type=int, default=3, metavar='N', help=told)
  parser.add_argument('command', nargs='+', metavar='COMMAND', help='training command, after --')
  flags = parser.parse_args(arguments)
  seconds = {stage: getattr(flags, f'{stage}_seconds') for stage in _SECONDS}
  supervisor = Supervisor(flags.command, seconds, flags.restarts, flags.pause_seconds)
  return supervisor.run()


if __name__ == '__main__':
  sys.exit(main())
