"""A gin configuration apart from that of the process: in force inside a context alone."""

from collections.abc import Callable, Iterator
import contextlib
import threading
from typing import Any

from gin import config as gin_config

# gin has one configuration for all threads.
_ONE_AT_A_TIME = threading.RLock()


class Configuration:
  """What `load` binds, in force inside `installed`."""

  def __init__(self, load: Callable[[], None]):
    """Runs `load`, which starts with an empty configuration, such as a call of `load_gin`."""
    with _put_back():
      _clear()
      load()
      self._state = _state()

  @contextlib.contextmanager
  def installed(self) -> Iterator[None]:
    """A context with this configuration; the one before is put back. It may be entered again."""
    with _put_back():
      _install(self._state)
      yield


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
  with _ONE_AT_A_TIME:
    before = _state()
    try:
      yield
    finally:
      _install(before)


def _state() -> tuple[Any, ...]:
  bound = {key: dict(values) for key, values in gin_config._CONFIG.items()}
  operative = dict(gin_config._OPERATIVE_CONFIG)
  return bound, operative, set(gin_config._IMPORTS), gin_config.config_is_locked()


def _clear() -> None:
  for part in (gin_config._CONFIG, gin_config._OPERATIVE_CONFIG, gin_config._IMPORTS):
    part.clear()
  gin_config._set_config_is_locked(False)


def _install(state: tuple[Any, ...]) -> None:
  bound, operative, imports, locked = state
  _clear()
  gin_config._CONFIG.update({key: dict(values) for key, values in bound.items()})
  gin_config._OPERATIVE_CONFIG.update(operative)
  gin_config._IMPORTS.update(imports)
  gin_config._set_config_is_locked(locked)
