"""Gated DeltaNet, a matrix-valued memory with the gated delta rule, as a sequence mixer.

    q, k, v = silu(convolution(W x))          q and k of length 1, for each head
    log α = -exp(log_rate) softplus(w_α x + step_bias)            β = σ(w_β x)
    S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ
    y = W_out (RMSNorm(S_tᵀ q_t / √K) ∘ silu(W_gate x))

Yang, Kautz & Hatamizadeh 2024 (arXiv 2412.06464), section 3.4 and figure 1, with the decays of
Mamba-2 (Dao & Gu 2024). `delta_rule` has the recurrence.
"""

from typing import NamedTuple

import chex
import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError
from valkyrie.models.layers import (
  RMSNorm,
  check_sizes,
  products,
  project,
  projections,
)
from valkyrie.models.recurrence.convolution import CausalConvolution, Tail
from valkyrie.models.recurrence.delta_rule import gated_delta_rule
from valkyrie.models.recurrence.time_constants import check_time_constants, rates_and_steps
from valkyrie.types import Array, DType


class DeltaCarry(NamedTuple):
  """tail: of the convolution; state: S [B, H, K, Z] float32."""

  tail: Tail
  state: Array


WRITE_GATES = {
  'sigmoid': jax.nn.sigmoid,
  'hard': lambda x: jnp.clip(2 * x - 0.5, 0, 1),
}


@gin.configurable
class GatedDeltaNet(hk.Module):
  """The Gated DeltaNet layer; see the module."""

  def __init__(
    self,
    heads: int,
    key_width: int,
    value_width: int,
    taps: int = 4,
    slice_size: int = 64,
    shortest: float = 10.0,
    horizon: float = 1000.0,
    largest_rate: float = 16.0,
    write_gate: str = 'sigmoid',
    name: str | None = None,
  ):
    """Configures the mixer.

    Args:
      heads: H.
      key_width: K, of the queries and keys of a head.
      value_width: Z, of the values of a head. The paper has HK = 3D/4 and HZ = 3D/2.
      taps: tokens that the convolution reads.
      slice_size: Q, tokens that are read at once, a power of two; it changes no result.
      shortest: the shortest 1 / step at initialization, in tokens.
      horizon: the longest one. They spread evenly in the logarithm; 10 and 1000 are the published
        steps of 0.1 and 0.001.
      largest_rate: the rates exp(log_rate) spread evenly from 1 to it, as in Mamba-2. A head's time
        constant is 1 / (step exp(log_rate)); at 1, all lie between `shortest` and `horizon`.
      write_gate: β, 'sigmoid' as published, or 'hard', min(max(2 x - 1/2, 0), 1). At a hard 0 a
        head holds what it has exactly, through any number of tokens; weight decay closes it.
      name: Haiku's.

    Raises:
      ConfigurationError: a number is out of its range.
    """
    super().__init__(name)
    check_sizes(
      'GatedDeltaNet',
      heads=heads,
      key_width=key_width,
      value_width=value_width,
      taps=taps,
      slice_size=slice_size,
    )
    if slice_size & (slice_size - 1):
      raise ConfigurationError(
        f'GatedDeltaNet.slice_size={slice_size} must be a power of two. Use 64.'
      )
    check_time_constants('GatedDeltaNet', shortest, horizon, largest_rate)
    if write_gate not in WRITE_GATES:
      raise ConfigurationError(
        f'GatedDeltaNet.write_gate={write_gate!r} is unknown. Use one of {list(WRITE_GATES)}.'
      )
    self._write_gate = WRITE_GATES[write_gate]
    self.causal = self.sequence_parallel = True
    self.dropout = 0.0
    self.horizon = horizon
    self._heads = heads
    self._keys = key_width
    self._values = value_width
    self._slice_size = slice_size
    self._shortest = shortest
    self._largest_rate = largest_rate
    self._convolution = CausalConvolution(taps)
    self._mixed_width = heads * (2 * key_width + value_width)

  def initial_carry(self, batch_size: int, dtype: DType) -> DeltaCarry:
    """The carry of the convolution, and the zero state: float32 or wider."""
    tail = self._convolution.initial_carry(batch_size, self._mixed_width, dtype)
    shape = (batch_size, self._heads, self._keys, self._values)
    return DeltaCarry(tail, jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32)))

  def forward_flops(self, width: int) -> int:
    """The products with weights, the convolution, and the products of whole slices."""
    k, v, q = self._keys, self._values, self._slice_size
    weights = width * (self._mixed_width + 2 * self._heads * (v + 1))
    # Sums of decays, the inverse, K Kᵀ and Q Kᵀ; then the products behind the inverse.
    slices = q * (2 * q + 2 * k) + q * (k + v) + k * (k + v) + k * k * v // q + v * (2 * k + q)
    return 2 * (weights + self._heads * slices) + self._convolution.forward_flops(self._mixed_width)

  def __call__(
    self, x: Array, carry: DeltaCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, DeltaCarry]:
    """Mixes a chunk x [B, T, D]; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    batch, time, width = x.shape
    chex.assert_shape(carry.state, (batch, self._heads, self._keys, self._values))
    keys, values = self._heads * self._keys, self._heads * self._values
    real = segment_ids > 0

    *qkv_weights, gate_weights = projections(
      x, ('embed', 'heads'), query=keys, key=keys, value=values, gate=values
    )
    qkv, gate = products(x, [qkv_weights, gate_weights])
    qkv, tail = self._convolution(qkv, carry.tail, positions=positions, segment_ids=segment_ids)
    q, k, v = (
      part.reshape(batch, time, self._heads, -1)
      for part in jnp.split(jax.nn.silu(qkv), (keys, 2 * keys), axis=-1)
    )
    log_decay, beta = (jnp.where(real[..., None], rate, 0) for rate in self._rates(x))
    y, state = gated_delta_rule(
      _unit(q, self._keys**-0.5),
      _unit(k),
      v.astype(log_decay.dtype),
      log_decay,
      beta,
      carry.state,
      (positions == 0) & real,
      slice_size=self._slice_size,
    )
    normed = RMSNorm(name='norm')(y.reshape(batch, -1, self._values)).reshape(batch, time, values)
    gated = (normed * jax.nn.silu(gate.astype(y.dtype))).astype(x.dtype)
    (out,) = project(gated, ('heads', 'embed'), out=width)
    return out, DeltaCarry(tail, state)

  def _rates(self, x: Array) -> tuple[Array, Array]:
    """log α and β of x [B, T, D], float32 [B, T, H]."""
    log_rate, step_bias = rates_and_steps(
      self._heads, self._shortest, self.horizon, self._largest_rate
    )
    weights = projections(x, ('embed', None), step=self._heads, beta=self._heads)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    step, beta = products(x, weights, out_dtype=wide)
    step = jax.nn.softplus(step + step_bias[None, None])
    return -jnp.exp(log_rate)[None, None] * step, self._write_gate(beta)


def _unit(x: Array, length: float = 1.0) -> Array:
  """x [..., K] at this length, in float32."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * (length * jax.lax.rsqrt(square + 1e-6))
