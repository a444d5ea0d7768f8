"""SIGTERM and SIGINT as a wish to stop between two steps, with a deadline.

Python runs signal handlers only between bytecodes of the main thread, which may spend minutes
inside a compilation or a long step. What Python's own C handler does at once, in any thread, is to
write to a file descriptor; a thread reads it here.

Of several processes one is asked, and all stop, before the same dispatch. Each counts how often
`requested` was called, which all do alike, and says how far it is; none goes on beyond that until
the furthest of them is known, and all stop one call later. Threads say it: a main thread may be
waiting for a step that the others have not dispatched yet.
"""

from collections.abc import Callable
import os
import signal
import sys
import threading
import time
import types
from typing import Any

import gin

from valkyrie.config.computation import may_change_on_resume
from valkyrie.distributed import processes
from valkyrie.errors import ConfigurationError, Preempted

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TO_UNWIND = 1.5  # seconds in which start-up may end in order, its child processes included


@may_change_on_resume()
@gin.configurable
class Preemption:
  """Catches the signals while it is entered.

  Until `ready` is called nothing new can be saved: a signal raises errors.Preempted in the main
  thread, or ends the process where that thread runs no Python. From then on `requested` becomes
  true instead, and the process ends by itself within `grace_seconds`, or is ended then. A second
  signal changes nothing. The exit code is always that of errors.Preempted.
  """

  def __init__(self, grace_seconds: float = 25.0):
    """Takes the time that the running step and its save may take; Kubernetes kills after 30 s."""
    if grace_seconds <= 0:
      raise ConfigurationError(
        f'Preemption.grace_seconds={grace_seconds} leaves no time to save; give more than 0.'
      )
    self._grace_seconds = grace_seconds
    self._calls = 0
    self._asked = False
    self._last_call: int | None = None
    self._agreed = threading.Event()
    self._over = threading.Event()
    self._lock = threading.Lock()
    self._newest: Callable[[], str] | None = None
    self._unwinding: int | None = None  # the signal that ended the start-up

  def ready(self, newest: Callable[[], str]) -> None:
    """Promises to save from now on; `newest` says which checkpoint is the last, in a few words.

    Returns when all processes have come so far.
    """
    processes.exchange('ready', '')
    with self._lock:
      self._newest = newest

  def requested(self) -> bool:
    """Whether the process is to stop; to be asked before each dispatch, by all processes alike."""
    with self._lock:
      self._calls += 1
      if not self._asked:
        return False
    self._agreed.wait()
    assert self._last_call is not None
    return self._calls > self._last_call

  def __enter__(self) -> 'Preemption':
    self._reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._old_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
    self._old_handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
    self._thread = threading.Thread(target=self._watch, name='preemption', daemon=True)
    self._thread.start()
    return self

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    for number, handler in self._old_handlers.items():
      signal.signal(number, handler)
    signal.set_wakeup_fd(self._old_descriptor)
    self._over.set()
    os.write(self._writer, b'\0')  # no signal has this number
    self._thread.join()
    os.close(self._reader)
    os.close(self._writer)
    # Whatever code the signal fell into may have made another error of it.
    if self._unwinding is not None and isinstance(error, Exception):
      raise Preempted(_before_the_first_step(self._unwinding)) from error

  def _handle(self, number: int, frame: types.FrameType | None) -> None:
    """Runs in the main thread; what is to be done once `ready` was called, `_watch` does."""
    del frame
    if self._newest is None and self._unwinding is None:
      self._unwinding = number
      raise Preempted(_before_the_first_step(number))

  def _watch(self) -> None:
    while (number := os.read(self._reader, 1)[0]) not in SIGNALS:
      if self._over.is_set():
        return
    name = signal.Signals(number).name
    until = time.monotonic() + self._grace_seconds
    with self._lock:
      started, calls = self._newest is not None, self._calls
      self._asked = True
    processes.announce(Preempted.exit_code)
    if not started:
      if not self._over.wait(_TO_UNWIND):
        _end(_before_the_first_step(number))
      return
    print(
      f'{name}: stopping after the running step (at most {self._grace_seconds:g} s)',
      file=sys.stderr,
      flush=True,
    )
    try:
      told = processes.exchange('stop', str(calls), self._grace_seconds)
      self._last_call = max(map(int, told))
      self._agreed.set()
    except RuntimeError:
      pass  # another process is lost, or as late as this one will be
    if not self._over.wait(max(0.0, until - time.monotonic())):
      assert self._newest is not None
      _end(
        f'{name}: the running step and its save took longer than Preemption.grace_seconds = '
        f'{self._grace_seconds:g}; the newest checkpoint is {self._newest()}. Run the same command '
        'again.'
      )


def _before_the_first_step(number: int) -> str:
  name = signal.Signals(number).name
  return f'{name} before the first step: nothing was saved. Run the same command again.'


def _end(message: str) -> None:
  """Ends the process, whatever its other threads wait for."""
  print(f'valkyrie: {message}', file=sys.stderr, flush=True)
  processes.end(Preempted.exit_code)
  os._exit(Preempted.exit_code)
