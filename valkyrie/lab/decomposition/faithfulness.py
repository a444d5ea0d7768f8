"""The distance of the factors of all sites from their matrices, and steps that reduce it."""

from collections.abc import Mapping

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import optax

from valkyrie.models.sites import Site, U, V
from valkyrie.types import Array, Params


def unfaithfulness(params: Params, sites: Mapping[str, Site]) -> Array:
  """The mean of (W - V U)² over all elements of all sites, float32 (D10)."""
  total = jnp.zeros(())
  count = 0
  for site in sites.values():
    w = lax.stop_gradient(site.target(params))
    v, u = site.factors(params)
    # One layer after the other: a device of a split model holds V U of one layer at a time.
    distances = lax.map(_layer_distance, (w, v, u))
    total += jnp.sum(distances)
    count += site.layers * site.d_in * site.d_out
  return total / float(count)  # an int32 could not hold the count


@jax.checkpoint
def _layer_distance(matrices: tuple[Array, Array, Array]) -> Array:
  """The sum of (W - V U)² of one layer."""
  w, v, u = matrices
  difference = w - v @ u
  return jnp.sum(jnp.square(difference))


def faithful(params: Params, sites: Mapping[str, Site], steps: int, rate: float) -> Params:
  """The parameters after steps of Adam on only `unfaithfulness`, which move the factors (D19)."""
  optimizer = optax.adam(rate)
  factors, rest = hk.data_structures.partition(_is_factor, params)

  def loss(factors):
    params = hk.data_structures.merge(factors, rest)
    return unfaithfulness(params, sites)

  def step(_, carry):
    factors, state = carry
    gradient = jax.grad(loss)(factors)
    updates, state = optimizer.update(gradient, state)
    return optax.apply_updates(factors, updates), state

  first_state = optimizer.init(factors)
  factors, _ = lax.fori_loop(0, steps, step, (factors, first_state))
  return hk.data_structures.merge(factors, rest)


def _is_factor(module: str, name: str, value: Array) -> bool:
  return name[-2:] in (V, U)
