"""Bidirectional Longformer attention, as published, as a sequence mixer."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

import chex
import gin
import haiku as hk

from valkyrie.models.attention.bidirectional_window import (
  Projections,
  bidirectional_attention,
  first_positions,
  take,
)
from valkyrie.models.attention.heads import checked_heads
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.layers import check_sizes, project
from valkyrie.types import Array, DType


@gin.configurable
@dataclasses.dataclass(eq=False)
class BidirectionalLongformer(hk.Module):
  """A window on both sides, and global tokens at the start of each document.

  It carries nothing: a token sees its document within one chunk. For other global tokens, call
  `bidirectional_attention` directly. docs/encoder.md builds an encoder with it.

  Attributes:
    heads: H.
    head_width: K, even, since rotary positions rotate pairs.
    window: W, the number of tokens on each side of itself that a token sees.
    kv_heads: J, dividing H; None means H.
    dilations: d of each key-value head, which sees the distances d, 2d, ..., Wd; None means 1.
    document_start: g, the first tokens of a document, which see it all and are seen by all of it.
    max_global_tokens: G, the most global tokens in a row's chunk: the first ones of several
      documents' starts. None means g, the start of one document.
    slice_size: S, queries computed at once; memory grows with S x (2 W d + S).
    dropout: the share of attention weights zeroed in training.
    name: Haiku's.

  Raises:
    ConfigurationError: the heads cannot be formed, or a number is out of its range.
  """

  heads: int
  head_width: int
  window: int
  kv_heads: int | None = None
  dilations: Sequence[int] | None = None
  document_start: int = 0
  max_global_tokens: int | None = None
  slice_size: int = 128
  dropout: float = 0.0
  name: str | None = None

  causal: ClassVar[bool] = False

  def __post_init__(self):
    super().__post_init__()
    owner = type(self).__name__
    self._heads = checked_heads(
      owner, self.heads, self.head_width, self.kv_heads, self.window, self.dilations
    )
    check_sizes(owner, slice_size=self.slice_size)
    check_sizes(owner, 0, document_start=self.document_start)
    limit = self.max_global_tokens
    self._global_tokens = self.document_start if limit is None else limit

  def initial_carry(self, batch_size: int, dtype: DType) -> tuple[()]:
    """Nothing."""
    del batch_size, dtype
    return ()

  def forward_flops(self, width: int) -> int:
    """Projections, then scores and sums over the keys of a token's window and the global tokens."""
    heads = self._heads
    projections = 4 * width * (heads.q_width + heads.kv_width)
    if self._global_tokens:
      projections += 4 * width * heads.kv_width
    return projections + 4 * (2 * self.window + 1 + 2 * self._global_tokens) * heads.q_width

  def __call__(
    self, x: Array, carry: tuple[()], *, positions: Array, segment_ids: Array
  ) -> tuple[Array, tuple[()]]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    heads, axes = self._heads, ('embed', 'heads')
    q, k, v = project(x, axes, query=heads.q_width, key=heads.kv_width, value=heads.kv_width)
    local = from_global = Projections(*map(heads.split, (q, k, v)))
    starts = (positions < self.document_start) & (segment_ids > 0)
    global_tokens = first_positions(starts, self._global_tokens)
    if self._global_tokens:
      k, v = project(x, axes, global_key=heads.kv_width, global_value=heads.kv_width)
      (q,) = project(take(x, global_tokens), axes, global_query=heads.q_width)
      from_global = Projections(*map(heads.split, (q, k, v)))
    key = hk.maybe_next_rng_key() if self.dropout else None
    out = bidirectional_attention(
      local,
      from_global,
      segment_ids=segment_ids,
      global_tokens=global_tokens,
      window=self.window,
      dilations=heads.dilations,
      slice_size=self.slice_size,
      dropout=None if key is None else Dropout(key, self.dropout),
    )
    (out,) = project(out.reshape(*x.shape[:2], -1), ('heads', 'embed'), out=x.shape[-1])
    return out, carry
