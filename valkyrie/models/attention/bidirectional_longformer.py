"""Bidirectional Longformer attention with global tokens (Beltagy et al. 2020), as a mixer.

A token reads the W tokens before it, itself, the W tokens after it, and all global tokens of its
document: one softmax, each key once. A global token reads all of its document, through separate
queries, keys and values (§3.1). Cost and memory are linear in time. A key outside the window, or
between the tokens that a dilated window sees, is rotated to its edge.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import ClassVar, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import NonNegativeInt
from valkyrie.models import slices
from valkyrie.models.attention.kv_cache import KVCache
from valkyrie.models.attention.longformer import WindowAttention
from valkyrie.models.attention.rotary import rotate
from valkyrie.models.attention.softmax import Dropout, Part, attend, same_document, ungroup_queries
from valkyrie.models.attention.windows import Queries, Windows, attend_windows
from valkyrie.models.layers import project
from valkyrie.models.precision import wide
from valkyrie.types import Array, DType


class Projections(NamedTuple):
  """Queries [B, N, H, K], and keys and values [B, T, J, K] with J dividing H; all unrotated."""

  q: Array
  k: Array
  v: Array

  def of_heads(self, seen: Windows) -> 'Projections':
    """The projections of the heads of these windows."""
    q = self.q[:, :, seen.query_heads]
    k = self.k[:, :, seen.heads]
    v = self.v[:, :, seen.heads]
    return Projections(q, k, v)


def first_positions(mask: Array, limit: int) -> Array:
  """Indices of the first `limit` true elements of each row of [B, T]: int32 [B, limit], then T."""
  time = mask.shape[1]
  first_of_row = functools.partial(jnp.nonzero, size=limit, fill_value=time)
  (index,) = jax.vmap(first_of_row)(mask)
  return index.astype(jnp.int32)


@jax.named_scope('attention')
def bidirectional_attention(
  local: Projections,
  from_global: Projections,
  *,
  segment_ids: Array,
  global_tokens: Array,
  windows: Sequence[Windows],
  dropout: Dropout | None = None,
) -> Array:
  """Attention of every token of a row to its own document -> [B, T, H, K], zero at padding.

  Args:
    local: the projections for all tokens, N = T.
    from_global: the projections for global tokens, N = G.
    segment_ids: int32 [B, T], 0 at padding.
    global_tokens: int32 [B, G], the indices of the global tokens, as `first_positions` gives them.
    windows: of all heads, W tokens on each side; heads of dilation d see the distances d, 2d, ...,
      Wd. S queries, or keys of global queries, are scored at once.
  """
  rows = np.arange(len(segment_ids))
  outs = []
  for number, seen in enumerate(windows):
    draw = 2 * number
    window_dropout = dropout and dropout.of(draw)
    document_dropout = dropout and dropout.of(draw + 1)
    local_heads = local.of_heads(seen)
    out = _attend_windows(local_heads, segment_ids, global_tokens, seen, window_dropout)
    if global_tokens.shape[1]:
      global_heads = from_global.of_heads(seen)
      global_out = _attend_documents(
        global_heads, segment_ids, global_tokens, seen, document_dropout
      )
      global_rows = out.at[rows[:, None], global_tokens]
      out = global_rows.set(global_out, mode='drop')
    outs.append(out)
  joined = jnp.concatenate(outs, axis=2)
  is_token = segment_ids[:, :, None, None] > 0
  return jnp.where(is_token, joined, 0)


def take(x: Array, at: Array) -> Array:
  """x [B, T, ...] at the positions [B, G]; zero beyond the end."""
  channel_axes = range(2, x.ndim)
  index = jnp.expand_dims(at, channel_axes)
  return jnp.take_along_axis(x, index, axis=1, mode='fill', fill_value=0)


def _attend_windows(
  local: Projections,
  segment_ids: Array,
  global_tokens: Array,
  seen: Windows,
  dropout: Dropout | None,
) -> Array:
  """Every token over its window and the global tokens."""
  time = segment_ids.shape[1]
  d = seen.dilation
  steps = -(-time // d)
  size = max(1, min(seen.slice_size // d, steps))
  reach = -(-seen.width // size)  # whole slices within reach of a window, on each side
  indices = jnp.arange(time)
  at = jnp.broadcast_to(indices[None], segment_ids.shape)
  tokens = KVCache(local.k, local.v, segment_ids)

  def with_reach(x):
    residues = slices.split_residues(x, d)
    padding = [(0, 0)] * x.ndim
    padding[1] = (reach * size, reach * size)
    return jnp.pad(residues, padding)

  def global_of_residues(x):
    at_global_tokens = take(x, global_tokens)
    return jnp.repeat(at_global_tokens, d, axis=0)

  row = jax.tree.map(with_reach, tokens)
  far, far_at = jax.tree.map(global_of_residues, (tokens, at))

  def global_parts(now, _, edge):
    """A global token outside the window is rotated to the edge on its side."""
    if not global_tokens.shape[1]:
      return []
    ahead = now.positions[:, :, None] - far_at[:, None]
    is_far = jnp.abs(ahead) > seen.width * d
    is_between = ahead % d != 0
    outside = is_far | is_between
    visible = outside & same_document(now.segment_ids, far.segment_ids)
    is_before = visible & (ahead > 0)
    is_after = visible & (ahead < 0)
    q = rotate(now.q, *edge)
    before = Part.of(q, far.keys, far.values, is_before)
    keys = rotate(far.keys, *edge)
    behind = Part.of(now.q, keys, far.values, is_after)
    return [before, behind]

  queries = Queries(local.q, at, segment_ids)
  return attend_windows(seen, queries, row, (reach, reach), size, global_parts, None, dropout)


def _attend_documents(
  from_global: Projections,
  segment_ids: Array,
  global_tokens: Array,
  seen: Windows,
  dropout: Dropout | None,
) -> Array:
  """Every global token over all of its document -> [B, G, H, K]."""
  batch, chosen, heads, width = from_global.q.shape
  reach = seen.width * seen.dilation
  size = min(seen.slice_size, segment_ids.shape[1])
  q = from_global.q * width**-0.5
  own = take(segment_ids, global_tokens)
  cos, sin = seen.rotary.angles(2 * reach + size, width)
  dtype = wide(q.dtype)
  cos_table = jnp.asarray(cos, dtype)
  sin_table = jnp.asarray(sin, dtype)
  steps = np.arange(size)

  def rotated(x, where):
    return rotate(x, cos[where], sin[where])

  def attend_slice(inputs):
    k, v, documents, number = inputs
    # The slice's first key is at coordinate 0. The coordinates of far queries are clipped, since
    # their windows contain no key of the slice.
    coordinate = global_tokens - number * size
    clipped = jnp.clip(coordinate, -reach, size - 1 + reach)
    row = reach + clipped
    ahead = coordinate[:, :, None] - steps[None, None]
    visible = same_document(own, documents)
    inside = slice(reach, reach + size)
    edge = slice(reach, reach + 1)
    is_near = visible & (jnp.abs(ahead) <= reach)
    is_before = visible & (ahead > reach)
    is_after = visible & (ahead < -reach)
    near_q = rotate(q, cos_table[row], sin_table[row])
    near_k = rotated(k, inside)
    near = Part.of(near_q, near_k, v, is_near)
    q_behind_keys = rotated(q, edge)
    before = Part.of(q_behind_keys, k, v, is_before)
    k_behind_queries = rotated(k, edge)
    behind = Part.of(q, k_behind_queries, v, is_after)
    slice_dropout = dropout and dropout.of(number)
    return attend((near, before, behind), slice_dropout)

  keys = slices.cut(from_global.k, size)
  values = slices.cut(from_global.v, size)
  documents = slices.cut(segment_ids, size)
  numbers = jnp.arange(len(keys))
  inputs = (keys, values, documents, numbers)
  logits = 3 * batch * chosen * heads * size
  outs, log_totals = slices.for_each(attend_slice, inputs, logits=logits)
  # Each slice of keys has its own softmax; the denominators give each slice's share.
  shares = jax.nn.softmax(log_totals, axis=0)
  out = jnp.sum(shares * outs, axis=0)
  return ungroup_queries(out.astype(q.dtype), heads)


@gin.configurable
@dataclasses.dataclass(eq=False)
class BidirectionalLongformer(WindowAttention):
  """A window on both sides, and global tokens at the start of each document.

  It carries nothing: a token sees its document within one chunk. For other global tokens, call
  `bidirectional_attention` directly. docs/encoder.md builds an encoder with it.

  Attributes, besides the ones of `WindowAttention`:
    max_global_tokens: G, the most global tokens in a row's chunk: the first ones of several
      documents' starts. None means `document_start`, the start of one document.
  """

  max_global_tokens: NonNegativeInt | None = None

  causal: ClassVar[bool] = False

  def __post_init__(self):
    super().__post_init__()
    limit = self.max_global_tokens
    self._global_tokens = self.document_start if limit is None else limit

  def initial_carry(self, batch_size: int, dtype: DType) -> tuple[()]:
    """Nothing."""
    return ()

  def forward_flops(self, width: int) -> int:
    """Projections, then scores and sums over the keys of a token's window and the global tokens."""
    keys = 2 * self.window + 1 + 2 * self._global_tokens
    of_keys = 2 if self._global_tokens else 1
    projections = self._projection_flops(width, of_keys)
    scores_and_sums = 4 * keys * self._q_width
    return projections + scores_and_sums

  def __call__(
    self,
    x: Array,
    carry: tuple[()],
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, tuple[()]]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    axes = ('embed', 'heads')
    kv_width = self._kv_width
    local = Projections(*self._project_heads(x))
    from_global = local
    starts = (positions < self.document_start) & (segment_ids > 0)
    global_tokens = first_positions(starts, self._global_tokens)
    if self._global_tokens:
      k, v = project(x, axes, global_key=kv_width, global_value=kv_width)
      global_x = take(x, global_tokens)
      (q,) = project(global_x, axes, global_query=self._q_width)
      q, k, v = self._heads(q, k, v, of='global_')
      from_global = Projections(q, k, v)
    out = bidirectional_attention(
      local,
      from_global,
      segment_ids=segment_ids,
      global_tokens=global_tokens,
      windows=self._windows,
      dropout=self._dropout(),
    )
    return self._project_out(out, x), carry
