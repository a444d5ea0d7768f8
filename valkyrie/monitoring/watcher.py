"""A watcher of a run, such as a writer, a picture or a tracker, neither ends nor holds up the run.

Each is called in a thread of its own, behind a queue. What a file system refuses for a while is
tried again; what fails otherwise, comes too fast or does not return is dropped, and a line says so.
"""

from collections import deque
from collections.abc import Callable, Mapping
import math
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from valkyrie.distributed import processes
from valkyrie.monitoring.patience import AT_THE_END, PATIENCE, may_pass

_LONGEST_CALL = 60.0  # seconds after which the end of a run waits no longer for a call to return
_LONGEST_END = 600.0  # seconds that the end of a run waits for a watcher
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 60.0
_MOST_BYTES = 2**28  # of the arguments that wait in a queue, about
_BYTES_OF_A_CALL = 1000
_LONGEST_REASON = 500  # characters


class _Call(NamedTuple):
  what: str
  function: Callable[..., Any]
  arguments: tuple
  size: int


class Watcher:
  """Calls functions in their order, in a thread.

  Attributes:
    name: for messages.
    is_left_out: whether nothing is called any more.
    leaves_after_an_error: whether a call that fails is the last one.
    longest_call: the seconds after which `wait` no longer waits for a call to return.
  """

  def __init__(
    self,
    name: str,
    say: Callable[[str], None],
    patience: float = PATIENCE,
    leaves_after_an_error: bool = False,
  ):
    """Prints by `say`. `patience` are the seconds for which a refused call is tried again."""
    self.name = name
    self.is_left_out = False
    self.longest_call = _LONGEST_CALL
    self._say = say
    self._patience = patience
    self.leaves_after_an_error = leaves_after_an_error
    self._calls: deque[_Call] = deque()
    self._size = 0
    self._running = ''  # what is called now
    self._attempt_began = math.inf  # when it was called; infinite between two attempts
    self._lost = 0
    self._refused_since: float | None = None
    self._closed_at = math.inf
    self._closing = threading.Event()
    self._changed = threading.Condition()
    self._said: set[str] = set()
    self._thread: threading.Thread | None = None

  def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function after the calls before; returns at once, and raises nothing."""
    size = size_of(arguments)
    is_first = False
    with self._changed:
      if self.is_left_out:
        return
      if self._size + size > _MOST_BYTES and self._calls:
        self._lost += 1
        is_first = self._lost == 1
      else:
        self._calls.append(_Call(what, function, arguments, size))
        self._size += size
        self._changed.notify_all()
      if self._thread is None:
        # A daemon: the process can end although a call does not return.
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()
    if is_first:
      self._say(
        f'warning: {self.name} is too slow ({what}): until it has caught up, calls are left out'
      )

  def wait(self) -> None:
    """Waits for the calls, as long as they return; otherwise leaves the watcher out."""
    began = time.monotonic()
    left = 0
    with self._changed:
      while (self._calls or self._running) and not self.is_left_out:
        now = time.monotonic()
        seconds = now - self._attempt_began
        hangs = self._running and seconds > self.longest_call
        if hangs or now - began > _LONGEST_END:
          self.is_left_out = True
          left = len(self._calls) + 1
        else:
          self._changed.wait(0.2)
    if left:
      self._say(
        f'warning: {self.name} is left out, with its last calls ({left:,}): {self._running} has '
        f'not returned for {time.monotonic() - self._attempt_began:.0f} s'
      )
      processes.exit_in_time()

  def close(self) -> None:
    """Waits for the calls, and tries for less long what is refused."""
    self._closed_at = time.monotonic()
    self._closing.set()
    self.wait()
    with self._changed:
      self.is_left_out = True
      self._changed.notify_all()
    if self._lost:
      self._say(f'warning: {self.name} has missed {self._lost:,} calls')

  def leave(self) -> None:
    """Calls nothing more, and waits for nothing."""
    with self._changed:
      self.is_left_out = True
      is_running = bool(self._running)
      self._changed.notify_all()
    if is_running:
      processes.exit_in_time()

  def _serve(self) -> None:
    while True:
      with self._changed:
        while not self._calls and not self.is_left_out:
          self._changed.wait()
        if not self._calls or self.is_left_out:
          return
        call = self._calls.popleft()
        self._size -= call.size
        self._running = call.what
      try:
        self._try(call)
      finally:
        with self._changed:
          self._running = ''
          self._changed.notify_all()

  def _try(self, call: _Call) -> None:
    """Calls a function until it succeeds, or its patience is over."""
    pause = _FIRST_PAUSE
    while not self.is_left_out:
      self._attempt_began = time.monotonic()
      try:
        call.function(*call.arguments)
      except BaseException as error:  # a tracker may call sys.exit
        is_tried_again = may_pass(error) and self._is_tried_again(call.what, error)
        if not is_tried_again:
          self._drop(call.what, error)
          return
        self._attempt_began = math.inf
        if self._closing.is_set():
          time.sleep(min(pause, 1.0))
        else:
          self._closing.wait(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
      else:
        if self._refused_since is not None and 'refused' in self._said:
          self._say(f'{self.name}: {call.what} has succeeded')
          self._said.discard('refused')
        self._refused_since = None
        return

  def _is_tried_again(self, what: str, error: BaseException) -> bool:
    """Whether the patience lasts; says so at the first refusal."""
    now = time.monotonic()
    if self._refused_since is None:
      self._refused_since = now
    since = self._refused_since
    patience = self._patience
    if self._closing.is_set():  # the calls that are left share these seconds
      since = min(since, self._closed_at)
      patience = min(patience, AT_THE_END)
    is_over = now - since >= patience
    if not is_over and 'refused' not in self._said:
      self._said.add('refused')
      self._say(
        f'{self.name}: {what} failed, and is tried again for up to {patience:g} s: {_reason(error)}'
      )
    return not is_over

  def _drop(self, what: str, error: BaseException) -> None:
    kind = f'{what} {type(error).__name__}'
    is_new = kind not in self._said
    self._said.add(kind)
    if self.leaves_after_an_error:
      self.is_left_out = True
      self._say(
        f'warning: {self.name} failed in {what} and is left out from now on: {_reason(error)}'
      )
    elif is_new:
      self._say(f'warning: {self.name}: {what} failed, and is left out: {_reason(error)}')


def _reason(error: BaseException) -> str:
  text = f'{type(error).__name__}: {error}'
  text = text.encode(errors='backslashreplace').decode()
  return text if len(text) <= _LONGEST_REASON else f'{text[:_LONGEST_REASON]} ...'


def size_of(value: Any) -> int:
  """About the bytes of the arguments of a call."""
  if isinstance(value, np.ndarray):
    return value.nbytes
  if isinstance(value, str):
    return len(value)
  if isinstance(value, tuple):
    return _BYTES_OF_A_CALL + sum(map(size_of, value))
  if isinstance(value, Mapping):
    sizes = [size_of(each) for each in value.values()]
    return sum(sizes) + len(sizes) * (_BYTES_OF_A_CALL // 10)
  return 0
