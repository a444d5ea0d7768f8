"""A causal convolution over the last few tokens of a document, one filter for each channel."""

import dataclasses
from typing import NamedTuple

import haiku as hk
from jax import lax
import jax.numpy as jnp

from valkyrie.models.layers import Module, broadcast, parameter, rows
from valkyrie.sharding import sequence_parallel
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, Carry, DType


class Tail(NamedTuple):
  """The last tokens before a chunk, as far as a convolution reads: [B, taps - 1, F]."""

  inputs: Array


class ConvolvedCarry(NamedTuple):
  """The carry of a convolution, and of the recurrence behind it."""

  tail: Tail
  state: Carry


@dataclasses.dataclass(eq=False)
class CausalConvolution(Module):
  """y_t = Σ_k w_k ∘ x_{t-k} for k < taps, within a document; its carry is a `Tail`.

  With a `bias`, a learned number is added to each channel.
  """

  taps: int
  bias: bool = False

  def initial_carry(self, batch_size: int, width: int, dtype: DType) -> Tail:
    """Zeros for a width of F; no document reads them."""
    slots = self.taps - 1
    return Tail(jnp.zeros((batch_size, slots, width), dtype))

  def forward_flops(self, width: int) -> int:
    """A product and a sum for each tap and channel, and a sum for the bias."""
    return (2 * self.taps + self.bias) * width

  def __call__(
    self,
    x: Array,
    carry: Tail,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Tail]:
    """x [B, T, F] -> (y [B, T, F], the tail after the chunk)."""
    bound = self.taps**-0.5
    init = hk.initializers.RandomUniform(-bound, bound)
    width = x.shape[2]
    channel_axis = 'activation'
    shape = (self.taps, width)
    filters = parameter('filters', shape, init, axes=(None, channel_axis), cast=x.dtype)
    # On a TPU, XLA may choose rows of the batch to be neighbors: one fills an eighth of a tile.
    x = rows(x, platforms=('gpu', 'tpu'))
    shifted, tail = lagged(carry, x, segment_ids)
    y = jnp.zeros_like(x)
    weights = filters.astype(x.dtype)
    for lag, earlier in enumerate(shifted):
      is_inside = positions[..., None] >= lag
      read = jnp.where(is_inside, earlier, 0)
      y += broadcast(weights[lag], x) * read
    if self.bias:
      bias = parameter('bias', (width,), init, axes=(channel_axis,), cast=x.dtype)
      bias = bias.astype(x.dtype)
      y += broadcast(bias, y)
    return y, tail


def lagged(carry: Tail, x: Array, segment_ids: Array) -> tuple[list[Array], Tail]:
  """([x, x one token before, ..], each [B, T, F], as far as the tail reaches; the tail after x).

  Where x is a device's piece of a chunk, `carry` is the tail before the chunk. It is correct only
  on device 0, and so is the tail after the chunk.
  """
  length = jnp.sum(segment_ids > 0, axis=1)
  before, after = _tails(carry.inputs, x, length)
  slots = before.shape[1]
  time = x.shape[1]
  if platform() == 'cpu':
    # Its cores read slices of a copy faster than they fill up with zeros.
    extended = jnp.concatenate([before, x], axis=1)
    starts = range(slots, -1, -1)
    return [extended[:, start : start + time] for start in starts], Tail(after)
  place = jnp.arange(time)[None, :, None]
  # Zeros around a part of x fuse with what reads them; the tail and x joined would be a copy of x.
  shifted = [x]
  for lag in range(1, slots + 1):
    later = _moved(x, lag, -lag)
    sooner = _moved(before[:, slots - lag :], 0, time - lag)
    shifted.append(jnp.where(place < lag, sooner, later))
  return shifted, Tail(after)


def _moved(x: Array, before: int, after: int) -> Array:
  """x [B, T, F] with so many zeros before and after it, or so many tokens less."""
  zero = jnp.zeros((), x.dtype)
  kept = (0, 0, 0)
  return lax.pad(x, zero, (kept, (before, after, 0), kept))


def _tails(carried: Array, x: Array, length: Array) -> tuple[Array, Array]:
  """(the tail before this device's piece, the tail after the chunk), each [B, taps - 1, F]."""
  slots = carried.shape[1]
  slot = jnp.arange(slots)
  place = (length[:, None] + slot[None])[..., None]
  place_in_tail = jnp.minimum(place, slots - 1)
  place_in_x = jnp.maximum(place - slots, 0)
  from_tail = jnp.take_along_axis(carried, place_in_tail, axis=1)
  from_x = jnp.take_along_axis(x, place_in_x, axis=1)
  ended = jnp.where(place < slots, from_tail, from_x)
  if not sequence_parallel.axes():
    return carried, ended

  # A piece fills the last slots with its own tokens; only device 0 knows those before them.
  filled = jnp.minimum(length, slots)
  piece = (ended, filled)
  entering = (carried, filled)
  prefixes = sequence_parallel.device_prefix_scan(piece, _then, entering)
  before_piece, whole = prefixes
  before, _ = before_piece
  after, _ = whole
  return before, after


def _then(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
  """The last tokens of a piece and of the next one, and how many slots they fill."""
  earlier, filled = first
  later, added = second
  slots = earlier.shape[2]
  slot = jnp.arange(slots)[None, None]
  place = added[..., None] + slot
  source = jnp.minimum(place, slots - 1)
  shifted = jnp.take_along_axis(earlier, source[..., None], axis=2)
  is_known = place < slots
  merged = jnp.where(is_known[..., None], shifted, later)
  together = jnp.minimum(filled + added, slots)
  return merged, together
