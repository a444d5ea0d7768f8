"""Standard error of a run, which nobody has to read."""

from collections.abc import Iterator
import contextlib
import os
import sys
from typing import Any, TextIO


class LastingStream:
  """A stream whose reader may go away: what cannot be written then is lost, and raises nothing."""

  def __init__(self, stream: TextIO | None):
    """Writes to `stream`; None stands for one that was closed before Python began."""
    self._stream = stream or open(os.devnull, 'w')  # noqa: SIM115, for as long as the process

  def write(self, text: str) -> int:
    with contextlib.suppress(OSError, ValueError):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    with contextlib.suppress(OSError, ValueError):
      self._stream.flush()

  def end(self) -> None:
    """Gives up what cannot be written: Python would end with 120 for it."""
    with contextlib.suppress(OSError, ValueError):
      try:
        self._stream.flush()
      except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
  """Makes standard error lasting."""
  before: Any = sys.stderr
  sys.stderr = stream = LastingStream(before)
  try:
    yield
  finally:
    sys.stderr = before
    stream.end()
