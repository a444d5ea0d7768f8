"""Time constants of a fresh recurrence: their range, and the parameters that begin with them."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.models.layers import parameter
from valkyrie.types import Array


def check_time_constants(
  owner: str, shortest: float, horizon: float, largest_rate: float = 1.0
) -> None:
  """Raises a ConfigurationError, naming the module `owner`, for an impossible range."""
  if not 0 < shortest <= horizon:
    raise ConfigurationError(
      f'{owner}.shortest={shortest:g} and {owner}.horizon={horizon:g}: time constants, in tokens, '
      'must be above 0, and the shortest not above the horizon.'
    )
  if largest_rate < 1:
    raise ConfigurationError(f'{owner}.largest_rate={largest_rate:g} must be at least 1.')


def inverse_softplus(y: Array) -> Array:
  """x with log(1 + exp(x)) = y, for y > 0."""
  return y + jnp.log(-jnp.expm1(-y))


def root(x: Array) -> Array:
  """sqrt(x) of the gain of an input, where x falls to 0 as a memory becomes endless.

  The slope of the root has no bound there. Below 1e-30 it is 0, where it would become NaN.
  """
  return jnp.sqrt(jnp.maximum(x, 1e-30))


def rates_and_steps(
  heads: int, shortest: float, horizon: float, largest_rate: float
) -> tuple[Array, Array]:
  """The parameters `log_rate` and `step_bias`, [H] each, of the calling module.

  The rates exp(log_rate) spread evenly from 1 to the largest one. The steps softplus(step_bias)
  spread evenly in the logarithm, from 1 / horizon to 1 / shortest (as Mamba-2's published code).
  """

  def log_rates(shape, dtype):
    return jnp.log(jax.random.uniform(hk.next_rng_key(), shape, dtype, 1, largest_rate))

  def step_biases(shape, dtype):
    low, high = np.log(shortest), np.log(horizon)
    drawn = jax.random.uniform(hk.next_rng_key(), shape, dtype, low, high)
    return inverse_softplus(jnp.exp(-drawn))

  axes = ('norm',)
  return (
    parameter('log_rate', (heads,), log_rates, axes=axes),
    parameter('step_bias', (heads,), step_biases, axes=axes),
  )
