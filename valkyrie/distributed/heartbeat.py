"""Heartbeats of a run for its supervisor (`valkyrie-supervise`): lines of JSON in a pipe.

Without a supervisor nothing is written, and a busy supervisor never blocks a run. A run whose
supervisor is gone saves and ends, as after SIGTERM, since nobody would end it if it hung.
"""

import contextlib
import faulthandler
import json
import os
import signal

# The environment variable that holds the descriptor of the pipe, and its device and inode.
VARIABLE = 'VALKYRIE_HEARTBEAT'

# On this signal Python writes the stack of every thread to standard error.
STACKS = signal.SIGUSR1


def address(descriptor: int) -> str:
  """The value of `VARIABLE` for a pipe."""
  found = os.fstat(descriptor)
  return f'{descriptor}:{found.st_dev}:{found.st_ino}'


def start(model_dir: str | os.PathLike) -> None:
  """Reports the start of a run, and installs the handler of `STACKS`."""
  faulthandler.register(STACKS, file=2, all_threads=True)  # sys.stderr may have been replaced
  place = str(model_dir)
  beat(stage='start_up', model_dir=place if '://' in place else os.path.abspath(place))


def beat(**facts: str | int) -> None:
  """Reports fields of `supervisor.RunStatus`: the stage, the step that begins, the step saved.

  Without fields it reports that the current stage makes progress.
  """
  for descriptor in inherited():
    try:
      line = json.dumps(facts) + '\n'
      os.write(descriptor, line.encode())
    except BlockingIOError:  # a busy supervisor
      pass
    except OSError:  # nobody reads the pipe any more
      os.kill(os.getpid(), signal.SIGTERM)


def inherited() -> tuple[int, ...]:
  """The descriptor of the pipe, if there is one: the `pass_fds` of a child that sends heartbeats.

  A program between supervisor and run may close the descriptor, and its number may be reused for
  another file.
  """
  value = os.environ.get(VARIABLE, '')
  descriptor = value.partition(':')[0]
  with contextlib.suppress(OSError, OverflowError, ValueError):
    if descriptor.isdecimal() and address(int(descriptor)) == value:
      return (int(descriptor),)
  return ()
