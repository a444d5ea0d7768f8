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


class _Program:
  """A program that ends after its run, and not a notebook, which goes on."""

  def __init__(self):
    self.interrupted = False

  def interrupt(self, number: int, frame: types.FrameType | None) -> None:
    self.interrupted = True
    signal.default_int_handler(number, frame)


_program: _Program | None = None


@contextlib.contextmanager
def of_a_program() -> Iterator[None]:
  """The context of a program that ends after its run.

  SIGINT ends it at once until `raise_interrupts`: imports that are interrupted raise other errors
  than KeyboardInterrupt, or none. Later such an error is KeyboardInterrupt again.
  """
  global _program  # noqa: PLW0603
  program = _program = _Program()
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's jobs ignore it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    yield
  except Exception as error:
    if program.interrupted:
      raise KeyboardInterrupt from error
    raise
  finally:
    _program = None


def raise_interrupts() -> None:
  """Lets SIGINT raise KeyboardInterrupt in a program from now on."""
  if _program and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, _program.interrupt)


def restore(handlers: Mapping[signal.Signals, Any], stopped: bool) -> None:
  """Restores the handlers from before a run.

  When a signal has stopped the run of a program, a second one is ignored: it would end the process
  with another code, or a traceback.
  """
  for number, handler in handlers.items():
    signal.signal(number, signal.SIG_IGN if stopped and _program else handler)
