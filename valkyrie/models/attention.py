"""Sliding-window attention as a recurrence over slices of time (Longformer, Beltagy et al. 2020).

A slice of S queries reads the S keys beside it, the W keys before it, and G global keys: learned
registers, and the first tokens of the query's own document. What one slice hands to the next is
what one chunk hands to the next, so cost and memory are linear in time, a chunk of one token is
decoding, and where chunks are cut changes nothing.

Arrays in, arrays out. q [B, T, H, K]; k, v [B, T, J, K] with J dividing H (grouped queries).
Positions are rotary (Su et al. 2021) in coordinates local to a slice: keys are carried unrotated,
and no angle exceeds (W + S) whatever the length of the document.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.types import Array, DType

_MASKED = -1e30  # finite, so that a masked logit has a gradient of zero and not of NaN


class Memory(NamedTuple):
  """Keys and values [B, N, J, K] of tokens, unrotated, and the documents that they belong to.

  segment_ids: int32 [B, N]; 0 where there is no token yet.
  """

  keys: Array
  values: Array
  segment_ids: Array


class AttentionCarry(NamedTuple):
  """What attention remembers of a row.

  window: its last W tokens, oldest first.
  starts: in slot j of g, token j of a document.
  """

  window: Memory
  starts: Memory


def empty_carry(
  batch_size: int, window: int, starts: int, kv_heads: int, head_width: int, dtype: DType
) -> AttentionCarry:
  """The carry before a row's first token."""

  def empty(slots: int) -> Memory:
    nothing = jnp.zeros((batch_size, slots, kv_heads, head_width), dtype)
    return Memory(nothing, nothing, jnp.zeros((batch_size, slots), jnp.int32))

  return AttentionCarry(empty(window), empty(starts))


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
  c, s = (jnp.asarray(part[None, :, None], first.dtype) for part in (cos, sin))
  rotated = jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)
  return rotated.astype(x.dtype)


class _Slice(NamedTuple):
  """S consecutive tokens: what a step of the recurrence reads."""

  q: Array
  k: Array
  v: Array
  positions: Array
  segment_ids: Array


class _Part(NamedTuple):
  """Queries [B, J, Q, K], keys and values [B, J, N, K], and which query sees which: [B, S, N].

  The Q queries of a head group are its heads' S queries one after the other; `seen` is theirs all.
  """

  q: Array
  k: Array
  v: Array
  seen: Any  # bool, and None for its cotangent: there is none


def _logits(part: _Part) -> Array:
  """The masked scores of a part: [B, J, Q, N] in the wide dtype."""
  scores = jnp.einsum('bjqk,bjnk->bjqn', part.q, part.k, preferred_element_type=_wide(part.q))
  batch, kv_heads, queries, keys = scores.shape
  grouped = scores.reshape(batch, kv_heads, -1, part.seen.shape[1], keys)
  masked = jnp.where(part.seen[:, None, None], grouped, _MASKED)
  return masked.reshape(batch, kv_heads, queries, keys)


@jax.custom_vjp
def _attend(parts: tuple[_Part, ...]) -> Array:
  """One softmax over the keys of all parts: the weighted values [B, J, Q, K], wide."""
  return _attend_forward(parts)[0]


def _attend_forward(parts):
  logits = [_logits(part) for part in parts]
  largest = functools.reduce(
    jnp.maximum, [jnp.max(scores, axis=-1, keepdims=True) for scores in logits]
  )
  total, out = jnp.zeros_like(largest), jnp.zeros_like(parts[0].q, largest.dtype)
  for part, scores in zip(parts, logits, strict=True):
    weights = jnp.exp(scores - largest)
    total += jnp.sum(weights, axis=-1, keepdims=True)
    out += jnp.einsum(
      'bjqn,bjnk->bjqk', weights.astype(part.v.dtype), part.v, preferred_element_type=out.dtype
    )
  # Dividing the sum, [Q, K], and not the weights, [Q, N], saves a pass over the latter.
  out = checkpoint_name(out / total, 'attention')
  log_total = checkpoint_name(largest + jnp.log(total), 'attention')
  return out, (parts, out, log_total)


def _attend_backward(residuals, gradient):
  """From out and log_total alone, both kept, the weights are exp(logits - log_total).

  (Dao et al. 2022, FlashAttention, algorithm 4: nothing of the size [Q, N] is kept.)
  """
  parts, out, log_total = residuals
  own = jnp.sum(gradient * out, axis=-1, keepdims=True)
  cotangents = []
  for part in parts:
    narrow, wide = part.v.dtype, gradient.dtype
    weights = jnp.exp(_logits(part) - log_total)
    d_weights = jnp.einsum(
      'bjqk,bjnk->bjqn', gradient.astype(narrow), part.v, preferred_element_type=wide
    )
    d_scores = (weights * (d_weights - own)).astype(narrow)
    d_q = jnp.einsum('bjqn,bjnk->bjqk', d_scores, part.k)
    d_k = jnp.einsum('bjqn,bjqk->bjnk', d_scores, part.q)
    d_v = jnp.einsum('bjqn,bjqk->bjnk', weights.astype(narrow), gradient.astype(narrow))
    cotangents.append(_Part(d_q, d_k, d_v, None))
  return (tuple(cotangents),)


