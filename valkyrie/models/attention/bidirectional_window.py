"""Bidirectional window attention with global tokens (Longformer, Beltagy et al. 2020).

A token reads the W tokens before it, itself, the W tokens after it, and all global tokens of its
document: one softmax, each key once. A global token reads all of its document, through separate
queries, keys and values (§3.1). Cost and memory are linear in time. A key outside the window, or
between the tokens that a dilated window sees, is rotated to its edge.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.models.attention.rotary import Rotary, Windows, rotate, wide, windows
from valkyrie.models.attention.softmax import Dropout, Part, attend, ungroup_queries
from valkyrie.types import Array


class Projections(NamedTuple):
  """Queries [B, N, H, K], and keys and values [B, T, J, K] with J dividing H; all unrotated."""

  q: Array
  k: Array
  v: Array


def first_positions(mask: Array, limit: int) -> Array:
  """Indices of the first `limit` true elements of each row of [B, T]: int32 [B, limit], then T."""

  def of_row(row):
    return jnp.nonzero(row, size=limit, fill_value=row.shape[0])[0].astype(jnp.int32)

  return jax.vmap(of_row)(mask)


@jax.named_scope('attention')
def bidirectional_attention(
  local: Projections,
  from_global: Projections,
  *,
  segment_ids: Array,
  global_tokens: Array,
  window: int,
  dilations: Sequence[int],
  slice_size: int,
  rotary: Rotary,
  dropout: Dropout | None = None,
) -> Array:
  """Attention of every token of a row to its own document -> [B, T, H, K], zero at padding.

  Args:
    local: the projections for all tokens, N = T.
    from_global: the projections for global tokens, N = G.
    segment_ids: int32 [B, T], 0 at padding.
    global_tokens: int32 [B, G], the indices of the global tokens, as `first_positions` gives them.
    window: W, tokens on each side; a head of dilation d sees the distances d, 2d, ..., Wd.
    dilations: d of each of the J key-value heads.
    slice_size: S, the queries, or the keys of global queries, that are scored at once.
  """
  batch, group = local.q.shape[0], local.q.shape[2] // local.k.shape[2]
  outs = []
  for number, seen in enumerate(windows(dilations, window, slice_size, rotary)):
    run = seen.heads
    queries = slice(group * run.start, group * run.stop)
    mine, globally = (
      Projections(part.q[:, :, queries], part.k[:, :, run], part.v[:, :, run])
      for part in (local, from_global)
    )
    near, far = (dropout and dropout.of(2 * number + part) for part in (0, 1))
    out = _attend_windows(mine, segment_ids, global_tokens, seen, near)
    if global_tokens.shape[1]:
      read = _attend_documents(globally, segment_ids, global_tokens, seen, far)
      out = out.at[np.arange(batch)[:, None], global_tokens].set(read, mode='drop')
    outs.append(out)
  return jnp.where(segment_ids[:, :, None, None] > 0, jnp.concatenate(outs, axis=2), 0)


class _Tokens(NamedTuple):
  """Keys and values [B, N, J, K], and the tokens' documents and indices in the row, [B, N]."""

  k: Array
  v: Array
  segment_ids: Array
  at: Array


def take(x: Array, at: Array) -> Array:
  """x [B, T, ...] at the positions [B, G]; zero beyond the end."""
  index = at.reshape(*at.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1, mode='fill', fill_value=0)


