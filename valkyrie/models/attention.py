"""Sliding-window attention as a recurrence over slices of time (Longformer, Beltagy et al. 2020).

A slice of S queries reads the S keys beside it, the W keys before it, and G global keys: learned
registers, and the first tokens of the query's own document. What one slice hands to the next is
what one chunk hands to the next, so cost and memory are linear in time, a chunk of one token is
decoding, and where chunks are cut changes nothing.

Arrays in, arrays out. q [B, T, H, K]; k, v [B, T, J, K] with J dividing H (grouped queries).
Positions are rotary (Su et al. 2021) in coordinates local to a slice: keys are carried unrotated,
and no angle exceeds (W + S) whatever the length of the document.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.types import Array, DType

_MASKED = -1e30  # finite, so that a masked logit has a gradient of zero and not of NaN


class AttentionCarry(NamedTuple):
  """What attention remembers of a row.

  keys, values: [B, W, J, K], the last W tokens, oldest first, unrotated.
  segment_ids: int32 [B, W], their documents; 0 where there was no token yet.
  start_keys, start_values: [B, g, J, K], slot j holds token j of a document.
  start_segment_ids: int32 [B, g], the document that each slot belongs to; 0 while empty.
  """

  keys: Array
  values: Array
  segment_ids: Array
  start_keys: Array
  start_values: Array
  start_segment_ids: Array


def empty_carry(
  batch_size: int, window: int, starts: int, kv_heads: int, head_width: int, dtype: DType
) -> AttentionCarry:
  """The carry before a row's first token."""

  def keys(n):
    return jnp.zeros((batch_size, n, kv_heads, head_width), dtype)

  def segments(n):
    return jnp.zeros((batch_size, n), jnp.int32)

  return AttentionCarry(
    keys(window), keys(window), segments(window), keys(starts), keys(starts), segments(starts)
  )


