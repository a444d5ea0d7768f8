"""Full attention: to the whole of a document, or to the document's part in a chunk."""

import dataclasses
import functools
from typing import Any, ClassVar

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import NonNegativeInt, PositiveInt
from valkyrie.errors import ConfigurationError
from valkyrie.models import kernel_choice
from valkyrie.models.attention import blocks, document_cache, kernels, softmax
from valkyrie.models.attention.kv_cache import KVCache
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.attention.patterns import AttentionPattern, Sources, attention_pattern
from valkyrie.models.attention.rotary import rotate
from valkyrie.models.attention.softmax import Part
from valkyrie.models.attention.windows import Queries
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType


@gin.configurable
@dataclasses.dataclass(eq=False)
class FullAttention(LongformerAttention):
  """Causal attention to the whole of a document.

  It carries the last `max_context` keys of a row from chunk to chunk, each as it was computed, and
  a token's cost grows with its position (see `document_cache` and `blocks`). The data pipeline
  refuses a longer document.

  Without a carry, each chunk is read by itself, as trainers of plain decoders do: a document that
  the end of a chunk cuts is read as two, and no text can be continued.

  Attributes, besides the ones of `WindowAttention`:
    max_context: the tokens that a query sees, itself included; without a carry, the longest chunk.
      A layout that splits time splits the keys as well, and needs a multiple of its devices.
    carried: whether keys pass from chunk to chunk. cuDNN's kernel then reads slices of its own
      size, whatever `slice_size` is.
    slides: whether longer documents are read, too: each token sees the last `max_context` tokens.
      It is then a window, which `LongformerAttention` reads in less memory if it is short.
  """

  window: PositiveInt = dataclasses.field(init=False)
  dilations: None = dataclasses.field(init=False, default=None)
  document_start: NonNegativeInt = dataclasses.field(init=False, default=0)
  registers: NonNegativeInt = dataclasses.field(init=False, default=0)
  max_context: PositiveInt = dataclasses.field(kw_only=True)
  carried: bool = True
  slides: bool = False

  sequence_parallel: ClassVar[bool] = True

  @functools.cached_property
  def kernel_limits(self) -> kernel_choice.Limits:
    """With a carry, cuDNN's kernel alone: its mask changes as the cache does."""
    limits = super().kernel_limits
    if self.carried:
      return limits._replace(platforms=('gpu',))
    if sequence_parallel.axes():
      return limits._replace(misfit='the kernels read whole chunks, and devices share each chunk')
    return limits

  def __post_init__(self):
    self.window = self.max_context - 1
    super().__post_init__()
    if self.slides and not self.carried:
      raise ConfigurationError(
        'FullAttention.slides = True needs FullAttention.carried = True: without a carry, every '
        'chunk is read by itself. Remove one of the two bindings.'
      )
    if self.kernels == 'interpret' and self.carried:
      raise ConfigurationError(
        "FullAttention.kernels='interpret': cuDNN's kernel reads the keys of earlier chunks, and "
        "only a GPU runs it. Set FullAttention.kernels = 'prefer' or None, or "
        'FullAttention.carried = False.'
      )

  def initial_carry(self, batch_size: int, dtype: DType) -> Any:
    """An empty cache, or nothing without a carry."""
    if not self.carried:
      return ()
    heads = self._kv_heads, self.head_width
    return document_cache.empty_cache(batch_size, self.max_context, *heads, dtype)

  def forward_flops(self, width: int) -> int:
    """As `LongformerAttention`; without a carry, a token reads half of its chunk on average."""
    whole = super().forward_flops(width)
    if self.carried:
      return whole
    return whole - 2 * self.window * self._q_width

  def __call__(
    self,
    x: Array,
    carry: Any,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Any]:
    """Mixes a chunk; a ConfigurationError if it cannot be read without a carry."""
    if not self.carried:
      self._check_chunk(x.shape[1])
    q, k, v = self._project_heads(x)
    if self.carried or sequence_parallel.axes():
      form = blocks.Form(self.max_context, self.slice_size, self._uses_kernel(x.shape[1]))
      tokens = KVCache(k, v, segment_ids)
      out, carry = document_cache.attend(form, self._rotary, q, tokens, carry, self._dropout())
    else:
      out = self._attend_in_chunk(q, k, v, segment_ids)
    return self._project_out(out, x), carry

  @hk.name_like('__call__')
  def attention_pattern(
    self,
    at: np.ndarray,
    x: Array,
    carry: Any,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> AttentionPattern:
    """See `LongformerAttention.attention_pattern`."""
    q, k, v = self._project_heads(x)
    tokens = KVCache(k, v, segment_ids)
    before, chunk, first = document_cache.in_order(carry, tokens)
    no_register = k[0, :0]
    no_start = tokens.first(0)
    sources = Sources(no_register, no_start, before, chunk, positions)
    queries = Queries(q[:, at], positions[:, at], segment_ids[:, at])
    return attention_pattern(queries, first + at, sources, self._windows)

  def _check_chunk(self, time: int) -> None:
    """Refuses a chunk that is read alone and is longer than max_context."""
    chunk = time
    if sequence_parallel.axes():
      chunk *= sequence_parallel.size()
    if chunk > self.max_context:
      raise ConfigurationError(
        f'A chunk has {chunk} tokens, but FullAttention.max_context={self.max_context}. '
        'Lower chunk_size, or raise max_context.'
      )

  @hk.transparent
  @jax.named_scope('attention')
  def _attend_in_chunk(
    self,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
  ) -> Array:
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