def _attend_windows(
  local: Projections,
  segment_ids: Array,
  global_tokens: Array,
  seen: Windows,
  dropout: Dropout | None,
) -> Array:
  """Every token over its window and the global tokens; each residue of time is a row of its own."""
  (batch, time, heads, _), d = local.q.shape, seen.dilation
  steps = -(-time // d)
  size = max(1, min(seen.slice_size // d, steps))
  beside = -(-seen.width // size)  # whole slices within reach of a window, on each side

  def sliced(x):
    return slices.cut(slices.split_residues(x, d), size)

  def with_reach(x):
    around = ((0, 0), (beside * size, beside * size)) + ((0, 0),) * (x.ndim - 2)
    return slices.overlapping(jnp.pad(slices.split_residues(x, d), around), size, 2 * beside + 1)

  at = jnp.broadcast_to(jnp.arange(time)[None], segment_ids.shape)
  tokens = _Tokens(local.k, local.v, segment_ids, at)
  now = jax.tree.map(sliced, (local.q, segment_ids, at))
  near = jax.tree.map(with_reach, tokens)
  far = jax.tree.map(lambda x: jnp.repeat(take(x, global_tokens), d, axis=0), tokens)
  draws = None if dropout is None else jax.vmap(dropout.of)(jnp.arange(near.k.shape[0]))
  out = slices.for_each(
    lambda one: _attend_slice(*one, far=far, seen=seen),
    (*now, near, draws),
    logits=batch * d * heads * size * near.k.shape[2],
  )
  return slices.merge_residues(slices.join(out, steps), d, time)


def _attend_slice(
  q: Array,
  segment_ids: Array,
  at: Array,
  near: _Tokens,
  dropout: Dropout | None,
  far: _Tokens,
  seen: Windows,
) -> Array:
  """A slice's queries [B, S, H, K] over the tokens of their residue around it, and G far ones."""
  (_, size, heads, width), length = q.shape, near.k.shape[1]
  reach, first = seen.width * seen.dilation, (length - size) // 2
  cos, sin = seen.rotary.angles(length, width, seen.dilation)
  q = q * width**-0.5

  def rotated(x, where):
    return rotate(x, cos[where], sin[where])

  steps = np.arange(first, first + size)[:, None] - np.arange(length)[None]
  same = segment_ids[:, :, None] == near.segment_ids[:, None]
  inside = (np.abs(steps) <= seen.width)[None] & same
  queries = rotated(q, slice(first, first + size))
  parts = [Part.of(queries, rotated(near.k, slice(None)), near.v, inside)]

  # A global token outside the window is rotated to the edge on its side.
  if far.k.shape[1]:
    edge = slice(seen.width, seen.width + 1)
    ahead = at[:, :, None] - far.at[:, None]
    outside = (jnp.abs(ahead) > reach) | (ahead % seen.dilation != 0)
    visible = outside & (segment_ids[:, :, None] == far.segment_ids[:, None])
    parts += [
      Part.of(rotated(q, edge), far.k, far.v, visible & (ahead > 0)),
      Part.of(q, rotated(far.k, edge), far.v, visible & (ahead < 0)),
    ]
  out, _ = attend(tuple(parts), dropout)
  return ungroup_queries(out.astype(q.dtype), heads)


def _attend_documents(
  from_global: Projections,
  segment_ids: Array,
  global_tokens: Array,
  seen: Windows,
  dropout: Dropout | None,
) -> Array:
  """Every global token over all of its document -> [B, G, H, K]."""
  batch, chosen, heads, width = from_global.q.shape
  reach, size = seen.width * seen.dilation, min(seen.slice_size, segment_ids.shape[1])
  q, own = from_global.q * width**-0.5, take(segment_ids, global_tokens)
  cos, sin = seen.rotary.angles(2 * reach + size, width)
  tables = [jnp.asarray(table, wide(q)) for table in (cos, sin)]

  def rotated(x, where):
    return rotate(x, cos[where], sin[where])

  def attend_slice(now):
    k, v, documents, number = now
    # The slice's first key is at coordinate 0; far queries are clipped, since no key is then
    # inside.
    coordinate = global_tokens - number * size
    row = reach + jnp.clip(coordinate, -reach, size - 1 + reach)
    ahead = coordinate[:, :, None] - np.arange(size)[None, None]
    visible = own[:, :, None] == documents[:, None]
    inside, edge = slice(reach, reach + size), slice(reach, reach + 1)
    near = rotate(q, *(table[row] for table in tables))
    parts = (
      Part.of(near, rotated(k, inside), v, visible & (jnp.abs(ahead) <= reach)),
      Part.of(rotated(q, edge), k, v, visible & (ahead > reach)),
      Part.of(q, rotated(k, edge), v, visible & (ahead < -reach)),
    )
    return attend(parts, dropout and dropout.of(number))

  keys, values, documents = (
    slices.cut(x, size) for x in (from_global.k, from_global.v, segment_ids)
  )
  outs, log_totals = slices.for_each(
    attend_slice,
    (keys, values, documents, jnp.arange(len(keys))),
    logits=3 * batch * chosen * heads * size,
  )
  # Each slice of keys has its own softmax; the denominators give each slice's share.
  out = jnp.sum(jax.nn.softmax(log_totals, axis=0) * outs, axis=0)
  return ungroup_queries(out.astype(q.dtype), heads)
