"""Messages that native libraries write to standard error, below Python."""

from collections.abc import Iterator
import contextlib
import os
import re
import select
import sys
import threading

# The information that TensorFlow prints while it is imported, before its log level counts.
_NOISE = re.compile(
  rb'WARNING: All log messages before absl::InitializeLog|'
  rb'I\d{4} [\d:.]+ +\d+ \S+:\d+\] |[WE]\d{4} [^\]]*cuda[^\]]*\] '
)
_IDLE_SECONDS = 0.1  # after which an unfinished line, as of a progress bar, is passed on


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
  """Drops this information from standard error, and passes on all other lines.

  Python's own messages do not take the detour through the thread that passes lines on: it may lose
  the last of them when another thread ends the process.
  """
  real = os.dup(2)
  python = sys.stderr
  if python is sys.__stderr__:
    # Stays open: what is imported meanwhile may keep it.
    sys.stderr = open(os.dup(2), 'w', buffering=1, errors='backslashreplace')  # noqa: SIM115
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
