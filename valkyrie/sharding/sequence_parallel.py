"""Sequence parallelism: the time axis of a chunk split over devices.

Where `Ambient.time` names mesh axes, in the body of a `jax.shard_map`, a chunk [B, C] is cut into n
pieces of C / n tokens, and device i, counted along the axes, holds piece i. A mixer computes its
part of the whole chunk's result, gradients included, from its piece and from two kinds of messages:

  window attention   the last W keys and values go one device to the right (`shift_right`)
  a recurrence       each piece's effect on the state is gathered and composed
                     (`device_prefix_scan`)

The last device's message is the carry after the chunk, and goes to device 0. A mixer's carry is
therefore correct only on device 0, and finite on the others; `broadcast_carry` copies it to all at
the end of a step. What is too large for that, the keys of a long document, is `OverTime`: each
device holds its share.

Gradients are taken inside the body: each device differentiates its own share of the loss, and the
gradients of replicated parameters are summed over the devices afterwards. The `shard_map` is one
with check_vma=False.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from valkyrie.sharding import ambient, messages
from valkyrie.types import Array, Carry

T = TypeVar('T')


class OverTime(NamedTuple):
  """A part of a carry whose slots, axis 1 of its leaves [B, N, ...], the devices of time share."""

  content: Any


def is_over_time(carry: Carry) -> Carry:
  """Whether each leaf of a carry is in a part that is `OverTime`: a pytree like the carry."""

  def is_shared(part):
    return isinstance(part, OverTime)

  def of_part(part):
    return jax.tree.map(lambda _: is_shared(part), part)

  return jax.tree.map(of_part, carry, is_leaf=is_shared)


def axes() -> tuple[str, ...]:
  """The mesh axes over which time is split; empty where it is whole."""
  return ambient.current().time


def size() -> int:
  """n, the number of pieces of a chunk."""
  return lax.axis_size(axes())


def index() -> Array:
  """i, the number of this device's piece: int32 scalar."""
  return lax.axis_index(axes())


def shift_right(tree: T) -> T:
  """The tree of the device to the left; device 0 gets the tree of the last device."""
  count = size()
  ring = []  # (from, to)
  for number in range(count):
    right = (number + 1) % count
    ring.append((number, right))
  return jax.tree.map(lambda x: lax.ppermute(x, axes(), ring), tree)


def all_gather(tree: T) -> T:
  """The trees of all devices, leaves [n, ...]: for small trees, one message for each dtype."""
  leaves, structure = jax.tree.flatten(tree)
  dtypes = dict.fromkeys(x.dtype for x in leaves)
  gathered = {}  # by dtype, the leaves of all devices
  for dtype in dtypes:
    of_dtype = [x for x in leaves if x.dtype == dtype]
    flat, unravel = ravel_pytree(of_dtype)
    of_devices = lax.all_gather(flat, axes())
    gathered[dtype] = iter(jax.vmap(unravel)(of_devices))
  return structure.unflatten(next(gathered[x.dtype]) for x in leaves)


def device_prefix_scan(piece: T, then: Callable[[T, T], T], first: T) -> tuple[T, T]:
  """(the composition of the pieces to the left of this one, the composition of all pieces).

  Args:
    piece: the effect of this device's piece, a small pytree.
    then: the associative composition of two effects, of leaves [m, ...]: first one, then the other.
    first: the first result on device 0, which has no piece to its left.
  """
  pieces = all_gather(piece)
  composed = lax.associative_scan(then, pieces)
  left = jnp.maximum(index() - 1, 0)

  def pick(x):
    return lax.dynamic_index_in_dim(x, left, keepdims=False)

  of_left = jax.tree.map(pick, composed)
  before = select_first(first, of_left)
  whole = jax.tree.map(lambda x: x[-1], composed)
  return before, whole


def select_first(first: T, others: T) -> T:
  """`first` on device 0, `others` on the other devices."""
  is_first = index() == 0
  return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), first, others)


def broadcast_from(tree: T, is_source: Array) -> T:
  """The tree, leaves [B, ...], of the one device that is the source, on every device.

  `is_source` is a bool scalar, or [B] where each row has its own source.
  """

  def broadcast(x):
    mask = is_source
    if is_source.ndim:
      mask = jnp.expand_dims(is_source, range(1, x.ndim))
    return lax.psum(jnp.where(mask, x, jnp.zeros_like(x)), axes())

  return jax.tree.map(broadcast, tree)


def broadcast_carry(carry: Carry) -> Carry:
  """Device 0's carry on every device, bit for bit; what is `OverTime` stays where it is."""
  if not axes():
    return carry

  def broadcast(x, stays):
    if stays:
      return x
    return messages.bit_for_bit(lambda bits: broadcast_from(bits, index() == 0), x)

  return jax.tree.map(broadcast, carry, is_over_time(carry))


def fold_in_shard(key: Array) -> Array:
  """A random key that differs between the devices that share a chunk."""
  if not axes():
    return key
  return jax.random.fold_in(key, index())
