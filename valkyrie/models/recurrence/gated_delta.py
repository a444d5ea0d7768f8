"""Gated DeltaNet, a matrix-valued memory with the gated delta rule, as a sequence mixer.

    q, k, v = silu(convolution(W x))          q and k of length 1, for each head
    log α = -exp(log_rate) softplus(w_α x + step_bias)            β = σ(w_β x)
    S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ           S [K, Z]
    y = W_out (RMSNorm(S_tᵀ q_t / √K) ∘ silu(W_gate x))

Yang, Kautz & Hatamizadeh 2024 (arXiv 2412.06464), section 3.4 and figure 1, with the decays of
Mamba-2 (Dao & Gu 2024). `delta_rule` computes the recurrence.
"""

import dataclasses

import chex
import gin
import jax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models.layers import RMSNorm, check_sizes, products, project, projections
from valkyrie.models.recurrence.convolution import ConvolvedCarry
from valkyrie.models.recurrence.delta_rule import gated_delta_rule
from valkyrie.models.recurrence.time_constants import DecayingHeads
from valkyrie.types import Array

WRITE_GATES = {
  'sigmoid': jax.nn.sigmoid,
  'hard': lambda x: jnp.clip(2 * x - 0.5, 0, 1),
  'double': lambda x: 2 * jax.nn.sigmoid(x),
}


@gin.configurable
@dataclasses.dataclass(eq=False)
class GatedDeltaNet(DecayingHeads):
  """The Gated DeltaNet layer; see the module.

  Attributes, besides the ones of `DecayingHeads`, whose `slice_size` is Q, a power of two:
    key_width: K, of the queries and keys of a head.
    value_width: Z, of the values of a head. The paper has HK = 3D/4 and HZ = 3D/2.
    write_gate: β, 'sigmoid' as published, 'hard', min(max(2 x - 1/2, 0), 1), or 'double', 2 σ(x).
      At a hard 0 a head keeps its state exactly, through any number of tokens; weight decay closes
      it. Above 1, I - β k kᵀ has a negative eigenvalue, which tracks parities and swaps (Grazzi et
      al. 2024, arXiv 2411.12537).
  """

  key_width: int
  value_width: int
  write_gate: str = 'sigmoid'

  def __post_init__(self):
    super().__post_init__()
    check_sizes('GatedDeltaNet', key_width=self.key_width, value_width=self.value_width)
    check_choice('GatedDeltaNet.write_gate', self.write_gate, WRITE_GATES)
    if self.slice_size & (self.slice_size - 1):
      raise ConfigurationError(
        f'GatedDeltaNet.slice_size={self.slice_size} must be a power of two. Use 64.'
      )
    self._convolved = self.heads * (2 * self.key_width + self.value_width)
    self._state_shape = (self.key_width, self.value_width)

  def forward_flops(self, width: int) -> int:
    """The products with weights, the convolution, and the products of whole slices."""
    k, z, q = self.key_width, self.value_width, self.slice_size
    weights = width * (self._convolved + 2 * self.heads * (z + 1))
    # Sums of decays, the inverse, K Kᵀ and Q Kᵀ; then the products behind the inverse.
    slices = q * (2 * q + 2 * k) + q * (k + z) + k * (k + z) + k * k * z // q + z * (2 * k + q)
    return 2 * (weights + self.heads * slices) + self._convolution.forward_flops(self._convolved)

  def __call__(
    self, x: Array, carry: ConvolvedCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, ConvolvedCarry]:
    """Mixes a chunk x [B, T, D]; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    batch, time, width = x.shape
    chex.assert_shape(carry.state, (batch, self.heads, *self._state_shape))
    keys, values = self.heads * self.key_width, self.heads * self.value_width
    is_token = segment_ids > 0

    *qkv_weights, gate_weights = projections(
      x, ('embed', 'heads'), query=keys, key=keys, value=values, gate=values
    )
    qkv, gate = products(x, [qkv_weights, gate_weights])
    qkv, tail = self._convolution(qkv, carry.tail, positions=positions, segment_ids=segment_ids)
    q, k, v = (
      part.reshape(batch, time, self.heads, -1)
      for part in jnp.split(jax.nn.silu(qkv), (keys, 2 * keys), axis=-1)
    )
    # Padding neither decays nor writes: log α = β = 0.
    log_decay, beta = (jnp.where(is_token[..., None], rate, 0) for rate in self._decays(x))
    y, state = gated_delta_rule(
      _unit(q, self.key_width**-0.5),
      _unit(k),
      v.astype(log_decay.dtype),
      log_decay,
      beta,
      carry.state,
      (positions == 0) & is_token,
      slice_size=self.slice_size,
    )
    y = y.reshape(batch, -1, self.value_width)
    normed = RMSNorm(name='norm')(y).reshape(batch, time, values)
    gated = (normed * jax.nn.silu(gate.astype(y.dtype))).astype(x.dtype)
    (out,) = project(gated, ('heads', 'embed'), out=width)
    return out, ConvolvedCarry(tail, state)

  def _decays(self, x: Array) -> tuple[Array, Array]:
    """log α and β of x [B, T, D], float32 [B, T, H]."""
    log_rate, step_bias = self._rates_and_steps()
    weights = projections(x, ('embed', None), step=self.heads, beta=self.heads)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    step, beta = products(x, weights, out_dtype=wide)
    step = jax.nn.softplus(step + step_bias[None, None])
    return -jnp.exp(log_rate)[None, None] * step, WRITE_GATES[self.write_gate](beta)


def _unit(x: Array, length: float = 1.0) -> Array:
  """x [..., K] at this length, in float32."""
  x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * (length * jax.lax.rsqrt(square + 1e-6))
