"""Time constants of a fresh recurrence, and the base of mixers whose heads decay as in Mamba-2."""

import dataclasses
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import Factor, PositiveFloat, PositiveInt
from valkyrie.errors import ConfigurationError
from valkyrie.models.layers import Module, parameter
from valkyrie.models.precision import wide
from valkyrie.models.recurrence.convolution import CausalConvolution, ConvolvedCarry
from valkyrie.types import Array, DType


@dataclasses.dataclass(eq=False)
class DecayingHeads(Module):
  """Heads with matrices as states, which decay by exp(-step · rate), behind a convolution.

  Attributes:
    heads: H.
    taps: tokens that the convolution reads.
    convolution_bias: whether the convolution adds a learned bias.
    slice_size: tokens that are read at once; it changes only rounding and time.
    shortest: the smallest 1 / step at initialization, in tokens.
    horizon: the largest one. They spread evenly in the logarithm; 10 and 1000 are the published
      steps of 0.1 and 0.001.
    largest_rate: the rates spread evenly from 1 to it. A head's time constant is 1 / (step · rate);
      at 1, all lie between `shortest` and `horizon`.
  """

  heads: PositiveInt
  _: dataclasses.KW_ONLY
  taps: PositiveInt = 4
  convolution_bias: bool = False
  slice_size: PositiveInt = 64
  shortest: PositiveFloat = 10.0
  horizon: PositiveFloat = 1000.0
  largest_rate: Factor = 16.0

  causal = True
  sequence_parallel = True
  dropout = 0.0

  def __post_init__(self):
    super().__post_init__()
    check_time_constants(self)
    self._convolution = CausalConvolution(self.taps, self.convolution_bias)
    # A subclass sets the channels of the convolution, and the shape of a row's states, whose first
    # axis has the heads that decay.
    self._convolved = 0
    self._state_shape = (0, 0, 0)

  def initial_carry(self, batch_size: int, dtype: DType) -> ConvolvedCarry:
    """Zeros; the state is float32 or wider, since rounding would accumulate."""
    tail = self._convolution.initial_carry(batch_size, self._convolved, dtype)
    state = jnp.zeros((batch_size, *self._state_shape), wide(dtype))
    return ConvolvedCarry(tail, state)

  def _rates_and_steps(self) -> tuple[Array, Array]:
    """(log_rate, step_bias) of each head that decays; steps begin near softplus(step_bias)."""
    shape = self._state_shape[:1]

    def log_rates(shape, dtype):
      key = hk.next_rng_key()
      rates = jax.random.uniform(key, shape, dtype, 1, self.largest_rate)
      return jnp.log(rates)

    def step_biases(shape, dtype):
      key = hk.next_rng_key()
      low = np.log(self.shortest)
      high = np.log(self.horizon)
      log_time_constants = jax.random.uniform(key, shape, dtype, low, high)
      steps = jnp.exp(-log_time_constants)
      return inverse_softplus(steps)

    log_rate = parameter('log_rate', shape, log_rates, axes=('norm',))
    step_bias = parameter('step_bias', shape, step_biases, axes=('norm',))
    return log_rate, step_bias


def inverse_softplus(y: Array) -> Array:
  """x with log(1 + exp(x)) = y, for y > 0."""
  complement = -jnp.expm1(-y)  # 1 - exp(-y)
  return y + jnp.log(complement)


def root(x: Array) -> Array:
  """sqrt(x) of the gain of an input, where x falls to 0 as a memory becomes endless."""
  # The slope has no bound at 0: below 1e-30 it is 0, where it would become NaN.
  return jnp.sqrt(jnp.maximum(x, 1e-30))


def check_time_constants(mixer: Any) -> None:
  """Raises a ConfigurationError if a mixer's `horizon` is below its `shortest` time constant."""
  owner = type(mixer).__name__
  shortest = mixer.shortest
  horizon = mixer.horizon
  if shortest > horizon:
    raise ConfigurationError(
      f'{owner}.shortest={shortest:g} and {owner}.horizon={horizon:g}: the shortest time constant '
      'must not be above the horizon.'
    )
