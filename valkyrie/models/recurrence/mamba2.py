"""Mamba-2, a selective state space with one decay for each head, as a sequence mixer.

    z, x, B, C, Δ = projections of the input      x, B, C = silu(convolution(x, B, C))
    Δ_t = softplus(Δ_t + bias)      S_t = exp(-Δ_t exp(log_rate)) S_{t-1} + Δ_t B_t x_t^T
    y_t = S_t^T C_t + D x_t         output = RMSNorm(y ∘ silu(z)) W_out

Dao & Gu 2024 (arXiv 2405.21060), figure 6 and section 7, as `Mamba2` of state-spaces/mamba with
ngroups = 1 and without a bias in the convolution.
"""

import dataclasses
from typing import NamedTuple

import chex
import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.models.layers import RMSNorm, check_sizes, parameter, project
from valkyrie.models.recurrence.convolution import CausalConvolution, Tail
from valkyrie.models.recurrence.ssd import ssd
from valkyrie.models.recurrence.time_constants import check_time_constants, rates_and_steps
from valkyrie.types import Array, DType


class Mamba2Carry(NamedTuple):
  """tail: of the convolution; state: [B, H, P, K] float32."""

  tail: Tail
  state: Array


@gin.configurable
@dataclasses.dataclass(eq=False)
class Mamba2(hk.Module):
  """The Mamba-2 layer; its decays and steps are drawn as published by default.

  Attributes:
    heads: H. Each has a decay of its own.
    head_width: K; H x K is twice the model width in the publication.
    state_size: P, rows of a head's state; all heads share B and C.
    taps: tokens that the convolution reads.
    horizon: the longest time constant at initialization, in tokens: the largest 1 / Δ.
    shortest: the smallest 1 / Δ. They spread evenly in the logarithm; 10 and 1000 are the published
      steps of 0.1 and 0.001.
    largest_rate: the rates exp(log_rate) spread evenly from 1 to it. A head's time constant is
      1 / (Δ exp(log_rate)); at 1, all lie between `shortest` and `horizon`.
    slice_size: tokens whose pairs are computed at once; changes rounding and time only.
    name: Haiku's.

  Raises:
    ConfigurationError: a number is out of its range.
  """

  heads: int
  head_width: int = 64
  state_size: int = 128
  taps: int = 4
  horizon: float = 1000.0
  shortest: float = 10.0
  largest_rate: float = 16.0
  slice_size: int = 64
  name: str | None = None

  causal = True
  sequence_parallel = True
  dropout = 0.0

  def __post_init__(self):
    super().__post_init__()
    sizes = {n: getattr(self, n) for n in ('heads', 'head_width', 'state_size', 'slice_size')}
    check_sizes('Mamba2', **sizes)
    check_time_constants('Mamba2', self.shortest, self.horizon, self.largest_rate)
    self._inner = self.heads * self.head_width
    self._convolved = self._inner + 2 * self.state_size
    self.convolution = CausalConvolution(self.taps)

  def initial_carry(self, batch_size: int, dtype: DType) -> Mamba2Carry:
    """Zeros; the state is float32 or wider, since rounding would accumulate."""
    shape = (batch_size, self.heads, self.state_size, self.head_width)
    state = jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))
    return Mamba2Carry(self.convolution.initial_carry(batch_size, self._convolved, dtype), state)

  def forward_flops(self, width: int) -> int:
    """The projections, the convolution, the state written and read, and the pairs of a slice."""
    projections = 2 * width * (2 * self._inner + self._convolved + self.heads)
    states = 4 * self.state_size * self._inner
    pairs = 2 * self.slice_size * (self.state_size + self._inner)
    return projections + self.convolution.forward_flops(self._convolved) + states + pairs

  def __call__(
    self, x: Array, carry: Mamba2Carry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, Mamba2Carry]:
    """Mixes a chunk; see `types.SequenceMixer`."""
    chex.assert_rank(x, 3)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    is_token = segment_ids > 0
    widths = {'z': self._inner, 'xbc': self._convolved, 'dt': self.heads}
    z, xbc, dt = project(x, ('embed', 'mlp'), **widths)
    xbc, tail = self.convolution(xbc, carry.tail, positions=positions, segment_ids=segment_ids)
    inner, b, c = jnp.split(jax.nn.silu(xbc), [self._inner, self._inner + self.state_size], axis=-1)
    inner = inner.reshape(*inner.shape[:2], self.heads, self.head_width)

    log_rate, step_bias, skip = self._parameters()
    dt = jax.nn.softplus(dt.astype(wide) + step_bias[None, None])
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
    return out, Mamba2Carry(tail, state)

  def _parameters(self) -> tuple[Array, Array, Array]:
    """A_log, the bias of the steps, and D, each [H]."""
    log_rate, step_bias = rates_and_steps(
      self.heads, self.shortest, self.horizon, self.largest_rate
    )
    return log_rate, step_bias, parameter('skip', (self.heads,), jnp.ones, axes=('norm',))
