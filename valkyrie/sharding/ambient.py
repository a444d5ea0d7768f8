"""The one ambient value: it holds while a program is traced, and reaches modules of any depth."""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
from typing import Any, NamedTuple


class Ambient(NamedTuple):
  """The devices of a program, and how its arrays are split over them.

  time, weights: inside a `jax.shard_map`: the mesh axes over which the time of a chunk, and the
    weights of layers, are split, outermost first; over none, they are whole.
  """

  devices: Sequence[Any] | None = None  # the target devices; None takes this machine's
  partitioner: Any = None  # the one whose `jit` traces the caller; None inside a `jax.shard_map`
  time: tuple[str, ...] = ()
  weights: tuple[str, ...] = ()


_NOTHING = Ambient()
_ambient = contextvars.ContextVar('ambient', default=_NOTHING)


def current() -> Ambient:
  """What holds for the caller."""
  return _ambient.get()


@contextlib.contextmanager
def within(**fields: Any) -> Iterator[None]:
  """Inside the block, or the decorated function, these fields of `Ambient` have other values."""
  token = _ambient.set(_ambient.get()._replace(**fields))
  try:
    yield
  finally:
    _ambient.reset(token)
