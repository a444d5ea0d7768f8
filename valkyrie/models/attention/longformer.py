"""Longformer attention for causal language models, as a sequence mixer."""

from collections.abc import Sequence
import dataclasses
from typing import ClassVar

import chex
import gin
import haiku as hk
import jax.numpy as jnp

from valkyrie.models.attention.heads import checked_heads
from valkyrie.models.attention.kv_cache import AttentionCarry, empty_carry
from valkyrie.models.attention.sliding_window import sliding_window_attention
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.layers import check_sizes, parameter, project
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType


@gin.configurable
@dataclasses.dataclass(eq=False)
class LongformerAttention(hk.Module):
  """Sliding window, registers and document starts in one softmax; see `sliding_window`.

  Attributes:
    heads: H.
    head_width: K, even, since rotary positions rotate pairs.
    window: W, the number of tokens before itself that a token sees.
    kv_heads: J, dividing H; None means H.
    registers: R, learned keys and values that every token reads.
    document_start: g, the first tokens of a document, which all of its later tokens read.
    dilations: d of each key-value head, which sees the distances d, 2d, ..., Wd; None means 1.
    slice_size: S, queries computed at once; memory grows with S x (W + S).
    dropout: the share of attention weights zeroed in training.
    name: Haiku's.

  Raises:
    ConfigurationError: the heads cannot be formed, or a number is out of its range.
  """

  heads: int
  head_width: int
  window: int
  kv_heads: int | None = None
  registers: int = 0
  document_start: int = 0
  dilations: Sequence[int] | None = None
  slice_size: int = 128
  dropout: float = 0.0
  name: str | None = None

  causal: ClassVar[bool] = True
  sequence_parallel: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    owner = type(self).__name__
    self._heads = checked_heads(
      owner, self.heads, self.head_width, self.kv_heads, self.window, self.dilations
    )
    check_sizes(owner, slice_size=self.slice_size)
    check_sizes(owner, 0, registers=self.registers, document_start=self.document_start)
    self.reach = self.window * max(self._heads.dilations)

  def initial_carry(self, batch_size: int, dtype: DType) -> AttentionCarry:
    """An empty window, in the compute dtype: keys are stored as they were computed."""
    heads = self._heads
    return empty_carry(batch_size, self.reach, self.document_start, heads.kv, heads.width, dtype)

  def forward_flops(self, width: int) -> int:
    """Projections, then scores and sums over the W + 1 + G keys that a token reads."""
    keys = self.window + 1 + self.registers + self.document_start
    projections = 4 * width * (self._heads.q_width + self._heads.kv_width)
    return projections + 4 * keys * self._heads.q_width

  def __call__(
    self, x: Array, carry: AttentionCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, AttentionCarry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    heads = self._heads
    chex.assert_shape(carry.window.keys, (x.shape[0], self.reach, heads.kv, heads.width))
    q, k, v = project(
      x, ('embed', 'heads'), query=heads.q_width, key=heads.kv_width, value=heads.kv_width
    )
    key = hk.maybe_next_rng_key() if self.dropout else None
    out, carry = sliding_window_attention(
      heads.split(q),
      heads.split(k),
      heads.split(v),
      carry,
      positions=positions,
      segment_ids=segment_ids,
      registers=self._registers(),
      slice_size=self.slice_size,
      dilations=heads.dilations,
      dropout=None if key is None else Dropout(sequence_parallel.fold_in_shard(key), self.dropout),
    )
    (out,) = project(out.reshape(*x.shape[:2], -1), ('heads', 'embed'), out=x.shape[-1])
    return out, carry

  def _registers(self) -> tuple[Array, Array]:
    shape = (self.registers, self._heads.kv, self._heads.width)
    if not self.registers:
      return jnp.zeros(shape), jnp.zeros(shape)
    init = hk.initializers.RandomNormal(1.0)
    axes = (None, None, None)
    return (
      parameter('register_keys', shape, init, axes=axes),
      parameter('register_values', shape, init, axes=axes),
    )
