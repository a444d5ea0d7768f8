"""Window attention to both sides, with designated global tokens (Longformer, Beltagy et al. 2020).

A token reads the W tokens before it, itself and the W after it, and the designated tokens of its
document wherever they stand: one softmax, each key once. A designated token reads all of its
document, through queries, keys and values of its own (§3.1). Cost and memory are linear in time.

Arrays in, arrays out. Positions are rotary; a token that is read from beyond the window, or from
between the tokens that a dilated window sees, is read as if it stood at the window's edge.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.models.attention import rotary
from valkyrie.models.attention.dilation import interleaved, phases, runs
from valkyrie.models.attention.softmax import Dropout, Part, attend, keys_of, of_queries, queries_of
from valkyrie.types import Array


class Projections(NamedTuple):
  """Queries [B, N, H, K], and keys and values [B, T, J, K] with J dividing H; all unrotated."""

  q: Array
  k: Array
  v: Array


def first_designated(mask: Array, limit: int) -> Array:
  """Where the first `limit` true elements of each row of bool [B, T] are: int32 [B, G = limit].

  A row that has fewer is filled up with T.
  """

  def of_row(row):
    return jnp.nonzero(row, size=limit, fill_value=row.shape[0])[0].astype(jnp.int32)

  return jax.vmap(of_row)(mask)


def bidirectional_attention(
  local: Projections,
  from_global: Projections,
  *,
  segment_ids: Array,
  designated: Array,
  window: int,
  dilations: Sequence[int],
  slice_size: int,
  dropout: Dropout | None = None,
) -> Array:
  """Attention of every token of a row to its own document.

  Args:
    local: what all tokens read through: q [B, T, H, K]; k, v [B, T, J, K].
    from_global: what designated tokens read through: their q [B, G, H, K]; k, v [B, T, J, K].
    segment_ids: int32 [B, T], 0 on padding.
    designated: int32 [B, G], where the global tokens stand, as `first_designated` gives it.
    window: W, how many tokens it sees on each side; of a head of dilation d, those at the
      distances d, 2d, ..., Wd.
    dilations: d of each of the J key-value heads.
    slice_size: S, queries, and keys of the designated ones, that are held against each other at
      once.
    dropout: of attention weights; None for none.

  Returns:
    [B, T, H, K]; zero on padding.
  """
  batch, group = local.q.shape[0], local.q.shape[2] // local.k.shape[2]
  outs = []
  for number, (dilation, run) in enumerate(runs(dilations)):
    queries = slice(group * run.start, group * run.stop)
    mine, globally = (
      Projections(part.q[:, :, queries], part.k[:, :, run], part.v[:, :, run])
      for part in (local, from_global)
    )
    how = _How(window, dilation, slice_size)
    windows, documents = (dropout and dropout.of(2 * number + part) for part in (0, 1))
    out = _read_windows(mine, segment_ids, designated, how, windows)
    if designated.shape[1]:
      read = _read_documents(globally, segment_ids, designated, how, documents)
      out = out.at[np.arange(batch)[:, None], designated].set(read, mode='drop')
    outs.append(out)
  return jnp.where(segment_ids[:, :, None, None] > 0, jnp.concatenate(outs, axis=2), 0)


class _How(NamedTuple):
  """Of heads that share a dilation: W, d and S."""

  window: int
  dilation: int
  slice_size: int


class _Tokens(NamedTuple):
  """Keys and values [B, N, J, K], and of which document and where in the row they are, [B, N]."""

  k: Array
  v: Array
  segment_ids: Array
  at: Array


def take(x: Array, at: Array) -> Array:
  """x [B, T, ...] at the positions [B, G]; zero beyond the end."""
  index = at.reshape(*at.shape, *(1,) * (x.ndim - 2))
  return jnp.take_along_axis(x, index, axis=1, mode='fill', fill_value=0)


def _read_windows(
  local: Projections,
  segment_ids: Array,
  designated: Array,
  how: _How,
  dropout: Dropout | None,
) -> Array:
  """Every token over its window and the designated tokens -> [B, T, H, K].

  The phases of a dilated window are rows of their own, S / d tokens of each in a slice.
  """
  (batch, time, heads, _), d = local.q.shape, how.dilation
  steps = -(-time // d)
  size = max(1, min(how.slice_size // d, steps))
  beside = -(-how.window // size)  # whole slices that a window can reach into, on each side

  def sliced(x):
    return slices.cut(phases(x, d), size)

  def with_reach(x):
    around = ((0, 0), (beside * size, beside * size)) + ((0, 0),) * (x.ndim - 2)
    return slices.overlapping(jnp.pad(phases(x, d), around), size, 2 * beside + 1)

  at = jnp.broadcast_to(jnp.arange(time)[None], segment_ids.shape)
  tokens = _Tokens(local.k, local.v, segment_ids, at)
  now = jax.tree.map(sliced, (local.q, segment_ids, at))
  near = jax.tree.map(with_reach, tokens)
  far = jax.tree.map(lambda x: jnp.repeat(take(x, designated), d, axis=0), tokens)
  draws = None if dropout is None else jax.vmap(dropout.of)(jnp.arange(near.k.shape[0]))
  out = slices.for_each(
    lambda one: _read_window(*one, far=far, how=how),
    (*now, near, draws),
    logits=batch * d * heads * size * near.k.shape[2],
  )
  return interleaved(slices.join(out, steps), d, time)


def _read_window(
  q: Array,
  segment_ids: Array,
  at: Array,
  near: _Tokens,
  dropout: Dropout | None,
  far: _Tokens,
  how: _How,
) -> Array:
  """A slice's queries [B, S, H, K] over the tokens of their phase around it, and G far ones.

  segment_ids, at: int32 [B, S], the queries'.
  """
  (_, size, heads, width), (_, length, kv_heads, _) = q.shape, near.k.shape
  reach, first = how.window * how.dilation, (length - size) // 2
  cos, sin = rotary.angles(length, width, how.dilation)
  q = q * width**-0.5

  def turned(x, where):
    return rotary.rotate(x, cos[where], sin[where])

  steps = np.arange(first, first + size)[:, None] - np.arange(length)[None]
  same = segment_ids[:, :, None] == near.segment_ids[:, None]
  parts = [
    Part(
      queries_of(turned(q, slice(first, first + size)), kv_heads),
      keys_of(turned(near.k, slice(None))),
      keys_of(near.v),
      (np.abs(steps) <= how.window)[None] & same,
    )
  ]

  # A designated token stands at the edge on its side, where the window does not show it.
  if far.k.shape[1]:
    edge = slice(how.window, how.window + 1)
    ahead = at[:, :, None] - far.at[:, None]
    hidden = (jnp.abs(ahead) > reach) | (ahead % how.dilation != 0)
    seen = hidden & (segment_ids[:, :, None] == far.segment_ids[:, None])
    parts += [
      Part(queries, keys, keys_of(far.v), seen & side)
      for queries, keys, side in (
        (queries_of(turned(q, edge), kv_heads), keys_of(far.k), ahead > 0),
        (queries_of(q, kv_heads), keys_of(turned(far.k, edge)), ahead < 0),
      )
    ]
  out, _ = attend(tuple(parts), dropout)
  return of_queries(out.astype(q.dtype), heads)


def _read_documents(
  from_global: Projections,
  segment_ids: Array,
  designated: Array,
  how: _How,
  dropout: Dropout | None,
) -> Array:
  """Every designated token over all of its document -> [B, G, H, K].

  Each slice of keys is read by itself; its share follows from what its softmax divided by.
  """
  (batch, chosen, heads, width), kv_heads = from_global.q.shape, from_global.k.shape[2]
  reach, size = how.window * how.dilation, min(how.slice_size, segment_ids.shape[1])
  q, own = from_global.q * width**-0.5, take(segment_ids, designated)
  cos, sin = rotary.angles(2 * reach + size, width)
  tables = [jnp.asarray(table, rotary.wide(q)) for table in (cos, sin)]

  def turned(x, where):
    return rotary.rotate(x, cos[where], sin[where])

  def read(now):
    k, v, documents, number = now
    # Its first key stands at 0; where a query is too far away to see one as it stands, anywhere.
    coordinate = designated - number * size
    row = reach + jnp.clip(coordinate, -reach, size - 1 + reach)
    ahead = coordinate[:, :, None] - np.arange(size)[None, None]
    seen = own[:, :, None] == documents[:, None]
    inside, edge = slice(reach, reach + size), slice(reach, reach + 1)
    parts = (
      Part(queries_of(queries, kv_heads), keys_of(keys), keys_of(v), seen & where)
      for queries, keys, where in (
        (
          rotary.rotate(q, *(table[row] for table in tables)),
          turned(k, inside),
          jnp.abs(ahead) <= reach,
        ),
        (turned(q, edge), k, ahead > reach),
        (q, turned(k, edge), ahead < -reach),
      )
    )
    return attend(tuple(parts), dropout and dropout.of(number))

  keys, values, documents = (
    slices.cut(x, size) for x in (from_global.k, from_global.v, segment_ids)
  )
  outs, log_totals = slices.for_each(
    read,
    (keys, values, documents, jnp.arange(len(keys))),
    logits=3 * batch * chosen * heads * size,
  )
  out = jnp.sum(jax.nn.softmax(log_totals, axis=0) * outs, axis=0)
  return of_queries(out.astype(q.dtype), heads)
