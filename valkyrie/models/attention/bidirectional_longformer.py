"""Bidirectional Longformer attention, as published, as a sequence mixer."""

import dataclasses
from typing import ClassVar

import chex
import gin

from valkyrie.models.attention.bidirectional_window import (
  Projections,
  bidirectional_attention,
  first_positions,
  take,
)
from valkyrie.models.attention.longformer import WindowAttention
from valkyrie.models.layers import project
from valkyrie.types import Array, DType


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

  max_global_tokens: int | None = None

  causal: ClassVar[bool] = False

  def __post_init__(self):
    super().__post_init__()
    limit = self.max_global_tokens
    self._global_tokens = self.document_start if limit is None else limit

  def initial_carry(self, batch_size: int, dtype: DType) -> tuple[()]:
    """Nothing."""
    del batch_size, dtype
    return ()

  def forward_flops(self, width: int) -> int:
    """Projections, then scores and sums over the keys of a token's window and the global tokens."""
    keys = 2 * self.window + 1 + 2 * self._global_tokens
    kv_width = self._kv_width * (2 if self._global_tokens else 1)
    return 4 * width * (self._q_width + kv_width) + 4 * keys * self._q_width

  def __call__(
    self, x: Array, carry: tuple[()], *, positions: Array, segment_ids: Array
  ) -> tuple[Array, tuple[()]]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    axes, kv_width = ('embed', 'heads'), self._kv_width
    local = from_global = Projections(*self._project_heads(x))
    starts = (positions < self.document_start) & (segment_ids > 0)
    global_tokens = first_positions(starts, self._global_tokens)
    if self._global_tokens:
      k, v = project(x, axes, global_key=kv_width, global_value=kv_width)
      (q,) = project(take(x, global_tokens), axes, global_query=self._q_width)
      from_global = Projections(self._split(q), self._split(k), self._split(v))
    out = bidirectional_attention(
      local,
      from_global,
      segment_ids=segment_ids,
      global_tokens=global_tokens,
      window=self.window,
      dilations=self._dilations,
      slice_size=self.slice_size,
      rotary=self._rotary,
      dropout=self._dropout(),
    )
    return self._project_out(out, x.shape[-1]), carry
