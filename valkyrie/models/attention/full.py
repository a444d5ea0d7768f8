"""Full attention: to the whole of a document, or to the document's part in a chunk."""

from collections.abc import Callable
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention import softmax
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.attention.rotary import Rotary, rotate
from valkyrie.models.attention.softmax import Dropout, Part
from valkyrie.types import Array, DType


@gin.configurable
class FullAttention(LongformerAttention):
  """Causal attention to the whole of a document.

  It carries `max_context - 1` keys from chunk to chunk, and its cost grows with them. The data
  pipeline refuses a longer document, which the window would truncate. Devices would have to
  exchange the whole document, so it accepts no pieces of time.

  Without a carry, each chunk is read by itself, as trainers of plain decoders do: a document that a
  chunk's end cuts is read as two. Then every key that is computed is one that a query reads, and
  chunks are not the cuts of one stream: nothing is exact across them, and no text can be continued.
  """

  sequence_parallel = False

  def __init__(
    self,
    heads: int,
    head_width: int,
    max_context: int,
    carried: bool = True,
    kv_heads: int | None = None,
    slice_size: int = 128,
    dropout: float = 0.0,
    rotary: Callable[[], Rotary] = Rotary,
    name: str | None = None,
  ):
    """As `LongformerAttention`.

    max_context: the tokens that a query sees, itself included; without a carry, the longest chunk.
    carried: whether keys pass from chunk to chunk.
    """
    super().__init__(
      heads,
      head_width,
      max_context - 1,
      kv_heads=kv_heads,
      # Named, so that gin does not fill in the bindings of LongformerAttention.
      registers=0,
      document_start=0,
      dilations=None,
      slice_size=slice_size,
      dropout=dropout,
      rotary=rotary,
      name=name,
    )
    self.carried = carried
    self.max_context = max_context if carried else None
    self._longest_chunk = max_context

  def initial_carry(self, batch_size: int, dtype: DType) -> Any:
    """An empty window, or nothing without a carry."""
    return super().initial_carry(batch_size, dtype) if self.carried else ()

  def forward_flops(self, width: int) -> int:
    """As `LongformerAttention`; without a carry, a token reads half of its chunk on average."""
    whole = super().forward_flops(width)
    return whole if self.carried else whole - 2 * (self._longest_chunk - 1) * self._heads.q_width

  def __call__(
    self, x: Array, carry: Any, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, Any]:
    """Mixes a chunk; see `types.SequenceMixer`.

    Raises:
      ConfigurationError: without a carry, the chunk is longer than max_context.
    """
    if self.carried:
      return super().__call__(x, carry, positions=positions, segment_ids=segment_ids)
    if x.shape[1] > self._longest_chunk:
      raise ConfigurationError(
        f'A chunk has {x.shape[1]} tokens, but FullAttention.max_context={self._longest_chunk}. '
        'Lower chunk_size, or raise max_context.'
      )
    out = attention_in_chunk(
      *self._project_heads(x),
      segment_ids,
      slice_size=self.slice_size,
      rotary=self._rotary,
      dropout=self._dropout(),
    )
    return self._project_out(out, x.shape[-1]), ()


@jax.named_scope('attention')
def attention_in_chunk(
  q: Array,
  k: Array,
  v: Array,
  segment_ids: Array,
  *,
  slice_size: int,
  rotary: Rotary,
  dropout: Dropout | None = None,
) -> Array:
  """Causal attention to the tokens of the same document in the chunk -> [B, T, H, K].

  Every slice of queries reads the keys up to its end, and none after it.

  Args:
    q: [B, T, H, K]; k, v: [B, T, J, K]; all unrotated.
    segment_ids: int32 [B, T].
    slice_size: S, queries computed at once: memory grows with S x T.
    rotary: the frequencies of the positions.
    dropout: of attention weights; None for none.
  """
  time, heads, width = q.shape[1:]
  angles = rotary.angles(time, width)
  q, k = rotate(q * width**-0.5, *angles), rotate(k, *angles)
  keys, values = softmax.group_keys(k), softmax.group_keys(v)
  outs = []
  for begin in range(0, time, slice_size):
    end = min(begin + slice_size, time)
    same = segment_ids[:, begin:end, None] == segment_ids[:, None, :end]
    past = np.arange(begin, end)[:, None] >= np.arange(end)[None]
    part = Part(
      softmax.group_queries(q[:, begin:end], k.shape[2]),
      keys[:, :, :end],
      values[:, :, :end],
      same & past[None],
    )
    out, _ = softmax.attend((part,), dropout and dropout.of(begin))
    outs.append(softmax.ungroup_queries(out.astype(q.dtype), heads))
  return jnp.concatenate(outs, axis=1)
