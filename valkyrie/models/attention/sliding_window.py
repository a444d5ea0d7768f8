"""Causal sliding-window attention (Longformer, Beltagy et al. 2020) over chunks of a stream.

A slice of queries reads its windows, see `windows`, and G global keys: learned registers, and the
first tokens of the query's own document. The slices before a chunk's first one come from the carry.
So a chunk of one token is a decoding step, and the cuts between chunks change nothing.

Keys are carried unrotated, and rotated by their coordinates in a slice. So angles stay below
W + 2 S positions, in a document of any length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.models.attention import kernels, kv_cache
from valkyrie.models.attention.kv_cache import AttentionCarry, KVCache
from valkyrie.models.attention.rotary import rotate
from valkyrie.models.attention.softmax import Dropout, Part, same_document
from valkyrie.models.attention.windows import Queries, Windows, attend_windows
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array

Pair = tuple[Array, Array]  # the keys and values of the registers, each [R, J, K]


class _Globals(NamedTuple):
  """What a slice may read outside its windows."""

  starts: KVCache  # the document's first tokens as they stand before the slice
  skipped: tuple[KVCache, Array] | None  # of a dilated window: the slice's tokens, their positions


def _global_part(
  queries: Queries,
  keys: _Globals,
  edge: tuple[np.ndarray, np.ndarray],
  registers: Pair,
  seen: Windows,
) -> list[Part]:
  """The registers and the document starts outside the window, all at the window's edge."""
  starts = keys.starts
  slots = starts.keys.shape[1]
  register_keys, register_values = registers
  count = len(register_keys)
  if not count + slots:
    return []
  query_positions = queries.positions[:, :, None]
  start_positions = np.arange(slots)
  distance = query_positions - start_positions[None, None]
  if keys.skipped is not None:
    inside, positions = keys.skipped
    first = jnp.where(positions < slots, inside.segment_ids, 0)
    firsts = inside._replace(segment_ids=first)
    starts = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), starts, firsts)
    distance_inside = query_positions - positions[:, None, :]
    distance = jnp.concatenate([distance, distance_inside], axis=2)
  outside = distance > seen.width * seen.dilation
  if seen.dilation > 1:
    is_between = distance % seen.dilation > 0
    outside |= (distance > 0) & is_between
  visible = outside & same_document(queries.segment_ids, starts.segment_ids)
  rows = len(queries.q)

  def behind_registers(registers, starts):
    registers_of_rows = jnp.broadcast_to(registers, (rows, *registers.shape))
    cast = registers_of_rows.astype(starts.dtype)
    return jnp.concatenate([cast, starts], axis=1)

  k = behind_registers(register_keys, starts.keys)
  v = behind_registers(register_values, starts.values)
  mask = jnp.pad(visible, ((0, 0), (0, 0), (count, 0)), constant_values=True)
  # A score depends on the difference of two coordinates, so the keys are rotated backwards instead
  # of the queries forwards: without dilation they are few.
  cos, sin = edge
  rotated = rotate(k, cos, -sin)
  part = Part.of(queries.q, rotated, v, mask)
  return [part]


