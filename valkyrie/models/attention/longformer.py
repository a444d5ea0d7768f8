"""Longformer attention for causal language models, as a sequence mixer."""

from collections.abc import Sequence

import chex
import gin
import haiku as hk
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention import kv_cache, sliding_window
from valkyrie.models.attention.dilation import check_dilations
from valkyrie.models.attention.kv_cache import AttentionCarry
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.layers import project
from valkyrie.models.sizes import check_sizes
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType


def check_heads(of: str, heads: int, kv_heads: int, head_width: int, window: int) -> None:
  """Raises ConfigurationError, naming the module `of`, where the heads cannot be formed."""
  check_sizes(of, heads=heads, kv_heads=kv_heads, head_width=head_width)
  if heads % kv_heads or head_width % 2 or window < 1:
    raise ConfigurationError(
      f'{of}: heads={heads} must be a multiple of kv_heads={kv_heads}, '
      f'head_width={head_width} even, and window={window} at least 1.'
    )


@gin.configurable
class LongformerAttention(hk.Module):
  """Sliding window, registers and document starts in one softmax; see `attention`."""

  causal = True
  shards_of_time = True

  def __init__(
    self,
    heads: int,
    head_width: int,
    window: int,
    kv_heads: int | None = None,
    registers: int = 0,
    document_start: int = 0,
    dilations: Sequence[int] | None = None,
    slice_size: int = 128,
    dropout: float = 0.0,
    name: str | None = None,
  ):
    """Configures the mixer.

    Args:
      heads: H.
      head_width: K, even, since rotary positions turn pairs.
      window: W, how many tokens before itself a token sees.
      kv_heads: J, dividing H; None means H.
      registers: R, learned keys and values that every token reads.
      document_start: g, the first tokens of a document, which all of its later tokens read.
      dilations: d of each key-value head, which sees the distances d, 2d, ..., Wd; None means 1.
      slice_size: S, queries computed at once; memory grows with S x (W + S).
      dropout: the share of attention weights left out in training.
      name: Haiku's.

    Raises:
      ConfigurationError: where the heads cannot be formed.
    """
    super().__init__(name)
    kv_heads = kv_heads or heads
    check_heads('LongformerAttention', heads, kv_heads, head_width, window)
    check_sizes('LongformerAttention', slice_size=slice_size)
    check_sizes('LongformerAttention', 0, registers=registers, document_start=document_start)
    self.dilations = check_dilations(dilations, kv_heads, type(self).__name__)
    self.heads = heads
    self.head_width = head_width
    self.window = window
    self.reach = window * max(self.dilations)
    self.kv_heads = kv_heads
    self.registers = registers
    self.document_start = document_start
    self.slice_size = slice_size
    self.dropout = dropout

  def initial_carry(self, batch_size: int, dtype: DType) -> AttentionCarry:
    """An empty window, in the compute dtype: keys are stored as they were computed."""
    return kv_cache.empty_carry(
      batch_size, self.reach, self.document_start, self.kv_heads, self.head_width, dtype
    )

  def forward_flops(self, width: int) -> int:
    """Projections, then scores and sums over the W + 1 + G keys that a token reads."""
    read = self.window + 1 + self.registers + self.document_start
    projections = 4 * width * (self.heads + self.kv_heads) * self.head_width
    return projections + 4 * read * self.heads * self.head_width

  def __call__(
    self, x: Array, carry: AttentionCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, AttentionCarry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    chex.assert_shape(carry.window.keys, (x.shape[0], self.reach, self.kv_heads, self.head_width))

    def heads_of(projected):
      return projected.reshape(*x.shape[:2], -1, self.head_width)

    own, shared = self.heads * self.head_width, self.kv_heads * self.head_width
    q, k, v = map(heads_of, project(x, query=own, key=shared, value=shared))
    key = hk.maybe_next_rng_key() if self.dropout else None
    out, carry = sliding_window.sliding_window_attention(
      q,
      k,
      v,
      carry,
      positions=positions,
      segment_ids=segment_ids,
      registers=self._registers(),
      slice_size=self.slice_size,
      dilations=self.dilations,
      dropout=None if key is None else Dropout(sequence_parallel.apart(key), self.dropout),
    )
    (out,) = project(out.reshape(*x.shape[:2], own), out=x.shape[-1])
    return out, carry

  def _registers(self) -> tuple[Array, Array]:
    shape = (self.registers, self.kv_heads, self.head_width)
    if not self.registers:
      return jnp.zeros(shape), jnp.zeros(shape)
    init = hk.initializers.RandomNormal(1.0)
    return (
      hk.get_parameter('register_keys', shape, jnp.float32, init),
      hk.get_parameter('register_values', shape, jnp.float32, init),
    )
