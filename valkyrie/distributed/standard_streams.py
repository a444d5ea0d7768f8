"""Standard error of a run: nobody has to read it, and libraries do not fill it."""

from collections.abc import Iterator
import contextlib
import os
import re
import select
import sys
import threading
from typing import Any, TextIO

# The information that TensorFlow prints while it is imported, before its log level counts.
_NOISE = re.compile(
  rb'WARNING: All log messages before absl::InitializeLog|'
  rb'I\d{4} [\d:.]+ +\d+ \S+:\d+\] |[WE]\d{4} [^\]]*cuda[^\]]*\] '
)
_IDLE_SECONDS = 0.1  # after which an unfinished line, as of a progress bar, is passed on


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


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
  """Drops this information from standard error, and passes on all other lines.

  Python's own messages do not take the detour through the thread that passes lines on: it may lose
  the last of them when another thread ends the process.
  """
  real = os.dup(2)
  python = sys.stderr
  with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
    if python.fileno() == 2:
      # Stays open: what is imported meanwhile may keep it.
      stream = open(os.dup(2), 'w', buffering=1, errors='backslashreplace')  # noqa: SIM115
      sys.stderr = LastingStream(stream)
  source, sink = os.pipe()
  os.dup2(sink, 2)
  os.close(sink)
  threading.Thread(target=_pass_on, args=(source, real), daemon=True).start()
  try:
    yield
  finally:
    sys.stderr = python
    os.dup2(real, 2)  # closes the last end of the pipe, which ends the thread


def _pass_on(source: int, real: int) -> None:
  """Copies lines, until the pipe is closed."""
  pending = b''
  while True:
    ready = select.select([source], [], [], _IDLE_SECONDS)[0]
    new = os.read(source, 2**16) if ready else b''
    *lines, pending = re.split(rb'(?<=[\n\r])', pending + new)
    if not ready or not new:
      lines, pending = [*lines, pending], b''
    with contextlib.suppress(OSError):  # nobody reads standard error any more
      os.write(real, b''.join(line for line in lines if not _NOISE.match(line)))
    if ready and not new:
      break
  os.close(source)
  os.close(real)
