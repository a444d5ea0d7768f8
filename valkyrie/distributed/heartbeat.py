"""Signs of life for a supervisor (`scripts/supervise`): a line for each, written to a pipe.

Without a supervisor nothing is written. A supervisor that is gone or busy never holds up the run.
"""

import contextlib
import faulthandler
import json
import os
import signal

# Names the file descriptor in the environment.
VARIABLE = 'VALKYRIE_HEARTBEAT'

# What a run can be in the middle of; each has a time that it may take.
PHASES = ('start_up', 'compile', 'step', 'save')

# On this signal Python writes the stack of every thread to standard error.
STACKS = signal.SIGUSR1


def start(model_dir: str) -> None:
  """Says that a run begins, and makes it answer `STACKS`."""
  faulthandler.register(STACKS, file=2, all_threads=True)  # sys.stderr may have been exchanged
  beat(phase='start_up', model_dir=os.path.abspath(model_dir))


def beat(**facts: str | int) -> None:
  """Tells the supervisor the `phase` (of PHASES), the `step` that begins, or was `saved`."""
  descriptor = os.environ.get(VARIABLE)
  if descriptor is not None:
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
      os.write(int(descriptor), json.dumps(facts).encode() + b'\n')
