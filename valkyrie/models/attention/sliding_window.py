"""Causal sliding-window attention in slices of time (Longformer, Beltagy et al. 2020).

A slice of S queries reads its own S keys, the earlier slices within reach of its windows, and G
global keys: learned registers, and the first tokens of the query's own document. The slices before
a chunk's first one come from the carry. So cost and memory are linear in time, a chunk of one token
is a decoding step, and the cuts between chunks change nothing.

Keys are carried unrotated: no angle exceeds (W + 2 S) at any length of the document. Each residue
of time modulo a dilation d is a row of its own (section 3.1).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.models.attention import softmax
from valkyrie.models.attention.kv_cache import (
  AttentionCarry,
  KVCache,
  exchange_halo,
  slide_window,
  starts_before,
)
from valkyrie.models.attention.rotary import Rotary, Windows, rotate, windows
from valkyrie.models.attention.softmax import Dropout, Part
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array

Angles = tuple[np.ndarray, np.ndarray]


class Queries(NamedTuple):
  """The queries of S tokens [B, S, H, K], and the tokens' positions and documents [B, S]."""

  q: Array
  positions: Array
  segment_ids: Array


class Slice(NamedTuple):
  """The queries of a slice, and the keys and values that they read.

  near: the slice's own tokens, last, and the tokens before it within reach of its windows.
  starts: the document's first tokens as they stand before the slice.
  skipped: for a dilated window, which skips tokens: all tokens of the slice, and their positions.
  """

  queries: Queries
  near: KVCache
  starts: KVCache
  skipped: tuple[KVCache, Array] | None
  dropout: Dropout | None


def _global_part(
  now: Slice, angles: Angles, registers: tuple[Array, Array], seen: Windows
) -> Part | None:
  """The registers and the document starts outside the window, all at the window's edge."""
  queries, starts, reach = now.queries, now.starts, seen.width * seen.dilation
  slots, count = starts.keys.shape[1], registers[0].shape[0]
  if not count + slots:
    return None
  distance = queries.positions[:, :, None] - np.arange(slots)[None, None]
  if now.skipped is not None:
    inside, positions = now.skipped
    first = jnp.where(positions < slots, inside.segment_ids, 0)
    starts = jax.tree.map(
      lambda *x: jnp.concatenate(x, axis=1), starts, inside._replace(segment_ids=first)
    )
    from_inside = queries.positions[:, :, None] - positions[:, None, :]
    distance = jnp.concatenate([distance, from_inside], axis=2)
  outside = distance > reach
  if seen.dilation > 1:
    outside |= (distance > 0) & (distance % seen.dilation > 0)
  visible = outside & (queries.segment_ids[:, :, None] == starts.segment_ids[:, None, :])
  register_keys, register_values = (
    jnp.broadcast_to(part, (len(queries.q), *part.shape)).astype(starts.keys.dtype)
    for part in registers
  )
  keys = jnp.concatenate([register_keys, starts.keys], axis=1)
  # A score depends on the difference of two coordinates, so the keys are rotated backwards instead
  # of the queries forwards: without dilation they are few.
  cos, sin = angles
  edge = cos[seen.width : seen.width + 1], -sin[seen.width : seen.width + 1]
  values = jnp.concatenate([register_values, starts.values], axis=1)
  mask = jnp.pad(visible, ((0, 0), (0, 0), (count, 0)), constant_values=True)
  return Part.of(queries.q, rotate(keys, *edge), values, mask)


def _attend_slice(now: Slice, registers: tuple[Array, Array], seen: Windows) -> Array:
  """The slice's queries over their windows and their global keys -> [B, S, H, K]."""
  q, near, documents = now.queries.q, now.near, now.queries.segment_ids
  size, length = q.shape[1], near.keys.shape[1]
  now = now._replace(queries=now.queries._replace(q=q * q.shape[-1] ** -0.5))
  cos, sin = angles = seen.rotary.angles(length, q.shape[-1], seen.dilation)
  # The queries are the last S of the coordinates; a key is at most W steps before its query.
  steps = np.arange(length - size, length)[:, None] - np.arange(length)[None]
  same = documents[:, :, None] == near.segment_ids[:, None, :]
  window = Part.of(
    rotate(now.queries.q, cos[-size:], sin[-size:]),
    rotate(near.keys, cos, sin),
    near.values,
    same & ((steps >= 0) & (steps <= seen.width))[None],
  )
  far = _global_part(now, angles, registers, seen)
  out, _ = softmax.attend((window,) if far is None else (window, far), now.dropout)
  return softmax.ungroup_queries(out.astype(q.dtype), q.shape[2])


