"""The carry of causal attention, bounded KV caches of unrotated keys, on one or several devices.

Under sequence parallelism, a device's piece of a chunk reads the tokens before it from a carry, as
a chunk does. The window of that carry is the last W tokens of the device to the left; the window of
the last device is the carry after the chunk. One permutation along the ring delivers both. If a
piece is shorter than the window, each device forwards the tokens that it received, as often as the
window needs.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType


class KVCache(NamedTuple):
  """Unrotated keys and values [B, N, J, K] of N tokens, and their documents; 0 in an empty slot."""

  keys: Array
  values: Array
  segment_ids: Array

  def of_heads(self, heads: slice) -> 'KVCache':
    """The cache of some of the heads."""
    keys = self.keys[:, :, heads]
    values = self.values[:, :, heads]
    return KVCache(keys, values, self.segment_ids)

  def first(self, count: int) -> 'KVCache':
    """The first tokens."""
    return KVCache(*(leaf[:, :count] for leaf in self))


class AttentionCarry(NamedTuple):
  """The last W times the largest dilation tokens of a row, and the first g of its document."""

  window: KVCache
  starts: KVCache


def empty_carry(
  batch_size: int,
  window: int,
  starts: int,
  kv_heads: int,
  head_width: int,
  dtype: DType,
) -> AttentionCarry:
  """The carry before a row's first token."""

  def empty(slots: int) -> KVCache:
    zeros = jnp.zeros((batch_size, slots, kv_heads, head_width), dtype)
    no_documents = jnp.zeros((batch_size, slots), jnp.int32)
    return KVCache(zeros, zeros, no_documents)

  return AttentionCarry(empty(window), empty(starts))


def slide_window(window: KVCache, tokens: KVCache, length: Array) -> KVCache:
  """The window after the first `length` [B] of the tokens."""
  slots = window.segment_ids.shape[1]

  def slide(old, new):
    both = jnp.concatenate([old, new], axis=1)
    last_slots = functools.partial(lax.dynamic_slice_in_dim, slice_size=slots)
    return jax.vmap(last_slots)(both, length)

  return jax.tree.map(slide, window, tokens)


def starts_before(
  starts: KVCache,
  tokens: KVCache,
  positions: Array,
  ends: Array,
) -> tuple[KVCache, Array]:
  """The document starts [B, N, g, ...] as they stand before each of the tokens `ends` [B, N].

  The second result, bool [B, N, g], is true at the slots that are still the carried ones.
  """
  # The document of the token before starts `position` tokens further back. Its first tokens are
  # among the given tokens, or in the carried starts if the document is older than the chunk.
  slots = starts.segment_ids.shape[1]
  last = jnp.maximum(ends - 1, 0)
  position = jnp.take_along_axis(positions, last, axis=1)
  slot = np.arange(slots)[None, None]
  at = (last - position)[..., None] + slot
  is_at_start = ends == 0
  carried = (at < 0) | is_at_start[..., None]
  reached = slot <= position[..., None]

  def pick(old, new):
    take = functools.partial(jnp.take, axis=0, mode='clip')
    read = jax.vmap(take)(new, at)
    others = (1,) * (new.ndim - 2)
    shape = (*at.shape, *others)
    read = jnp.where(reached.reshape(shape), read, jnp.zeros_like(read))
    return jnp.where(carried.reshape(shape), old[:, None], read)

  return jax.tree.map(pick, starts, tokens), carried


def exchange_halo(
  carry: AttentionCarry,
  tokens: KVCache,
  positions: Array,
  length: Array,
) -> tuple[AttentionCarry, AttentionCarry]:
  """(the carry before this device's piece, the carry after the chunk).

  `carry`, before the chunk, is correct on device 0, and so is the carry after it. `tokens` are the
  keys and values of the piece; `length` int32 [B] counts those that are not padding.
  """
  windows = _exchange_windows(carry.window, tokens, length)
  starts = _exchange_starts(carry.starts, tokens, positions, length)
  before, after = map(AttentionCarry, windows, starts)
  return before, after


def _exchange_windows(window: KVCache, tokens: KVCache, length: Array) -> tuple[KVCache, KVCache]:
  slots = window.segment_ids.shape[1]
  time = tokens.segment_ids.shape[1]
  before = window
  after = window
  pieces_of_window = -(-slots // time)
  for _ in range(min(pieces_of_window, sequence_parallel.size())):
    both = jax.tree.map(lambda x, new: jnp.concatenate([x, new], axis=1), before, tokens)
    last = jax.tree.map(lambda x: x[:, time:], both)
    after = sequence_parallel.shift_right(last)
    before = sequence_parallel.select_first(window, after)

  # Padding ends a chunk, so only the carry after the chunk can lie behind it: the window after a
  # row's last token, on whichever device that is.
  lengths = sequence_parallel.all_gather(length)
  rows_with_tokens = jnp.sum(lengths > 0, axis=0)
  source = jnp.maximum(rows_with_tokens - 1, 0)

  def from_last_token():
    ended = slide_window(before, tokens, length)
    is_source = sequence_parallel.index() == source
    return sequence_parallel.broadcast_from(ended, is_source)

  has_padding = jnp.any(lengths < time)
  after = lax.cond(has_padding, from_last_token, lambda: after)
  return before, after


def _exchange_starts(
  starts: KVCache,
  tokens: KVCache,
  positions: Array,
  length: Array,
) -> tuple[KVCache, KVCache]:
  slots = starts.segment_ids.shape[1]
  if not slots:
    return starts, starts
  at_the_end = starts_before(starts, tokens, positions, length[:, None])
  found, carried = jax.tree.map(lambda x: x[:, 0], at_the_end)

  def then(first, second):
    earlier, were_carried = first
    later, are_carried = second

    def pick(old, new):
      others = (1,) * (new.ndim - 3)
      of_each = are_carried.reshape(*are_carried.shape, *others)
      return jnp.where(of_each, old, new)

    return jax.tree.map(pick, earlier, later), were_carried & are_carried

  (before, _), (after, _) = sequence_parallel.device_prefix_scan(
    (found, carried), then, (starts, carried)
  )
  return before, after
