"""The halo exchange of window attention under sequence parallelism.

A device's piece of a chunk reads the tokens before it from a carry, as a chunk does. The window of
that carry is the last W tokens of the device to the left; the last device's window is the carry
after the chunk. One permutation along the ring delivers both. If a piece is shorter than the
window, each device forwards the tokens that it received, as often as the window needs.
"""

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.attention import kv_cache
from valkyrie.models.attention.kv_cache import AttentionCarry, KVCache
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array


def exchange(
  carry: AttentionCarry, tokens: KVCache, positions: Array, length: Array
) -> tuple[AttentionCarry, AttentionCarry]:
  """(the carry before this device's piece, the carry after the chunk).

  Args:
    carry: the carry before the chunk, correct on device 0, as is the returned carry after it.
    tokens: keys and values of the piece.
    positions: int32 [B, T], within the document.
    length: int32 [B], the tokens of the piece that are not padding.
  """
  windows = _exchange_windows(carry.window, tokens, length)
  starts = _exchange_starts(carry.starts, tokens, positions, length)
  before, after = map(AttentionCarry, windows, starts)
  return before, after


def _exchange_windows(window: KVCache, tokens: KVCache, length: Array) -> tuple[KVCache, KVCache]:
  slots, time = window.segment_ids.shape[1], tokens.segment_ids.shape[1]
  before = after = window
  for _ in range(min(-(-slots // time), sequence_parallel.size())):
    last = jax.tree.map(lambda x, new: jnp.concatenate([x, new], axis=1)[:, time:], before, tokens)
    after = sequence_parallel.shift_right(last)
    before = _select_first(window, after)

  # Padding ends a chunk, so only the carry can lie behind it: the window after a row's last token,
  # on whichever device that is.
  lengths = sequence_parallel.all_gather(length)
  source = jnp.maximum(jnp.sum(lengths > 0, axis=0) - 1, 0)

  def from_last_token():
    ended = kv_cache.slide_window(before, tokens, length)
    return sequence_parallel.broadcast_from(ended, sequence_parallel.index() == source)

  after = lax.cond(jnp.any(lengths < time), from_last_token, lambda: after)
  return before, after


def _exchange_starts(
  starts: KVCache, tokens: KVCache, positions: Array, length: Array
) -> tuple[KVCache, KVCache]:
  slots = starts.segment_ids.shape[1]
  if not slots:
    return starts, starts
  ends = length[:, None]
  found = jax.tree.map(lambda x: x[:, 0], kv_cache.starts_before(starts, tokens, positions, ends))
  carried = kv_cache.starts_carried(positions, ends, slots)[:, 0]

  def then(first, second):
    (earlier, were_carried), (later, are_carried) = first, second

    def pick(old, new):
      return jnp.where(are_carried.reshape(*are_carried.shape, *(1,) * (new.ndim - 3)), old, new)

    return jax.tree.map(pick, earlier, later), were_carried & are_carried

  (before, _), (after, _) = sequence_parallel.device_prefix_scan((found, carried), then)
  return _select_first(starts, before), after


def _select_first(first: KVCache, others: KVCache) -> KVCache:
  """`first` on device 0, `others` on the other devices."""
  is_first = sequence_parallel.index() == 0
  return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), first, others)
