"""Longformer attention for causal language models, as a sequence mixer."""

import dataclasses
from typing import ClassVar

import chex
import gin
import haiku as hk
import jax.numpy as jnp

from valkyrie.models.attention.heads import WindowAttention
from valkyrie.models.attention.kv_cache import AttentionCarry, empty_carry
from valkyrie.models.attention.sliding_window import sliding_window_attention
from valkyrie.models.layers import check_sizes, parameter
from valkyrie.types import Array, DType


@gin.configurable
@dataclasses.dataclass(eq=False)
class LongformerAttention(WindowAttention):
  """Sliding window, registers and document starts in one softmax; see `sliding_window`.

  Attributes:
    window: W, the number of tokens before itself that a token sees.
    document_start: g, the first tokens of a document, which all of its later tokens read.
    slice_size: S, queries computed at once; memory grows with S x (W + S).
    registers: R, learned keys and values that every token reads.

  The others are as in `WindowAttention`.
  """

  registers: int = 0

  causal: ClassVar[bool] = True
  sequence_parallel: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    check_sizes(type(self).__name__, 0, registers=self.registers)
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
    q, k, v = self._project_heads(x)
    dropout = self._dropout()
    out, carry = sliding_window_attention(
      q,
      k,
      v,
      carry,
      positions=positions,
      segment_ids=segment_ids,
      registers=self._registers(),
      slice_size=self.slice_size,
      rotary=self._rotary,
      dilations=heads.dilations,
      dropout=dropout,
    )
    return self._project_out(out, x.shape[-1]), carry

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