def _attend_heads(
  q: Array,
  tokens: KVCache,
  length: Array,
  carry: AttentionCarry,
  positions: Array,
  registers: tuple[Array, Array],
  seen: Windows,
  dropout: Dropout | None,
) -> tuple[Array, KVCache]:
  """Heads of one dilation over a chunk -> (out [B, T, H, K], the starts after `length` [B])."""
  (batch, time, heads, _), slots = q.shape, carry.starts.segment_ids.shape[1]
  window, d = seen.width, seen.dilation
  # At most W, so that a document which starts inside a slice is wholly inside the window of the
  # slice's last query.
  size = max(1, min(seen.slice_size // d, window, -(-time // d)))

  def sliced(x):
    return slices.cut(slices.split_residues(x, d), size)

  def with_reach(old, new):
    """Each slice with the whole slices before it within reach of a window."""
    old = slices.split_residues(old[:, old.shape[1] - window * d :], d)
    back = -(-window // size)
    padding = jnp.zeros((old.shape[0], back * size - window, *old.shape[2:]), old.dtype)
    row = jnp.concatenate([padding, old, slices.split_residues(new, d)], axis=1)
    return slices.overlapping(row, size, back + 1)

  queries = jax.tree.map(sliced, Queries(q, positions, tokens.segment_ids))
  near = jax.tree.map(with_reach, carry.window, tokens)
  count = queries.q.shape[0]
  begins = jnp.broadcast_to(size * d * jnp.arange(count)[None], (batch, count))
  ends = jnp.concatenate([begins, length[:, None]], axis=1)
  starts, _ = starts_before(carry.starts, tokens, positions, ends)

  def for_each_residue(x):
    return jnp.repeat(x, d, axis=1) if d > 1 else x

  before = jax.tree.map(lambda x: for_each_residue(jnp.moveaxis(x[:, :-1], 1, 0)), starts)
  after = jax.tree.map(lambda x: x[:, -1], starts)
  skipped = None
  if d > 1 and slots:
    skipped = jax.tree.map(lambda x: for_each_residue(slices.cut(x, size * d)), (tokens, positions))
  draws = None if dropout is None else jax.vmap(dropout.of)(jnp.arange(count))

  out = slices.for_each(
    lambda one: _attend_slice(one, registers, seen),
    Slice(queries, near, before, skipped, draws),
    logits=batch * d * heads * size * near.keys.shape[2],
  )
  return slices.merge_residues(slices.join(out, -(-time // d)), d, time), after


@jax.named_scope('attention')
def sliding_window_attention(
  q: Array,
  k: Array,
  v: Array,
  carry: AttentionCarry,
  *,
  positions: Array,
  segment_ids: Array,
  registers: tuple[Array, Array],
  slice_size: int,
  dilations: Sequence[int],
  rotary: Rotary,
  dropout: Dropout | None = None,
) -> tuple[Array, AttentionCarry]:
  """Causal attention of a token to its own document: itself, the W tokens before it, the globals.

  Args:
    q: [B, T, H, K]; k, v: [B, T, J, K]; all unrotated.
    carry: of the chunk before; its shapes give g, and W times the largest dilation.
    positions, segment_ids: int32 [B, T], see `types.Batch`.
    registers: learned keys and values, each [R, J, K], that every query reads.
    slice_size: S, queries that share one set of keys, at most W; if it divides W, every key read is
      visible to some query.
    dilations: d of each of the J key-value heads, which see the distances d, 2d, ..., Wd.

  Returns:
    (out [B, T, H, K], the carry after the last token that is not padding). Rows of padding hold
    finite, meaningless numbers.
  """
  tokens = KVCache(k, v, segment_ids)
  length = jnp.sum(segment_ids > 0, axis=1)  # padding does not enter the carry
  after_chunk = None
  if sequence_parallel.axes():
    carry, after_chunk = exchange_halo(carry, tokens, positions, length)
  group = q.shape[2] // k.shape[2]
  width = carry.window.segment_ids.shape[1] // max(dilations)
  outs, starts = [], []
  for number, seen in enumerate(windows(dilations, width, slice_size, rotary)):
    run = seen.heads
    out, started = _attend_heads(
      q[:, :, group * run.start : group * run.stop],
      tokens.of_heads(run),
      length,
      AttentionCarry(carry.window.of_heads(run), carry.starts.of_heads(run)),
      positions,
      (registers[0][:, run], registers[1][:, run]),
      seen,
      dropout and dropout.of(number),
    )
    outs.append(out)
    starts.append(started)
  out = jnp.concatenate(outs, axis=2)
  if after_chunk is not None:
    return out, after_chunk
  after = KVCache(
    jnp.concatenate([started.keys for started in starts], axis=2),
    jnp.concatenate([started.values for started in starts], axis=2),
    starts[0].segment_ids,
  )
  return out, AttentionCarry(slide_window(carry.window, tokens, length), after)