_attend.defvjp(_attend_forward, _attend_backward)


def _read(now: _Slice, carry: AttentionCarry, registers: tuple[Array, Array]) -> Array:
  """The slice's queries over their windows and their global keys -> [B, S, H, K]."""
  batch, size, heads, width = now.q.shape
  window, kv_heads = carry.window.keys.shape[1:3]
  starts = carry.starts.keys.shape[1]
  cos, sin = _angles(window + size, width)

  def queries(at: slice) -> Array:
    """The queries as if they stood at these coordinates, scaled: [B, J, H/J · S, K]."""
    q = _rotate(now.q, cos[at], sin[at]) * width**-0.5
    grouped = q.reshape(batch, size, kv_heads, heads // kv_heads, width)
    return jnp.einsum('bsjgk->bjgsk', grouped).reshape(batch, kv_heads, -1, width)

  def heads_first(*pieces: Array) -> Array:
    return jnp.swapaxes(jnp.concatenate(pieces, axis=1), 1, 2)

  # The window: query s stands at coordinate W + s and sees coordinates s to W + s of its document.
  ahead = np.arange(window + size)[None] - np.arange(size)[:, None]
  near = (ahead >= 0) & (ahead <= window)
  documents = jnp.concatenate([carry.window.segment_ids, now.segment_ids], axis=1)
  same = now.segment_ids[:, :, None] == documents[:, None, :]
  keys = jnp.concatenate([carry.window.keys, now.k], axis=1)
  parts = [
    _Part(
      queries(slice(window, None)),
      heads_first(_rotate(keys, cos, sin)),
      heads_first(carry.window.values, now.v),
      near[None] & same,
    )
  ]

  # The globals are read as if at distance W, and a document's first tokens only where the window
  # no longer reaches them: each key once.
  register_keys, register_values = (
    jnp.broadcast_to(part, (batch, *part.shape)).astype(now.k.dtype) for part in registers
  )
  if register_keys.shape[1] + starts:
    own = now.segment_ids[:, :, None] == carry.starts.segment_ids[:, None, :]
    beyond = now.positions[:, :, None] - np.arange(starts)[None, None] > window
    always = ((0, 0), (0, 0), (register_keys.shape[1], 0))
    parts.append(
      _Part(
        queries(slice(window, window + 1)),
        heads_first(register_keys, carry.starts.keys),
        heads_first(register_values, carry.starts.values),
        jnp.pad(own & beyond, always, constant_values=True),
      )
    )

  out = _attend(tuple(parts)).astype(now.q.dtype)
  out = out.reshape(batch, kv_heads, heads // kv_heads, size, width)
  return jnp.einsum('bjgsk->bsjgk', out).reshape(now.q.shape)


def _slide(window: Memory, now: _Slice, length: Array | int) -> Memory:
  """The window after the first `length` tokens of `now`: all of them, or [B], each row's own."""
  slots = window.keys.shape[1]

  def slide(old, new):
    both = jnp.concatenate([old, new], axis=1)
    if isinstance(length, int):
      return both[:, length : length + slots]
    return jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, slots))(both, length)

  return Memory(
    slide(window.keys, now.k),
    slide(window.values, now.v),
    slide(window.segment_ids, now.segment_ids),
  )


def _file_starts(starts: Memory, now: _Slice) -> Memory:
  """Files the slice's document starts: of several documents in it, only the last goes on."""
  slots = np.arange(starts.keys.shape[1])[None, :, None]
  newest = jnp.max(now.segment_ids, axis=1)[:, None]
  in_newest = (now.segment_ids == newest) & (newest > 0)
  filed = (now.positions[:, None, :] == slots) & in_newest[:, None, :]
  found = jnp.any(filed, axis=2)

  def file(old, new):
    picked = jnp.einsum('bgs,bsjk->bgjk', filed.astype(new.dtype), new)
    return jnp.where(found[..., None, None], picked, old)

  # A slot that an older document filled needs no clearing: no later query has its segment id.
  return Memory(
    file(starts.keys, now.k),
    file(starts.values, now.v),
    jnp.where(found, newest, starts.segment_ids),
  )


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
  time = q.shape[1]
  size = min(slice_size, carry.window.keys.shape[1], time)

  def step(before: AttentionCarry, now: _Slice):
    out = _read(now, before, registers)
    return AttentionCarry(_slide(before.window, now, size), _file_starts(before.starts, now)), out

  whole = _Slice(q, k, v, positions, segment_ids)
  after, out = lax.scan(step, carry, jax.tree.map(lambda x: slices.cut(x, size), whole))

  # Within the scan padding enters the window, which nothing but padding then reads. What the next
  # chunk is given is taken from the tokens themselves.
  length = jnp.sum(segment_ids > 0, axis=1)
  return slices.join(out, time), AttentionCarry(_slide(carry.window, whole, length), after.starts)
