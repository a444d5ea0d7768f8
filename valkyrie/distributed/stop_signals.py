"""The signals that ask a process to save and end."""

from collections.abc import Iterator, Mapping
import contextlib
import signal
import types
from typing import Any

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def heard() -> tuple[signal.Signals, ...]:
  """The signals to handle: all, but for a SIGHUP that nohup lets the process ignore."""
  ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  return tuple(number for number in ALL if number != signal.SIGHUP or not ignored)


_of_a_program: list[bool] = []


@contextlib.contextmanager
def of_a_program() -> Iterator[None]:
  """The context of a program that ends after its run, and not of a notebook, which goes on.

  An error that stands for KeyboardInterrupt is KeyboardInterrupt again: an import that is
  interrupted may raise ImportError.
  """
  interrupted = False

  def interrupt(number: int, frame: types.FrameType | None) -> None:
    nonlocal interrupted
    interrupted = True
    signal.default_int_handler(number, frame)

  before = signal.getsignal(signal.SIGINT)
  if before is signal.default_int_handler:
    signal.signal(signal.SIGINT, interrupt)
  _of_a_program.append(True)
  try:
    yield
  except Exception as error:
    if interrupted:
      raise KeyboardInterrupt from error
    raise
  finally:
    _of_a_program.pop()
    if signal.getsignal(signal.SIGINT) is interrupt:
      signal.signal(signal.SIGINT, before)


def restore(handlers: Mapping[signal.Signals, Any], stopped: bool) -> None:
  """Restores the handlers from before a run.

  When a signal has stopped the run of a program, a second one is ignored: it would end the process
  with another code, or a traceback.
  """
  for number, handler in handlers.items():
    signal.signal(number, signal.SIG_IGN if stopped and _of_a_program else handler)
