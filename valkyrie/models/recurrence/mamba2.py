"""Mamba-2, a selective state space with one decay for each head, as a sequence mixer.

    z, x, B, C, Δ = projections of the input      x, B, C = silu(convolution(x, B, C))
    Δ_t = softplus(Δ_t + bias)      S_t = exp(-Δ_t exp(log_rate)) S_{t-1} + Δ_t B_t x_t^T
    y_t = S_t^T C_t + D x_t         output = RMSNorm(y ∘ silu(z)) W_out

Dao & Gu 2024 (arXiv 2405.21060), figure 6 and section 7, as `Mamba2` of state-spaces/mamba with
ngroups = 1 and without a bias in the convolution.
"""

import dataclasses

import chex
import gin
import jax
import jax.numpy as jnp

from valkyrie.models.layers import RMSNorm, check_sizes, parameter, project
from valkyrie.models.recurrence.convolution import ConvolvedCarry
from valkyrie.models.recurrence.ssd import ssd
from valkyrie.models.recurrence.time_constants import DecayingHeads
from valkyrie.types import Array


@gin.configurable
@dataclasses.dataclass(eq=False)
class Mamba2(DecayingHeads):
  """The Mamba-2 layer; its decays and steps are drawn as published by default.

  Attributes:
    head_width: K; H x K is twice the model width in the publication.
    state_size: P, rows of a head's state; all heads share B and C.

  The others are as in `DecayingHeads`.
  """

  head_width: int = 64
  state_size: int = 128

  def __post_init__(self):
    super().__post_init__()
    check_sizes('Mamba2', head_width=self.head_width, state_size=self.state_size)
    self._inner = self.heads * self.head_width
    self._convolved = self._inner + 2 * self.state_size
    self._state_shape = (self.state_size, self.head_width)

  def forward_flops(self, width: int) -> int:
    """The projections, the convolution, the state written and read, and the pairs of a slice."""
    projections = 2 * width * (2 * self._inner + self._convolved + self.heads)
    states = 4 * self.state_size * self._inner
    pairs = 2 * self.slice_size * (self.state_size + self._inner)
    return projections + self._convolution.forward_flops(self._convolved) + states + pairs

  def __call__(
    self, x: Array, carry: ConvolvedCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, ConvolvedCarry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    is_token = segment_ids > 0
    widths = {'z': self._inner, 'xbc': self._convolved, 'dt': self.heads}
    z, xbc, dt = project(x, ('embed', 'mlp'), **widths)
    xbc, tail = self._convolution(xbc, carry.tail, positions=positions, segment_ids=segment_ids)
    inner, b, c = jnp.split(jax.nn.silu(xbc), [self._inner, self._inner + self.state_size], axis=-1)
    inner = inner.reshape(*inner.shape[:2], self.heads, self.head_width)

    log_rate, step_bias = self._rates_and_steps()
    skip = parameter('skip', (self.heads,), jnp.ones, axes=('norm',))
    dt = jax.nn.softplus(dt.astype(wide) + step_bias[None, None])
    # A step of length zero changes no state.
    dt = jnp.where(is_token[..., None], dt, 0)
    y, state = ssd(
      (dt[..., None] * inner).astype(x.dtype),
      -jnp.exp(log_rate)[None, None] * dt,
      b,
      c,
      (positions == 0) & is_token,
      carry.state,
      slice_size=self.slice_size,
    )
    y += skip[None, None, :, None] * inner
    y = RMSNorm()(y.reshape(z.shape) * jax.nn.silu(z.astype(wide)))
    (out,) = project(y.astype(x.dtype), ('mlp', 'embed'), out=x.shape[-1])
    return out, ConvolvedCarry(tail, state)
