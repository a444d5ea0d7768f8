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
    # One layer after the other: a device of a split model holds V U of one layer at a time.
    of_layer = jax.checkpoint(lambda now: jnp.sum(jnp.square(now[0] - now[1] @ now[2])))
    layers = lax.stop_gradient(site.target(params)), *site.factors(params)
    total += jnp.sum(lax.map(of_layer, layers))
    count += site.layers * site.d_in * site.d_out
  return total / float(count)  # more than an int32 holds


def faithful(params: Params, sites: Mapping[str, Site], steps: int, rate: float) -> Params:
  """The parameters after steps of Adam on only `unfaithfulness`, which move the factors (D19)."""
  optimizer = optax.adam(rate)
  slope = jax.grad(lambda factors, rest: unfaithfulness(merge(factors, rest), sites))

  def step(_, carry):
    factors, state = carry
    updates, state = optimizer.update(slope(factors, rest), state)
    return optax.apply_updates(factors, updates), state

  factors, rest = hk.data_structures.partition(lambda _, name, __: name[-2:] in (V, U), params)
  merge = hk.data_structures.merge
  factors, _ = lax.fori_loop(0, steps, step, (factors, optimizer.init(factors)))
  return merge(factors, rest)
