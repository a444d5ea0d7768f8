"""The signals that ask a process to save and end."""

from collections.abc import Iterator, Mapping
import contextlib
import signal
from typing import Any

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def heard() -> tuple[signal.Signals, ...]:
  """The signals to handle: all, but for a SIGHUP that nohup lets the process ignore."""
  ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  return tuple(number for number in ALL if number != signal.SIGHUP or not ignored)


_of_a_program: list[bool] = []


@contextlib.contextmanager
def of_a_program() -> Iterator[None]:
  """The context of a program that ends after its run, and not of a notebook, which goes on."""
  _of_a_program.append(True)
  try:
    yield
  finally:
    _of_a_program.pop()


def restore(handlers: Mapping[signal.Signals, Any], stopped: bool) -> None:
  """Restores the handlers from before a run.

  When a signal has stopped the run of a program, a second one is ignored: it would end the process
  with another code, or a traceback.
  """
  for number, handler in handlers.items():
    signal.signal(number, signal.SIG_IGN if stopped and _of_a_program else handler)
