"""Windows over time, in slices of queries, of causal and of bidirectional attention.

A slice of S queries reads its own keys, all keys of the slices within reach of its windows, and the
keys that its caller adds. So cost and memory are linear in time. Each residue of time modulo a
dilation d is a row of its own (Longformer, Beltagy et al. 2020, section 3.1).
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
from valkyrie.models.attention.softmax import Dropout, Part, attend, same_document, ungroup_queries
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
  dilations: Sequence[int],
  heads: int,
  width: int,
  slice_size: int,
  rotary: Rotary,
) -> Iterator[Windows]:
  """The windows of each run of neighboring heads that share a dilation; H = `heads` queries."""
  first = 0
  group = heads // len(dilations)
  for dilation, run in itertools.groupby(dilations):
    count = len(list(run))
    last = first + count
    keys = slice(first, last)
    queries = slice(group * first, group * last)
    yield Windows(keys, queries, width, dilation, slice_size, rotary)
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
  other_keys: Any,
  dropout: Dropout | None,
) -> Array:
  """The queries of a chunk over their windows and the `others` -> [B, T, H, K].

  Args:
    queries: all of the chunk, S = T.
    row: the keys of each residue, [B · d, ...], in the chunk and in slices before and after it.
    around: how many slices `row` has before the chunk and after it, as far as a window reaches;
      with none after it, a window is causal.
    size: S, of a slice of a residue.
    others: (scaled queries of a slice, its part of `other_keys`, cos and sin of the angle W) ->
      further keys, in the same softmax.
    other_keys: a pytree of leaves [slices, B · d, ...].
  """
  batch, time, heads, width = queries.q.shape
  d = seen.dilation
  before, behind = around
  near_slices = before + 1 + behind
  residues = jax.tree.map(lambda x: slices.split_residues(x, d), queries)
  by_slice = jax.tree.map(lambda x: slices.cut(x, size), residues)
  near_by_slice = jax.tree.map(lambda x: slices.overlapping(x, size, near_slices), row)
  by_kernel = seen.kernels is not None
  draws = None
  if dropout is not None:
    draw_slices = jax.vmap(dropout.of)
    draws = draw_slices(jnp.arange(len(by_slice.q)))
  length = near_slices * size
  first = before * size
  last = first + size
  cos, sin = seen.rotary.angles(length, width, d)
  query_cos = cos[first:last]
  query_sin = sin[first:last]
  edge = slice(seen.width, seen.width + 1)
  edge_angle = (cos[edge], sin[edge])
  query = np.arange(first, last)
  key = np.arange(length)
  steps = query[:, None] - key[None]
  nearest = -seen.width if behind else 0
  inside = (steps >= nearest) & (steps <= seen.width)

  def attend_slice(one):
    now, near, other_keys, dropout = one
    now = now._replace(q=now.q * width**-0.5)
    keys = rotate(near.keys, cos, sin)
    visible = same_document(now.segment_ids, near.segment_ids) & inside[None]
    q = rotate(now.q, query_cos, query_sin)
    window = Part.of(q, keys, near.values, visible)
    further = others(now, other_keys, edge_angle)
    if by_kernel:
      form = kernels.Form(size, length, seen.width, seen.kernels)
      segments = (now.segment_ids, near.segment_ids)
      return kernels.attend(form, q, keys, near.values, segments, further)
    out, _ = attend((window, *further), dropout)
    narrow = out.astype(now.q.dtype)
    return ungroup_queries(narrow, heads)

  inputs = (by_slice, near_by_slice, other_keys, draws)
  if by_kernel:  # a row for each slice
    rows = jax.tree.map(_merge_leading, inputs)
    out = attend_slice(rows)
    out = out.reshape(by_slice.q.shape)
  else:
    logits = batch * d * heads * size * length
    out = slices.for_each(attend_slice, inputs, logits=logits)
  residue_time = residues.q.shape[1]
  by_residue = slices.join(out, residue_time)
  return slices.merge_residues(by_residue, d, time)


def _merge_leading(x: Array) -> Array:
  """[N, B, ...] -> [N · B, ...]."""
  count, batch, *rest = x.shape
  rows = count * batch
  return x.reshape(rows, *rest)