def _wide(x: Array) -> DType:
  """The dtype of logits, softmax and rotation: float32, or x's own where that is wider."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _angles(length: int, width: int) -> tuple[np.ndarray, np.ndarray]:
  """cos and sin [length, K/2] of RoPE's angles at coordinates 0, 1, ..., in float64."""
  frequency = 10_000.0 ** -(np.arange(width // 2) / (width // 2))
  angle = np.arange(length)[:, None] * frequency
  return np.cos(angle), np.sin(angle)


def _rotate(x: Array, cos: np.ndarray, sin: np.ndarray) -> Array:
  """Rotates the halves of x [B, S, heads, K] by the angles of each position [S, K/2]."""
  first, second = jnp.split(x.astype(_wide(x)), 2, axis=-1)
  cos, sin = (jnp.asarray(part[None, :, None], first.dtype) for part in (cos, sin))
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x.dtype)


class _Slice(NamedTuple):
  """S consecutive tokens: what a step of the recurrence reads."""

  q: Array
  k: Array
  v: Array
  positions: Array
  segment_ids: Array


def _read(now: _Slice, carry: AttentionCarry, registers: tuple[Array, Array]) -> Array:
  """One softmax for each query over its window and its global keys -> [B, S, H, K]."""
  batch, size, heads, width = now.q.shape
  window, kv_heads = carry.keys.shape[1:3]
  cos, sin = _angles(window + size, width)

  def grouped(q):
    return q.reshape(batch, size, kv_heads, heads // kv_heads, width)

  def scores(q, k):
    logits = jnp.einsum('bsjgk,btjk->bjgst', q, k, preferred_element_type=_wide(q))
    return logits * width**-0.5

  # The window: query s stands at coordinate W + s and sees coordinates s to W + s of its document.
  keys = _rotate(jnp.concatenate([carry.keys, now.k], axis=1), cos, sin)
  values = jnp.concatenate([carry.values, now.v], axis=1)
  documents = jnp.concatenate([carry.segment_ids, now.segment_ids], axis=1)
  ahead = np.arange(window + size)[None] - np.arange(size)[:, None]
  near = (ahead >= 0) & (ahead <= window)
  same = now.segment_ids[:, :, None] == documents[:, None, :]
  logits = scores(grouped(_rotate(now.q, cos[window:], sin[window:])), keys)
  logits = jnp.where((near[None] & same)[:, None, None], logits, _MASKED)

  # The globals are read as if at distance W, and a document's first tokens only where the window
  # no longer reaches them: each key once.
  register_keys, register_values = (
    jnp.broadcast_to(part, (batch, *part.shape)).astype(now.k.dtype) for part in registers
  )
  global_keys = jnp.concatenate([register_keys, carry.start_keys], axis=1)
  if global_keys.shape[1]:
    own = now.segment_ids[:, :, None] == carry.start_segment_ids[:, None, :]
    starts = np.arange(carry.start_keys.shape[1])
    seen = own & (now.positions[:, :, None] - starts[None, None] > window)
    seen = jnp.pad(seen, ((0, 0), (0, 0), (register_keys.shape[1], 0)), constant_values=True)
    far = slice(window, window + 1)
    global_logits = scores(grouped(_rotate(now.q, cos[far], sin[far])), global_keys)
    global_logits = jnp.where(seen[:, None, None], global_logits, _MASKED)
    logits = jnp.concatenate([global_logits, logits], axis=-1)
    values = jnp.concatenate([register_values, carry.start_values, values], axis=1)

  # Dividing the result, [S, K], and not the weights, [S, G + W + S], saves a pass over the latter.
  weights = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
  total = jnp.sum(weights, axis=-1)
  weights = weights.astype(values.dtype)
  out = jnp.einsum('bjgst,btjk->bsjgk', weights, values, preferred_element_type=_wide(values))
  out = out / jnp.moveaxis(total, 3, 1)[..., None]
  return out.reshape(now.q.shape).astype(now.q.dtype)


def _remember_starts(now: _Slice, carry: AttentionCarry) -> AttentionCarry:
  """Files the slice's document starts: of several documents in it, only the last goes on."""
  slots = np.arange(carry.start_keys.shape[1])[None, :, None]
  newest = jnp.max(now.segment_ids, axis=1)[:, None]
  in_newest = (now.segment_ids == newest) & (newest > 0)
  filed = (now.positions[:, None, :] == slots) & in_newest[:, None, :]
  found = jnp.any(filed, axis=2)

  def file(old, new):
    picked = jnp.einsum('bgs,bsjk->bgjk', filed.astype(new.dtype), new)
    return jnp.where(found[..., None, None], picked, old)

  # A slot that an older document filled needs no clearing: no later query has its segment id.
  return carry._replace(
    start_keys=file(carry.start_keys, now.k),
    start_values=file(carry.start_values, now.v),
    start_segment_ids=jnp.where(found, newest, carry.start_segment_ids),
  )


def _last(window: int, before: Array, now: Array, length: Array) -> Array:
  """The last W entries of `before` [B, W, ...] followed by the first `length` [B] of `now`."""
  both = jnp.concatenate([before, now], axis=1)
  return jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, window))(both, length)


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
) -> tuple[Array, AttentionCarry]:
  """Causal attention to a token's own document: itself, the W before it, and the globals.

  Args:
    q: [B, T, H, K]; k, v: [B, T, J, K]; all unrotated.
    carry: what the chunk before left; W and g are read off its shapes.
    positions: int32 [B, T], within the document.
    segment_ids: int32 [B, T], 0 on padding, which stands at the end.
    registers: learned keys and values, each [R, J, K], that every query reads.
    slice_size: S, queries of one step; at most W, so that a document which starts inside a slice
      is still wholly inside the window of the slice's last query.

  Returns:
    (out [B, T, H, K], the carry after the last token that is not padding). Rows of padding hold
    finite numbers that mean nothing.
  """
  time, window = q.shape[1], carry.keys.shape[1]
  size = min(slice_size, window, time)
  count = -(-time // size)

  def slices(x):
    padded = jnp.pad(x, ((0, 0), (0, count * size - time)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def step(carry, now):
    out = _read(now, carry, registers)
    carry = _remember_starts(now, carry)
    recent = (
      jnp.concatenate([old, new], axis=1)[:, size:]
      for old, new in zip(carry[:3], (now.k, now.v, now.segment_ids), strict=True)
    )
    return AttentionCarry(*recent, *carry[3:]), out

  whole = _Slice(q, k, v, positions, segment_ids)
  after, out = lax.scan(step, carry, _Slice(*map(slices, whole)))
  out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], count * size, *q.shape[2:])[:, :time]

  # Within the scan padding enters the window, which nothing but padding then reads. What the next
  # chunk is given is taken from the tokens themselves.
  length = jnp.sum(segment_ids > 0, axis=1)
  recent = (
    _last(window, old, new, length) for old, new in zip(carry[:3], (k, v, segment_ids), strict=True)
  )
  return out, AttentionCarry(*recent, *after[3:])
