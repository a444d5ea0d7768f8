"""Full attention: to the whole of a document, or to the document's part in a chunk."""

import dataclasses
from typing import Any, ClassVar

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import NonNegativeInt, PositiveInt
from valkyrie.errors import ConfigurationError
from valkyrie.models.attention import kernels, softmax
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.attention.rotary import rotate
from valkyrie.models.attention.softmax import Part
from valkyrie.types import Array, DType


@gin.configurable
@dataclasses.dataclass(eq=False)
class FullAttention(LongformerAttention):
  """Causal attention to the whole of a document.

  It carries `max_context - 1` keys from chunk to chunk, and its cost grows with them. The data
  pipeline refuses a longer document, which the window would truncate. It accepts no pieces of time,
  since devices would have to exchange the whole document.

  Without a carry, each chunk is read by itself, as trainers of plain decoders do: a document that
  the end of a chunk cuts is read as two, and no text can be continued.

  Attributes, besides the ones of `WindowAttention`:
    max_context: the tokens that a query sees, itself included; without a carry, the longest chunk.
    carried: whether keys pass from chunk to chunk.
  """

  window: PositiveInt = dataclasses.field(init=False)
  dilations: None = dataclasses.field(init=False, default=None)
  document_start: NonNegativeInt = dataclasses.field(init=False, default=0)
  registers: NonNegativeInt = dataclasses.field(init=False, default=0)
  max_context: PositiveInt = dataclasses.field(kw_only=True)
  carried: bool = True

  sequence_parallel: ClassVar[bool] = False

  def __post_init__(self):
    self.window = self.max_context - 1
    super().__post_init__()

  def initial_carry(self, batch_size: int, dtype: DType) -> Any:
    """An empty window, or nothing without a carry."""
    if not self.carried:
      return ()
    return super().initial_carry(batch_size, dtype)

  def forward_flops(self, width: int) -> int:
    """As `LongformerAttention`; without a carry, a token reads half of its chunk on average."""
    whole = super().forward_flops(width)
    if self.carried:
      return whole
    return whole - 2 * self.window * self._q_width

  def __call__(
    self, x: Array, carry: Any, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, Any]:
    """Mixes a chunk; a ConfigurationError if it is longer than max_context without a carry."""
    if self.carried:
      return super().__call__(x, carry, positions=positions, segment_ids=segment_ids)
    if x.shape[1] > self.max_context:
      raise ConfigurationError(
        f'A chunk has {x.shape[1]} tokens, but FullAttention.max_context={self.max_context}. '
        'Lower chunk_size, or raise max_context.'
      )
    out = self._attend_in_chunk(*self._project_heads(x), segment_ids)
    return self._project_out(out, x), ()

  @hk.transparent
  @jax.named_scope('attention')
  def _attend_in_chunk(self, q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
    """Reads only the tokens of the same document in the chunk; memory grows with S x T."""
    time, heads, width = q.shape[1:]
    dropout = self._dropout()
    angles = self._rotary.angles(time, width)
    q = rotate(q * width**-0.5, *angles)
    k = rotate(k, *angles)
    if self._uses_kernel(time):
      form = kernels.Form(time, time, self.window, self.kernels)
      return kernels.attend(form, q, k, v, (segment_ids, segment_ids), ())
    outs = []
    # A slice of queries reads the keys up to its end, and none after it.
    for begin in range(0, time, self.slice_size):
      end = min(begin + self.slice_size, time)
      same = softmax.same_document(segment_ids[:, begin:end], segment_ids[:, :end])
      query = np.arange(begin, end)
      past = query[:, None] >= np.arange(end)[None]
      part = Part.of(q[:, begin:end], k[:, :end], v[:, :end], same & past[None])
      out, _ = softmax.attend((part,), dropout and dropout.of(begin))
      outs.append(softmax.ungroup_queries(out.astype(q.dtype), heads))
    return jnp.concatenate(outs, axis=1)
