"""Lines that say that something long still goes on, so that nobody takes a command for stopped."""

from collections.abc import Callable, Iterator
import contextlib
import sys
import threading
import time

EVERY = 15.0  # seconds between two lines


def _print(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def doing(
  what: str,
  say: Callable[[str], None] = _print,
  every: float | None = None,
) -> Iterator[None]:
  """A context that says every so many seconds what is still being done, and for how long.

  What takes less time says nothing. `say` is called in another thread.
  """
  pause = EVERY if every is None else every
  began = time.monotonic()
  ended = threading.Event()

  def tell() -> None:
    while not ended.wait(pause):
      waited = time.monotonic() - began
      say(f'still {what} ({waited:.0f} s)')

  thread = threading.Thread(target=tell, name='waiting', daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
