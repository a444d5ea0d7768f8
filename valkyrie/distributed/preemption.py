"""Preemption: a signal stops a run between two steps, within a deadline.

Python runs signal handlers only between bytecodes of the main thread, which may spend minutes in a
compilation or a long step. Python's C handler, however, writes to a file descriptor at once, in any
thread; a thread of this module reads from it.

If one of several processes receives the signal, all stop before the same dispatch. All processes
call `requested` equally often, and each counts its calls. After a signal they exchange their
counts: no process returns from a later call before the largest count is known, and all stop one
call after it. A thread exchanges the counts, since the main thread may wait for a step that the
other processes have not dispatched yet.
"""

from collections.abc import Callable
import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import time
from typing import Annotated, Any

import gin

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import Range, checked
from valkyrie.distributed import console, processes
from valkyrie.errors import Preempted

_START_UP_GRACE = 1.5  # seconds in which start-up may end in order, with its child processes


@may_change_on_resume()
@gin.configurable
class Preemption:
  """A context manager that handles the signals.

  Before `ready` is called there is nothing to save: a signal raises errors.Preempted in the main
  thread, or ends the process if that thread runs no Python. After `ready` a signal makes
  `requested` return True, and the process is ended if the running step and its save take longer
  than `grace_seconds`. A second signal changes nothing. The exit code is always 75.
  """

  @checked
  def __init__(self, grace_seconds: Annotated[float, Range('(0, 1e9]')] = 25.0):
    self._grace_seconds = grace_seconds  # Kubernetes kills after 30
    self._calls = 0
    self._signaled = False
    self._last_call: concurrent.futures.Future[int] = concurrent.futures.Future()
    self._over = threading.Event()
    self._lock = threading.Lock()
    self._newest: Callable[[], str] | None = None
    self._unwinding: int | None = None  # the signal that ended start-up

  def ready(self, newest: Callable[[], str]) -> None:
    """Waits until start-up ends in all processes; `newest` describes the newest checkpoint."""
    processes.exchange('ready', None)
    with self._lock:
      self._newest = newest

  def requested(self) -> bool:
    """Whether to stop; all processes must call it before each dispatch."""
    with self._lock:
      self._calls += 1
      if not self._signaled:
        return False
    return self._calls > self._last_call.result()

  def __enter__(self) -> 'Preemption':
    self._reader, self._writer = os.pipe()
    os.set_blocking(self._writer, False)
    self._old_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
    self._old_handlers = {}
    for number in console.heard_signals():
      self._old_handlers[number] = signal.signal(number, self._handle)
    # Python prints what is raised where nothing can be raised, such as in __del__.
    self._old_unraisable = sys.unraisablehook
    sys.unraisablehook = self._unraisable
    self._thread = threading.Thread(target=self._watch, name='preemption', daemon=True)
    self._thread.start()
    return self

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    ends = self._signaled or self._unwinding is not None
    console.restore_handlers(self._old_handlers, ends)
    signal.set_wakeup_fd(self._old_descriptor)
    if sys.unraisablehook == self._unraisable:  # otherwise a later hook passes on to it
      sys.unraisablehook = self._old_unraisable
    self._over.set()
    os.write(self._writer, b'\0')  # no signal has this number
    self._thread.join()
    os.close(self._reader)
    os.close(self._writer)
    # The code that the signal interrupted may have replaced Preempted by another error.
    if self._unwinding is not None and isinstance(error, Exception):
      raise Preempted(_before_the_first_step(self._unwinding)) from error

  def _handle(self, number: int, frame: Any) -> None:
    """Ends start-up, in the main thread; after `ready`, only `_watch` acts."""
    if self._newest is None and self._unwinding is None:
      self._unwinding = number
      raise Preempted(_before_the_first_step(number))

  def _unraisable(self, unraisable: Any) -> None:
    """Prints nothing for a lost Preempted, which `_watch` handles."""
    if not isinstance(unraisable.exc_value, Preempted):
      self._old_unraisable(unraisable)

  def _watch(self) -> None:
    while True:
      number = os.read(self._reader, 1)[0]
      if number in console.STOP_SIGNALS:
        break
      if self._over.is_set():
        return
    name = signal.Signals(number).name
    until = time.monotonic() + self._grace_seconds
    with self._lock:
      newest = self._newest
      calls = self._calls
      self._signaled = True
    processes.announce(Preempted.exit_code)
    if newest is None:
      if not self._over.wait(_START_UP_GRACE):
        processes.abort(_before_the_first_step(number))
      return
    grace = f'{self._grace_seconds:g}'
    # In another thread: standard error may be a stream of the user's that waits for its reader.
    processes.say_in_a_thread(f'{name}: stopping after the running step (at most {grace} s)')
    with contextlib.suppress(RuntimeError):  # another process is lost, or misses its deadline too
      counts = processes.exchange('stop', calls, self._grace_seconds)
      self._last_call.set_result(max(counts))
    seconds = max(0.0, until - time.monotonic())
    if not self._over.wait(seconds):
      processes.abort(
        f'{name}: the running step and its save took longer than Preemption.grace_seconds = '
        f'{grace}; the newest checkpoint is {newest()}. Run the same command again.'
      )


def _before_the_first_step(number: int) -> str:
  name = signal.Signals(number).name
  return f'{name} before the first step: nothing was saved. Run the same command again.'
