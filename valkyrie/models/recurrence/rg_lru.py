"""The real-gated linear recurrent unit, RG-LRU (De et al. 2024, Griffin, section 2.4).

    r_t = σ(W_a x_t + b_a)                           i_t = σ(W_x x_t + b_x)
    log a_t = -c softplus(Λ) r_t                     c = 8
    h_t = a_t h_{t-1} + sqrt(1 - a_t²) (i_t ∘ x_t)

The state and the decays are real, one for each channel. W_a and W_x are block-diagonal. At the
first token of a document, h_t = i_t ∘ x_t, as in google-deepmind/recurrentgemma. `GatedRecurrence`
adds the projections, the convolution and the gate.
"""

import dataclasses
import math

import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.config.ranges import PositiveFloat, PositiveInt
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models.declarations import Declared
from valkyrie.models.layers import Module, broadcast, parameter
from valkyrie.models.precision import wide
from valkyrie.models.recurrence import scan, sharded_scan
from valkyrie.models.recurrence.time_constants import check_time_constants, inverse_softplus, root
from valkyrie.types import Array, DType

_C = 8.0
SPREADS = ('decay', 'log')
_GATES = ('recurrence', 'input')


@gin.configurable
@dataclasses.dataclass(eq=False)
class RGLRU(Module):
  """The RG-LRU. Its carry is the state, [B, F] float32.

  A time constant τ is meant at r = 1/2, where the gate starts on average: a = exp(-1/τ), and the
  a^c of the paper is exp(-2/τ). An open gate halves τ, and a closed one makes it infinite.

  Attributes:
    width: F, of the input and of the state.
    heads: the blocks of W_a and W_x; divides F.
    shortest: the shortest time constant at initialization, in tokens.
    horizon: the longest one. The defaults are the published range of a^c, 0.9 to 0.999.
    spread: 'decay': a^c is uniform in the range, as published, so that half of all time constants
      are below 2 `shortest`. 'log': they spread evenly in the logarithm, for a long horizon.
    scan_form: a key of `scan.FORMS`; None takes the fastest for the platform.
  """

  width: PositiveInt
  heads: PositiveInt
  shortest: PositiveFloat = -2 / math.log(0.9)
  horizon: PositiveFloat = -2 / math.log(0.999)
  spread: str = 'decay'
  scan_form: str | None = None

  causal = True
  sequence_parallel = True
  dropout = 0.0

  def __post_init__(self):
    super().__post_init__()
    check_time_constants(self)
    check_choice('RGLRU.spread', self.spread, SPREADS)
    check_choice('RGLRU.scan_form', self.scan_form, (None, *scan.FORMS))
    if self.width % self.heads:
      raise ConfigurationError(
        f'RGLRU.width={self.width} must be a multiple of RGLRU.heads={self.heads}: the blocks of '
        'the gates have equal sizes.'
      )

  def initial_carry(self, batch_size: int, dtype: DType) -> Array:
    """The zero state: float32 or wider, since rounding would accumulate."""
    return jnp.zeros((batch_size, self.width), wide(dtype))

  def forward_flops(self, width: int) -> int:
    """Two block-diagonal products, two gated inputs, and the recurrence (2)."""
    gates = 4 * width * width // self.heads
    return gates + 4 * width

  def __call__(
    self,
    x: Array,
    carry: Array,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Array]:
    """Mixes a chunk x [B, T, F]; see `types.SequenceMixer`."""
    if x.shape[-1] != self.width:
      raise ConfigurationError(
        f'RGLRU.width={self.width} differs from its input, of width {x.shape[-1]}. Set it to '
        'that, which is GatedRecurrence.width inside a GatedRecurrence.'
      )
    starts = positions == 0
    reset = starts.T
    is_token = segment_ids > 0
    length = jnp.sum(is_token, axis=1)
    x_over_time = jnp.swapaxes(x, 0, 1)
    recurrence_gate, input_gate = self._gates(x_over_time)
    rate = parameter('lambda', (self.width,), self._lambda_init, axes=('state',))
    token_rate = broadcast(jax.nn.softplus(rate), recurrence_gate)
    log_decay = -_C * token_rate * recurrence_gate
    wide_x = x_over_time.astype(wide(x.dtype))
    input_gain = gain(log_decay, reset)
    inputs = input_gain * input_gate * wide_x
    growth = jnp.expm1(log_decay)
    first = self.first_state(carry)
    inputs = scan.begun(growth, inputs, first, reset)
    states, next_carry = sharded_scan.scan_chunk(
      growth, inputs, carry, reset, length, x.dtype, form=self.scan_form
    )
    out = jnp.swapaxes(states, 0, 1)
    return out, next_carry

  def _gates(self, x: Array) -> list[Array]:
    """r and i of x [T, B, F], both [T, B, F] in float32 or wider."""
    block = self.width // self.heads
    dtype = wide(x.dtype)
    matrices = []
    for gate in _GATES:
      matrix = self._gate_matrix(gate, x.dtype)
      matrices.append(matrix)
    biases = []
    for gate in _GATES:
      bias = parameter(f'{gate}_bias', (self.width,), jnp.zeros, axes=('state',))
      biases.append(bias)
    rounded = jnp.concatenate(matrices, axis=2).astype(x.dtype)
    weights = rounded.astype(dtype)
    x_blocks = x.reshape(-1, self.heads, block)
    wide_blocks = x_blocks.astype(dtype)
    products = jnp.einsum('nhi,hij->nhj', wide_blocks, weights)
    driven = jnp.split(products, 2, axis=-1)
    activated = []
    for product, bias in zip(driven, biases, strict=True):
      logits = product.reshape(x.shape) + broadcast(bias, x)
      gate = jax.nn.sigmoid(logits)
      activated.append(gate)
    return activated

  def _gate_matrix(self, gate: str, cast: DType) -> Array:
    """The blocks of W_a or W_x, [heads, F / heads, F / heads]."""
    block = self.width // self.heads
    init = hk.initializers.RandomNormal(block**-0.5)
    shape = (self.heads, block, block)
    axes = ('heads', None, None)
    declared = Declared(init, axes, cast, in_blocks=True)
    return hk.get_parameter(f'{gate}_gate', shape, init=declared)

  def _lambda_init(self, shape, dtype) -> Array:
    """Λ where c softplus(Λ) / 2 is the reciprocal of a time constant in the range."""
    uniform = jax.random.uniform(hk.next_rng_key(), shape, dtype)
    fastest = 1 / self.shortest
    slowest = 1 / self.horizon
    if self.spread == 'log':
      ratio = fastest / slowest
      rate = slowest * ratio**uniform
    else:
      # a^c = exp(-2 rate) is uniform: by its distance to 1, which keeps the digits of slow ones.
      low = -math.expm1(-2 * slowest)
      high = -math.expm1(-2 * fastest)
      distance = low + (high - low) * uniform
      rate = -jnp.log1p(-distance) / 2
    softplus = 2 * rate / _C
    return inverse_softplus(softplus)


def gain(log_decay: Array, reset: Array) -> Array:
  """sqrt(1 - a²) of log a [T, B, F], and 1 where reset [T, B]."""
  # The factor keeps the variance of a long sum; a document starts without one. The published code
  # bounds the slope of the root by 1000, reached at time constants of millions of tokens. Here only
  # a closed gate, r = 0 in float32, has another slope: 0.
  starts = reset[..., None]
  square_gain = -jnp.expm1(2 * log_decay)
  return jnp.where(starts, 1.0, root(square_gain))