def _attend_heads(
  queries: Queries,
  tokens: KVCache,
  length: Array,
  carry: AttentionCarry,
  registers: Pair,
  seen: Windows,
  dropout: Dropout | None,
) -> tuple[Array, KVCache]:
  """Heads of one dilation over a chunk -> (out [B, T, H, K], the starts after `length` [B])."""
  batch, time = queries.positions.shape
  slots = carry.starts.segment_ids.shape[1]
  window = seen.width
  d = seen.dilation
  # At most W, so that the window of a slice's last query contains the whole of a document that
  # starts inside the slice.
  steps = -(-time // d)
  size = max(1, min(seen.slice_size // d, window, steps))
  if seen.kernels is not None:  # of whole blocks
    own_key = 0 if slots else 1
    most = min(window + own_key, time)
    size = kernels.slice_size(seen.kernels, most, seen.slice_size)
  back = -(-window // size)

  def with_reach(old, new):
    """The carried tokens, as whole slices, before the new ones."""
    window_begin = old.shape[1] - window * d
    old_residues = slices.split_residues(old[:, window_begin:], d)
    new_residues = slices.split_residues(new, d)
    rows, _, *rest = old_residues.shape
    missing = back * size - window
    padding = jnp.zeros((rows, missing, *rest), old.dtype)
    return jnp.concatenate([padding, old_residues, new_residues], axis=1)

  row = jax.tree.map(with_reach, carry.window, tokens)
  slice_time = size * d
  count = -(-time // slice_time)
  begins = slice_time * jnp.arange(count)[None]
  begins_of_rows = jnp.broadcast_to(begins, (batch, count))
  ends = jnp.concatenate([begins_of_rows, length[:, None]], axis=1)
  starts, _ = kv_cache.starts_before(carry.starts, tokens, queries.positions, ends)

  def for_each_residue(x):
    if d == 1:
      return x
    return jnp.repeat(x, d, axis=1)

  def before_slices(x):
    but_last = x[:, :-1]
    by_slice = jnp.moveaxis(but_last, 1, 0)
    return for_each_residue(by_slice)

  def inside_slices(x):
    by_slice = slices.cut(x, slice_time)
    return for_each_residue(by_slice)

  before = jax.tree.map(before_slices, starts)
  skipped = None
  if d > 1 and slots:
    skipped = jax.tree.map(inside_slices, (tokens, queries.positions))

  def global_part(now, keys, edge):
    return _global_part(now, keys, edge, registers, seen)

  global_keys = _Globals(before, skipped)
  out = attend_windows(seen, queries, row, (back, 0), size, global_part, global_keys, dropout)
  starts_at_end = jax.tree.map(lambda x: x[:, -1], starts)
  return out, starts_at_end


@jax.named_scope('attention')
def sliding_window_attention(
  q: Array,
  k: Array,
  v: Array,
  carry: AttentionCarry,
  *,
  positions: Array,
  segment_ids: Array,
  registers: Pair,
  windows: Sequence[Windows],
  dropout: Dropout | None = None,
) -> tuple[Array, AttentionCarry]:
  """Causal attention of a token to its own document: itself, the W tokens before it, the globals.

  Args:
    q: [B, T, H, K]; k, v: [B, T, J, K]; all unrotated.
    carry: of the chunk before; its shapes give g.
    positions, segment_ids: int32 [B, T], see `types.Batch`.
    registers: learned keys and values that every query reads.
    windows: of all heads; heads of dilation d see the distances d, 2d, ..., Wd. If a slice size
      divides W, every key read is visible to some query.

  Returns:
    (out [B, T, H, K], the carry after the last token that is not padding). Rows of padding hold
    finite, meaningless numbers.
  """
  tokens = KVCache(k, v, segment_ids)
  length = jnp.sum(segment_ids > 0, axis=1)  # padding does not enter the carry
  after_chunk = None
  if sequence_parallel.axes():
    carry, after_chunk = kv_cache.exchange_halo(carry, tokens, positions, length)
  register_keys, register_values = registers
  outs = []
  starts = []
  for number, seen in enumerate(windows):
    heads = seen.heads
    queries = Queries(q[:, :, seen.query_heads], positions, segment_ids)
    window_of_heads = carry.window.of_heads(heads)
    starts_of_heads = carry.starts.of_heads(heads)
    out, started = _attend_heads(
      queries,
      tokens.of_heads(heads),
      length,
      AttentionCarry(window_of_heads, starts_of_heads),
      (register_keys[:, heads], register_values[:, heads]),
      seen,
      dropout and dropout.of(number),
    )
    outs.append(out)
    starts.append(started)
  out = jnp.concatenate(outs, axis=2)
  if after_chunk is not None:
    return out, after_chunk
  keys = jnp.concatenate([started.keys for started in starts], axis=2)
  values = jnp.concatenate([started.values for started in starts], axis=2)
  joined_starts = KVCache(keys, values, starts[0].segment_ids)
  window = kv_cache.slide_window(carry.window, tokens, length)
  return out, AttentionCarry(window, joined_starts)
