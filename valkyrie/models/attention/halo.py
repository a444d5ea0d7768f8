"""What attention remembers, passed from device to device where time is split (see `time_shards`).

A piece of time is to attention what a chunk is: it reads the tokens before it from a carry. The
window of that carry is the last W tokens of the device to the left, and what the last device would
pass on is the carry after the chunk: one permutation along the ring is both. Where a piece is
shorter than the window, what came from the left is passed on with it, as often as it takes.
"""

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.attention.kv_cache import (
  AttentionCarry,
  Memory,
  slide,
  starts_before,
  starts_carried,
)
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array


def pass_on(
  carry: AttentionCarry, tokens: Memory, positions: Array, length: Array
) -> tuple[AttentionCarry, AttentionCarry]:
  """(the carry before this device's piece, the carry after the chunk).

  Args:
    carry: that before the chunk, right on device 0; and so is what is returned for after it.
    tokens: those of the piece.
    positions: int32 [B, T], within the document.
    length: int32 [B], the tokens of the piece that are not padding.
  """
  windows = _pass_windows(carry.window, tokens, length)
  starts = _pass_starts(carry.starts, tokens, positions, length)
  before, after = map(AttentionCarry, windows, starts)
  return before, after


def _pass_windows(window: Memory, tokens: Memory, length: Array) -> tuple[Memory, Memory]:
  slots, time = window.segment_ids.shape[1], tokens.segment_ids.shape[1]
  before = after = window
  for _ in range(min(-(-slots // time), sequence_parallel.count())):
    last = jax.tree.map(lambda x, new: jnp.concatenate([x, new], axis=1)[:, time:], before, tokens)
    after = sequence_parallel.from_left(last)
    before = _on_first(window, after)

  # Padding ends a chunk, so no token needs a window from behind it: only the carry does. It is then
  # what stands after a row's last token, wherever that is.
  lengths = sequence_parallel.all_of(length)
  holder = jnp.maximum(jnp.sum(lengths > 0, axis=0) - 1, 0)
  after = lax.cond(
    jnp.any(lengths < time),
    lambda: sequence_parallel.from_holder(
      slide(before, tokens, length), sequence_parallel.index() == holder
    ),
    lambda: after,
  )
  return before, after


def _pass_starts(
  starts: Memory, tokens: Memory, positions: Array, length: Array
) -> tuple[Memory, Memory]:
  slots = starts.segment_ids.shape[1]
  if not slots:
    return starts, starts
  ends = length[:, None]
  found = jax.tree.map(lambda x: x[:, 0], starts_before(starts, tokens, positions, ends))
  carried = starts_carried(positions, ends, slots)[:, 0]

  def then(first, second):
    (earlier, were_carried), (later, are_carried) = first, second

    def pick(old, new):
      return jnp.where(are_carried.reshape(*are_carried.shape, *(1,) * (new.ndim - 3)), old, new)

    return jax.tree.map(pick, earlier, later), were_carried & are_carried

  (before, _), (after, _) = sequence_parallel.before_and_after((found, carried), then)
  return _on_first(starts, before), after


def _on_first(first: Memory, others: Memory) -> Memory:
  """`first` on device 0, `others` on the others."""
  is_first = sequence_parallel.index() == 0
  return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), first, others)
