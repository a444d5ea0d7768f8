"""Heads with windows over time, and Longformer attention for causal language models."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import ClassVar

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import NonNegativeInt, PositiveInt, ProperFraction
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models import kernel_choice
from valkyrie.models.attention import kernels
from valkyrie.models.attention.kv_cache import (
  AttentionCarry,
  KVCache,
  empty_carry,
  exchange_halo,
)
from valkyrie.models.attention.patterns import AttentionPattern, Sources, attention_pattern
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.attention.sliding_window import sliding_window_attention
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.attention.windows import Queries, windows_of
from valkyrie.models.layers import Module, RMSNorm, parameter, project
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType

QUERY_KEY_NORMS = (False, True, 'whole')


@dataclasses.dataclass(eq=False)
class WindowAttention(Module):
  """Heads with windows, and their projections: the base of the Longformer mixers.

  Attributes:
    heads: H.
    head_width: K, even, since rotary positions rotate pairs.
    window: W, the number of tokens before itself, or on each side, that a token sees.
    kv_heads: J, dividing H; None means H.
    dilations: d of each key-value head, which sees the distances d, 2d, ..., Wd; None means 1.
    document_start: g, the first tokens of a document: all of its later tokens read them.
    slice_size: S, queries computed at once; memory grows with S x (W + S).
    dropout: the share of attention weights zeroed in training.
    rotary: the class of the frequencies of positions (`Rotary.base = 500000.0` in gin).
    query_key_norm: queries and keys of each head have a root mean square of 1, times a learned
      scale, as in Qwen3 (Henry et al. 2020; Dehghani et al. 2023, section 2). 'whole' takes the
      root mean square over all heads, as in OLMo 2 (arXiv 2501.00656).
    output_gate: the heads' results are multiplied by σ(W_gate x) before the last projection, as in
      Qwen3.5 (Qiu et al. 2025, arXiv 2505.06708).
  """

  heads: PositiveInt
  head_width: PositiveInt
  window: PositiveInt
  kv_heads: PositiveInt | None = None
  dilations: Sequence[PositiveInt] | None = None
  document_start: NonNegativeInt = 0
  slice_size: PositiveInt = 128
  dropout: ProperFraction = 0.0
  rotary: Callable[[], Rotary] = Rotary
  query_key_norm: bool | str = False
  output_gate: bool = False

  def __post_init__(self):
    super().__post_init__()
    self._kv_heads = self.kv_heads or self.heads
    undilated = (1,) * self._kv_heads
    self._dilations = tuple(self.dilations or undilated)
    self._q_width = self.heads * self.head_width
    self._kv_width = self._kv_heads * self.head_width
    self._rotary = self.rotary()
    owner = type(self).__name__
    check_choice(f'{owner}.query_key_norm', self.query_key_norm, QUERY_KEY_NORMS)
    if self.heads % self._kv_heads or self.head_width % 2:
      raise ConfigurationError(
        f'{owner}: heads={self.heads} must be a multiple of kv_heads={self._kv_heads}, and '
        f'head_width={self.head_width} must be even.'
      )
    if len(self._dilations) != self._kv_heads:
      raise ConfigurationError(
        f'{owner}.dilations={self._dilations}: give one for each of the kv_heads={self._kv_heads}.'
      )
    windows = windows_of(self._dilations, self.heads, self.window, self.slice_size, self._rotary)
    self._windows = tuple(windows)

  @property
  def frequencies(self) -> Rotary:
    """What `rotary` made in the gin scope of this mixer."""
    return self._rotary

  @hk.transparent
  def _heads(
    self,
    q: Array,
    k: Array,
    v: Array,
    *,
    of: str = '',
  ) -> tuple[Array, Array, Array]:
    """[B, T, heads · K] -> [B, T, heads, K] each; `of` begins the names of the norms."""

    def by_head(x):
      rows, time, _ = x.shape
      return x.reshape(rows, time, -1, self.head_width)

    def normed(x, name):
      norm = RMSNorm(name=f'{of}{name}')
      return norm(x)

    is_whole = self.query_key_norm == 'whole'
    if is_whole:
      q = normed(q, 'query_norm')
      k = normed(k, 'key_norm')
    q = by_head(q)
    k = by_head(k)
    if self.query_key_norm and not is_whole:
      q = normed(q, 'query_norm')
      k = normed(k, 'key_norm')
    return q, k, by_head(v)

  @hk.transparent
  def _project_heads(self, x: Array) -> tuple[Array, Array, Array]:
    """x [B, T, D] -> queries [B, T, H, K], and keys and values [B, T, J, K]."""
    widths = {'query': self._q_width, 'key': self._kv_width, 'value': self._kv_width}
    q, k, v = project(x, ('embed', 'heads'), **widths)
    return self._heads(q, k, v)

  @hk.transparent
  def _project_out(self, out: Array, x: Array) -> Array:
    """The results of heads [B, T, H, K], and what the mixer reads [B, T, D] -> [B, T, D]."""
    rows, time, _, _ = out.shape
    joined = out.reshape(rows, time, -1)
    if self.output_gate:
      (gate,) = project(x, ('embed', 'heads'), gate=self._q_width)
      joined = joined * jax.nn.sigmoid(gate)
    (projected,) = project(joined, ('heads', 'embed'), out=x.shape[-1])
    return projected

  def _projection_flops(self, width: int, of_keys: int = 1) -> int:
    """Of one token: queries, results and their gate, and `of_keys` times keys and values."""
    wide = 2 + self.output_gate
    return 2 * width * (wide * self._q_width + 2 * of_keys * self._kv_width)

  def _dropout(self) -> Dropout | None:
    """Dropout of attention weights, in training."""
    key = hk.maybe_next_rng_key() if self.dropout else None
    if key is None:
      return None
    shard_key = sequence_parallel.fold_in_shard(key)
    return Dropout(shard_key, self.dropout)


@gin.configurable
@dataclasses.dataclass(eq=False)
class LongformerAttention(WindowAttention):
  """Sliding window, registers and document starts in one softmax; see `sliding_window`.

  Attributes, besides the ones of `WindowAttention`:
    registers: R, learned keys and values that every token reads.
    kernels: 'prefer' trains by a library's kernel where one agrees with this form; 'require' ends
      the run if none does; 'interpret' is for tests, on any device; None uses none.
  """

  registers: NonNegativeInt = 0
  kernels: str | None = None

  causal: ClassVar[bool] = True
  sequence_parallel: ClassVar[bool] = True

  @functools.cached_property  # Haiku wraps properties, which then need a transform
  def kernel_limits(self) -> kernel_choice.Limits:
    """Where its kernels run."""
    return kernels.limits(
      dropout=self.dropout,
      dilation=max(self._dilations),
      document_start=self.document_start,
      window=self.window,
    )

  def __post_init__(self):
    super().__post_init__()
    self.reach = self.window * max(self._dilations)
    check_choice(f'{type(self).__name__}.kernels', self.kernels, kernel_choice.CHOICES)

  def _uses_kernel(self, time: int) -> bool:
    """Whether a kernel reads a piece of `time` tokens."""
    return kernel_choice.is_used(self, time)

  def initial_carry(self, batch_size: int, dtype: DType) -> AttentionCarry:
    """An empty window, in the compute dtype: keys are stored as they were computed."""
    return empty_carry(
      batch_size, self.reach, self.document_start, self._kv_heads, self.head_width, dtype
    )

  def forward_flops(self, width: int) -> int:
    """Projections, then scores and sums over the W + 1 + G keys that a token reads."""
    keys = self.window + 1 + self.registers + self.document_start
    projections = self._projection_flops(width)
    scores_and_sums = 4 * keys * self._q_width
    return projections + scores_and_sums

  def __call__(
    self,
    x: Array,
    carry: AttentionCarry,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, AttentionCarry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    q, k, v = self._project_heads(x)
    dropout = self._dropout()
    choice = self.kernels if self._uses_kernel(x.shape[1]) else None
    windows = [seen._replace(kernels=choice) for seen in self._windows]
    out, carry = sliding_window_attention(
      q,
      k,
      v,
      carry,
      positions=positions,
      segment_ids=segment_ids,
      registers=self._registers(),
      windows=windows,
      dropout=dropout,
    )
    return self._project_out(out, x), carry

  @hk.name_like('__call__')
  def attention_pattern(
    self,
    at: np.ndarray,
    x: Array,
    carry: AttentionCarry,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> AttentionPattern:
    """The pattern of the queries `at`, int [S], of a chunk that `__call__` would mix."""
    q, k, v = self._project_heads(x)
    tokens = KVCache(k, v, segment_ids)
    if sequence_parallel.axes():
      length = jnp.sum(segment_ids > 0, axis=1)
      carry, _ = exchange_halo(carry, tokens, positions, length)
    register_keys, _ = self._registers()
    sources = Sources(register_keys, carry.starts, carry.window, tokens, positions)
    queries = Queries(q[:, at], positions[:, at], segment_ids[:, at])
    return attention_pattern(queries, at, sources, self._windows)

  @hk.transparent
  def _registers(self) -> tuple[Array, Array]:
    """The learned keys and values, [R, J, K] each."""
    shape = (self.registers, self._kv_heads, self.head_width)
    if not self.registers:
      nothing = jnp.zeros(shape)
      return nothing, nothing
    init = hk.initializers.RandomNormal(1.0)
    axes = (None, None, None)
    keys = parameter('register_keys', shape, init, axes=axes)
    values = parameter('register_values', shape, init, axes=axes)
    return keys, values
