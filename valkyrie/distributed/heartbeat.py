"""Heartbeats of a run for its supervisor (`valkyrie-supervise`): lines of JSON in a pipe.

Without a supervisor nothing is written. A supervisor that is busy or has ended never blocks a run.
"""

import contextlib
import faulthandler
import json
import os
import signal

# The environment variable that holds the number of the file descriptor.
VARIABLE = 'VALKYRIE_HEARTBEAT'

# On this signal Python writes the stack of every thread to standard error.
STACKS = signal.SIGUSR1


def start(model_dir: str) -> None:
  """Reports the start of a run, and installs the handler of `STACKS`."""
  faulthandler.register(STACKS, file=2, all_threads=True)  # sys.stderr may have been replaced
  beat(stage='start_up', model_dir=os.path.abspath(model_dir))


def beat(**facts: str | int) -> None:
  """Reports fields of `supervisor.RunStatus`: the stage, the step that begins, the step saved."""
  descriptor = os.environ.get(VARIABLE)
  if descriptor is not None:
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
      os.write(int(descriptor), json.dumps(facts).encode() + b'\n')
