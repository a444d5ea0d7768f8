"""Longformer attention to both sides, as published, as a sequence mixer."""

from collections.abc import Sequence

import chex
import gin
import haiku as hk

from valkyrie.models.attention import bidirectional_window
from valkyrie.models.attention.bidirectional_window import Projections
from valkyrie.models.attention.dilation import check_dilations
from valkyrie.models.attention.longformer import check_heads
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.layers import project
from valkyrie.types import Array, DType


@gin.configurable
class BidirectionalLongformer(hk.Module):
  """A window on both sides and global tokens at the start of each document.

  It carries nothing: a chunk is all that it sees of a document. Other tokens than a document's
  first are designated by calling `bidirectional_attention` itself.
  """

  causal = False
  shards_of_time = False

  def __init__(
    self,
    heads: int,
    head_width: int,
    window: int,
    kv_heads: int | None = None,
    dilations: Sequence[int] | None = None,
    document_start: int = 0,
    max_designated: int | None = None,
    slice_size: int = 128,
    dropout: float = 0.0,
    name: str | None = None,
  ):
    """Configures the mixer.

    Args:
      heads: H.
      head_width: K, even, since rotary positions turn pairs.
      window: W, how many tokens on each side of itself a token sees.
      kv_heads: J, dividing H; None means H.
      dilations: d of each key-value head, which sees the distances d, 2d, ..., Wd; None means 1.
      document_start: g, the first tokens of a document, which see and are seen by all of it.
      max_designated: G, the most tokens of a row's chunk that are global: of several documents'
        starts the first. None means g, the start of one document.
      slice_size: S, queries computed at once; memory grows with S x (2 W d + S).
      dropout: the share of attention weights left out where there is a random key.
      name: Haiku's.

    Raises:
      ConfigurationError: where the heads cannot be formed.
    """
    super().__init__(name)
    kv_heads = kv_heads or heads
    check_heads('BidirectionalLongformer', heads, kv_heads, head_width, window)
    self.dilations = check_dilations(dilations, kv_heads, type(self).__name__)
    self.heads = heads
    self.head_width = head_width
    self.window = window
    self.kv_heads = kv_heads
    self.document_start = document_start
    self.max_designated = document_start if max_designated is None else max_designated
    self.slice_size = slice_size
    self.dropout = dropout

  def initial_carry(self, batch_size: int, dtype: DType) -> tuple[()]:
    """Nothing."""
    del batch_size, dtype
    return ()

  def forward_flops(self, width: int) -> int:
    """Projections, then scores and sums over the keys that a token reads, and that read it."""
    own, shared = self.heads * self.head_width, self.kv_heads * self.head_width
    projections = 4 * width * (own + shared)
    if self.max_designated:
      projections += 4 * width * shared
    return projections + 4 * (2 * self.window + 1 + 2 * self.max_designated) * own

  def __call__(
    self, x: Array, carry: tuple[()], *, positions: Array, segment_ids: Array
  ) -> tuple[Array, tuple[()]]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    own, shared = self.heads * self.head_width, self.kv_heads * self.head_width

    def heads_of(projected):
      return projected.reshape(*projected.shape[:2], -1, self.head_width)

    q, k, v = map(heads_of, project(x, query=own, key=shared, value=shared))
    local = from_global = Projections(q, k, v)
    starts = (positions < self.document_start) & (segment_ids > 0)
    designated = bidirectional_window.first_designated(starts, self.max_designated)
    if self.max_designated:
      k, v = map(heads_of, project(x, global_key=shared, global_value=shared))
      (q,) = map(heads_of, project(bidirectional_window.take(x, designated), global_query=own))
      from_global = Projections(q, k, v)
    key = hk.maybe_next_rng_key() if self.dropout else None
    out = bidirectional_window.bidirectional_attention(
      local,
      from_global,
      segment_ids=segment_ids,
      designated=designated,
      window=self.window,
      dilations=self.dilations,
      slice_size=self.slice_size,
      dropout=None if key is None else Dropout(key, self.dropout),
    )
    (out,) = project(out.reshape(*x.shape[:2], own), out=x.shape[-1])
    return out, carry
