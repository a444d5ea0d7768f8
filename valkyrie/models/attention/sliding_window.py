"""Sliding-window attention in slices of time (Longformer, Beltagy et al. 2020).

A slice of S queries reads its own S keys, the slices before it that its windows reach into, and G
global keys: learned registers, and the first tokens of the query's own document. The slices before
a chunk's first come from the carry, so cost and memory are linear in time, a chunk of one token is
decoding, and where chunks are cut changes nothing.

Arrays in, arrays out. q [B, T, H, K]; k, v [B, T, J, K] with J dividing H (grouped queries).
Positions are rotary (Su et al. 2021) in coordinates local to a slice: keys are carried unrotated,
and no angle exceeds (W + 2 S) whatever the length of the document. A head of dilation d sees the
distances d, 2d, ..., Wd: its phases of time are rows of their own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.models.attention import halo, rotary
from valkyrie.models.attention.dilation import interleaved, phases, runs
from valkyrie.models.attention.kv_cache import AttentionCarry, Memory, slide, starts_before
from valkyrie.models.attention.softmax import Dropout, Part, attend, keys_of, of_queries, queries_of
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array


class _Queries(NamedTuple):
  """Those of a slice of S tokens [B, S, H, K], and where in which document they stand [B, S]."""

  q: Array
  positions: Array
  segment_ids: Array


def _read(
  now: _Queries,
  near: Memory,
  starts: Memory,
  between: tuple[Memory, Array] | None,
  dropout: Dropout | None,
  *,
  registers: tuple[Array, Array],
  window: int,
  dilation: int,
) -> Array:
  """The slice's queries over their windows and their global keys -> [B, S, H, K].

  near: the slice's own tokens, last, and those of the slices before it that its windows reach into.
  starts: the document's first tokens as they stand before the slice.
  between: where a dilated window leaves tokens out, all of the slice, and their positions.
  """
  batch, size, heads, width = now.q.shape
  length, kv_heads = near.keys.shape[1:3]
  cos, sin = rotary.angles(length, width, dilation)
  q = now.q * width**-0.5

  # The window: the queries stand at the last S coordinates, and see W back in their own document.
  steps = np.arange(length - size, length)[:, None] - np.arange(length)[None]
  same = now.segment_ids[:, :, None] == near.segment_ids[:, None, :]
  parts = [
    Part(
      queries_of(rotary.rotate(q, cos[-size:], sin[-size:]), kv_heads),
      keys_of(rotary.rotate(near.keys, cos, sin)),
      keys_of(near.values),
      ((steps >= 0) & (steps <= window))[None] & same,
    )
  ]

  # The globals are read as if at the window's edge, and a document's first tokens only where the
  # window does not show them: each key once. It is the keys that are turned, backwards: they are
  # few, where no dilation leaves tokens out.
  register_keys, register_values = (
    jnp.broadcast_to(part, (batch, *part.shape)).astype(near.keys.dtype) for part in registers
  )
  slots = starts.keys.shape[1]
  if register_keys.shape[1] + slots:
    distance = now.positions[:, :, None] - np.arange(slots)[None, None]
    if between is not None:
      inside, positions = between
      first = jnp.where(positions < slots, inside.segment_ids, 0)
      starts = jax.tree.map(
        lambda *x: jnp.concatenate(x, axis=1), starts, inside._replace(segment_ids=first)
      )
      away = now.positions[:, :, None] - positions[:, None, :]
      distance = jnp.concatenate([distance, away], axis=2)
    hidden = distance > window * dilation
    if dilation > 1:
      hidden |= (distance > 0) & (distance % dilation > 0)
    own = now.segment_ids[:, :, None] == starts.segment_ids[:, None, :]
    always = ((0, 0), (0, 0), (register_keys.shape[1], 0))
    edge = cos[window : window + 1], -sin[window : window + 1]
    keys = jnp.concatenate([register_keys, starts.keys], axis=1)
    parts.append(
      Part(
        queries_of(q, kv_heads),
        keys_of(rotary.rotate(keys, *edge)),
        keys_of(jnp.concatenate([register_values, starts.values], axis=1)),
        jnp.pad(own & hidden, always, constant_values=True),
      )
    )

  out, _ = attend(tuple(parts), dropout)
  return of_queries(out.astype(now.q.dtype), heads)


def _read_heads(
  q: Array,
  tokens: Memory,
  length: Array,
  carry: AttentionCarry,
  positions: Array,
  registers: tuple[Array, Array],
  *,
  window: int,
  dilation: int,
  slice_size: int,
  dropout: Dropout | None,
) -> tuple[Array, Memory]:
  """Heads of one dilation over a chunk: (out [B, T, H, K], the document starts after `length` [B]).

  The phases of a dilated window are rows of their own. A slice of each is S steps, S · d tokens.
  """
  (batch, time, heads, _), slots = q.shape, carry.starts.segment_ids.shape[1]
  size = max(1, min(slice_size // dilation, window, -(-time // dilation)))

  def sliced(x):
    return slices.cut(phases(x, dilation), size)

  def with_reach(old, new):
    """Each slice and the whole slices before it that a window can reach into."""
    old = phases(old[:, old.shape[1] - window * dilation :], dilation)
    back = -(-window // size)
    nothing = jnp.zeros((old.shape[0], back * size - window, *old.shape[2:]), old.dtype)
    row = jnp.concatenate([nothing, old, phases(new, dilation)], axis=1)
    return slices.overlapping(row, size, back + 1)

  now = jax.tree.map(sliced, _Queries(q, positions, tokens.segment_ids))
  near = jax.tree.map(with_reach, carry.window, tokens)
  count = now.q.shape[0]
  begins = jnp.broadcast_to(size * dilation * jnp.arange(count)[None], (batch, count))
  ends = jnp.concatenate([begins, length[:, None]], axis=1)
  starts = starts_before(carry.starts, tokens, positions, ends)

  def for_each_phase(x):
    return jnp.repeat(x, dilation, axis=1) if dilation > 1 else x

  before = jax.tree.map(lambda x: for_each_phase(jnp.moveaxis(x[:, :-1], 1, 0)), starts)
  after = jax.tree.map(lambda x: x[:, -1], starts)
  between = None
  if dilation > 1 and slots:
    between = jax.tree.map(
      lambda x: for_each_phase(slices.cut(x, size * dilation)), (tokens, positions)
    )
  draws = None if dropout is None else jax.vmap(dropout.of)(jnp.arange(count))

  out = slices.for_each(
    lambda one: _read(*one, registers=registers, window=window, dilation=dilation),
    (now, near, before, between, draws),
    logits=batch * dilation * heads * size * near.keys.shape[2],
  )
  steps = slices.join(out, -(-time // dilation))
  return interleaved(steps, dilation, time), after


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
  dropout: Dropout | None = None,
) -> tuple[Array, AttentionCarry]:
  """Causal attention to a token's own document: itself, the W before it, and the globals.

  Args:
    q: [B, T, H, K]; k, v: [B, T, J, K]; all unrotated.
    carry: what the chunk before left, of which the window is W times the largest dilation; W and
      g are read off its shapes.
    positions: int32 [B, T], within the document.
    segment_ids: int32 [B, T], 0 on padding, which stands at the end.
    registers: learned keys and values, each [R, J, K], that every query reads.
    slice_size: S, queries that share one set of keys; at most W, so that a document which starts
      inside a slice is still wholly inside the window of the slice's last query. Where S divides
      W, no key is read for nothing.
    dilations: d of each of the J key-value heads.
    dropout: of attention weights; None for none.

  Returns:
    (out [B, T, H, K], the carry after the last token that is not padding). Rows of padding hold
    finite numbers that mean nothing.
  """
  tokens = Memory(k, v, segment_ids)
  length = jnp.sum(segment_ids > 0, axis=1)  # padding leaves no trace in what is carried
  after_chunk = None
  if sequence_parallel.axes():
    carry, after_chunk = halo.pass_on(carry, tokens, positions, length)
  group = q.shape[2] // k.shape[2]
  outs, starts = [], []
  for number, (dilation, run) in enumerate(runs(dilations)):
    out, started = _read_heads(
      q[:, :, group * run.start : group * run.stop],
      tokens.of(run),
      length,
      AttentionCarry(carry.window.of(run), carry.starts.of(run)),
      positions,
      (registers[0][:, run], registers[1][:, run]),
      window=carry.window.segment_ids.shape[1] // max(dilations),
      dilation=dilation,
      slice_size=slice_size,
      dropout=dropout and dropout.of(number),
    )
    outs.append(out)
    starts.append(started)
  out = jnp.concatenate(outs, axis=2)
  if after_chunk is not None:
    return out, after_chunk
  after = Memory(
    jnp.concatenate([started.keys for started in starts], axis=2),
    jnp.concatenate([started.values for started in starts], axis=2),
    starts[0].segment_ids,
  )
  window = slide(carry.window, tokens, length)
  return out, AttentionCarry(window, after)
