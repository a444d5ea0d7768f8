"""Faults of the requests to a server: the requests that they meet, and their number."""

from collections.abc import Callable, Mapping
import random
import re
import threading
from typing import Any, NamedTuple


class Call(NamedTuple):
  """What a predicate may ask; `target` is 'BUCKET/NAME' or, for a list, 'BUCKET/PREFIX'."""

  method: str
  path: str
  query: Mapping[str, str]
  target: str


When = Callable[[Call], bool]


def on(method: str = '.*', target: str = '.*', path: str = '.*') -> When:
  """The requests whose method, target and path match regular expressions as a whole."""
  patterns = [re.compile(one, re.DOTALL) for one in (method, target, path)]
  return lambda call: all(
    pattern.fullmatch(value) is not None
    for pattern, value in zip(patterns, (call.method, call.target, call.path), strict=True)
  )


every = on()


def reads_of(target: str = '.*') -> When:
  """The requests for the bytes of objects."""
  return lambda call: call.query.get('alt') == 'media' and on('GET', target)(call)


def writes_of(target: str = '.*') -> When:
  """The uploads of objects, by any way."""
  return on('POST|PUT', target, '.*/upload/.*')


class Fault:
  """What happens to the next `times` requests of a predicate; None is until `end`.

  injected: number of the requests that met it.
  """

  def __init__(self, kind: str, when: When, times: int | None, probability: float, value: Any):
    self.kind, self.value = kind, value
    self.injected = 0
    self._when, self._times, self._probability = when, times, probability
    self._arrived = threading.Semaphore(0)
    self._released = threading.Event()

  def end(self):
    """Meets no further request, and lets those go on that it holds."""
    self._times = 0
    self._released.set()

  def wait(self, seconds: float) -> bool:
    """Waits for a request that meets the fault; False if none came."""
    return self._arrived.acquire(timeout=seconds)

  def meets(self, call: Call, chance: random.Random) -> bool:
    """Counts a request if it meets the fault; the server calls it under its lock."""
    if self._times is not None and self.injected >= self._times:
      return False
    if not self._when(call) or chance.random() >= self._probability:
      return False
    self.injected += 1
    self._arrived.release()
    return True

  def hold(self):
    """Blocks until `end`."""
    self._released.wait()
