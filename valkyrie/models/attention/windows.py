"""Windows over time, in slices of queries, of causal and of bidirectional attention.

A slice of S queries reads its own keys, all keys of the slices within reach of its windows, and
what its caller adds. So cost and memory are linear in time. Each residue of time modulo a dilation
d is a row of its own (Longformer, Beltagy et al. 2020, section 3.1).
"""

from collections.abc import Callable, Iterator, Sequence
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.models.attention import kernels
from valkyrie.models.attention.kv_cache import KVCache
from valkyrie.models.attention.rotary import Rotary, rotate
from valkyrie.models.attention.softmax import Dropout, Part, attend, ungroup_queries
from valkyrie.types import Array


class Windows(NamedTuple):
  """The windows of key-value heads that share a dilation, and of the heads of their queries."""

  heads: slice
  query_heads: slice
  width: int  # W
  dilation: int
  slice_size: int
  rotary: Rotary
  kernels: str | None = None  # of `kernels.CHOICES`, if a kernel reads this piece


def windows_of(
  dilations: Sequence[int], heads: int, width: int, slice_size: int, rotary: Rotary
) -> Iterator[Windows]:
  """The windows of each run of neighboring heads that share a dilation; H = `heads` queries."""
  first = 0
  group = heads // len(dilations)
  for dilation, run in itertools.groupby(dilations):
    last = first + len(list(run))
    queries = slice(group * first, group * last)
    yield Windows(slice(first, last), queries, width, dilation, slice_size, rotary)
    first = last


class Queries(NamedTuple):
  """Queries [B, S, H, K], and the positions and documents of their tokens, [B, S]."""

  q: Array
  positions: Array
  segment_ids: Array


def attend_windows(
  seen: Windows,
  queries: Queries,
  row: KVCache,
  around: tuple[int, int],
  size: int,
  others: Callable[[Queries, Any, tuple[np.ndarray, np.ndarray]], Sequence[Part]],
  beside: Any,
  dropout: Dropout | None,
) -> Array:
  """The queries of a chunk over their windows and the `others` -> [B, T, H, K].

  Args:
    queries: all of the chunk, S = T.
    row: keys of each residue [B · d, ...], with the slices `around`: before and after the chunk's.
    around: the whole slices within reach before and after; without any after, a window is causal.
    size: S, of a slice of a residue.
    others: (scaled queries of a slice, its part of `beside`, cos and sin of the angle W) -> further
      keys, in the same softmax.
    beside: a pytree of leaves [slices, B · d, ...].
  """
  (batch, time, heads, width), d = queries.q.shape, seen.dilation
  now = jax.tree.map(lambda x: slices.cut(slices.split_residues(x, d), size), queries)
  near = jax.tree.map(lambda x: slices.overlapping(x, size, sum(around) + 1), row)
  by_kernel = seen.kernels is not None
  draws = None if dropout is None else jax.vmap(dropout.of)(jnp.arange(len(now.q)))
  length = near.keys.shape[2]
  first = around[0] * size
  own = slice(first, first + size)
  edge = slice(seen.width, seen.width + 1)
  cos, sin = seen.rotary.angles(length, width, d)
  steps = np.arange(first, first + size)[:, None] - np.arange(length)[None]
  inside = (steps >= (-seen.width if around[1] else 0)) & (steps <= seen.width)

  def attend_slice(one):
    now, near, beside, dropout = one
    now = now._replace(q=now.q * width**-0.5)
    same = now.segment_ids[:, :, None] == near.segment_ids[:, None]
    keys = rotate(near.keys, cos, sin)
    visible = same & inside[None]
    q = rotate(now.q, cos[own], sin[own])
    window = Part.of(q, keys, near.values, visible)
    further = others(now, beside, (cos[edge], sin[edge]))
    if by_kernel:
      form = (size, length, seen.width, seen.kernels)
      segments = (now.segment_ids, near.segment_ids)
      return kernels.attend(form, q, keys, near.values, segments, further)
    out, _ = attend((window, *further), dropout)
    return ungroup_queries(out.astype(now.q.dtype), heads)

  given = now, near, beside, draws
  if by_kernel:  # a row for each slice
    rows = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), given)
    out = attend_slice(rows).reshape(now.q.shape)
  else:
    out = slices.for_each(attend_slice, given, logits=batch * d * heads * size * length)
  return slices.merge_residues(slices.join(out, -(-time // d)), d, time)
