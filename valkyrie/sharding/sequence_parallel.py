"""Time split over devices: what the mixers ask of each other's devices.

Within `over(axes)`, in the body of a `jax.shard_map`, a chunk [B, C] is cut into n pieces of C / n
tokens, and device i, counted along the axes, has piece i. A mixer computes what it would of the
whole chunk, gradients included, from its piece and from what the devices before it pass on:

  a window    the last W keys and values go one device to the right (`from_left`)
  a state     what each piece makes of it is gathered and composed (`before_and_after`)

What the last device would pass on is the carry after the chunk, and goes to device 0. So the carry
that a mixer is given and the carry that it returns are right on device 0 alone, finite on the
others; `settle` hands them round when a step ends.

Gradients are taken inside the body: each device differentiates its own share of the loss, and what
is replicated, as parameters are, has a gradient that is summed over the devices afterwards. The
`shard_map` is one with check_vma=False.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
from typing import TypeVar

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from valkyrie.types import Array, Carry

T = TypeVar('T')

_axes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar('time_axes', default=())


@contextlib.contextmanager
def over(axes: Sequence[str]) -> Iterator[None]:
  """While tracing: time is split over these mesh axes, outermost first; over none, it is whole."""
  token = _axes.set(tuple(axes))
  try:
    yield
  finally:
    _axes.reset(token)


def axes() -> tuple[str, ...]:
  """The mesh axes over which time is split; empty where all of it is here."""
  return _axes.get()


def count() -> int:
  """n, the pieces of a chunk."""
  return lax.axis_size(axes())


def index() -> Array:
  """i, the piece that this device has: int32 scalar."""
  return lax.axis_index(axes())


def from_left(tree: T) -> T:
  """What the device to the left holds; on device 0, what the last one does."""
  ring = [(i, (i + 1) % count()) for i in range(count())]
  return jax.tree.map(lambda x: lax.ppermute(x, axes(), ring), tree)


def all_of(tree: T) -> T:
  """What every device holds, leaves [n, ...]: for small things, which one dtype sends together."""
  leaves, structure = jax.tree.flatten(tree)
  gathered = {}
  for dtype in dict.fromkeys(x.dtype for x in leaves):
    together, apart = ravel_pytree([x for x in leaves if x.dtype == dtype])
    gathered[dtype] = iter(jax.vmap(apart)(lax.all_gather(together, axes())))
  return structure.unflatten(next(gathered[x.dtype]) for x in leaves)


def before_and_after(piece: T, then: Callable[[T, T], T]) -> tuple[T, T]:
  """(what the pieces to the left of this one make together, what all of them make).

  Args:
    piece: what this device's piece does, a small pytree.
    then: of leaves [m, ...], what the first does and then the second; associative.

  Returns:
    Pytrees like `piece`. On device 0, which has no piece to its left, the first means nothing.
  """
  together = lax.associative_scan(then, all_of(piece))
  left = jnp.maximum(index() - 1, 0)
  before = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, left, keepdims=False), together)
  return before, jax.tree.map(lambda x: x[-1], together)


def from_holder(tree: T, holds: Array) -> T:
  """What the one device holds that `holds`, on every device.

  Args:
    tree: leaves [B, ...].
    holds: bool, a scalar, or [B] where each row has a device of its own.
  """

  def of_leaf(x):
    its = holds.reshape(holds.shape + (1,) * (x.ndim - holds.ndim)) if holds.ndim else holds
    return lax.psum(jnp.where(its, x, jnp.zeros_like(x)), axes())

  return jax.tree.map(of_leaf, tree)


def settle(carry: Carry) -> Carry:
  """The carry that device 0 holds, on every device, to the bit: when a step ends."""
  if not axes():
    return carry

  def of_leaf(x):
    bits = lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')  # a sum of floats loses -0
    return lax.bitcast_convert_type(from_holder(bits, index() == 0), x.dtype)

  return jax.tree.map(of_leaf, carry)


def apart(key: Array) -> Array:
  """A key for draws that differ from device to device, as they differ from token to token."""
  return jax.random.fold_in(key, index()) if axes() else key
