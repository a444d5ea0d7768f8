"""The distance of the factors of all sites from their matrices, and steps that reduce it.

The distance does not depend on tokens, so devices that hold parts of all weights divide the work by
layers: each first exchanges its parts of all layers for larger parts of its own layers. A device
then sends about as many bytes as it holds, where a gather would send it every weight.
"""

from collections.abc import Callable, Mapping, Sequence
import math

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import optax

from valkyrie.models.sites import Site, U, V
from valkyrie.sharding import layer_weights
from valkyrie.sharding.partitioner import Partitioner, current_partitioner
from valkyrie.types import Array, Params


def unfaithfulness(params: Params, sites: Mapping[str, Site]) -> Array:
  """The mean of (W - V U)² over all elements of all sites, float32 (D10)."""
  total = jnp.zeros(())
  count = 0
  for site in sites.values():
    w = lax.stop_gradient(site.target(params))
    v, u = site.factors(params)
    total += jnp.sum(_distances(site, w, v, u))
    count += site.layers * site.d_in * site.d_out
  return total / float(count)  # an int32 could not hold the count


def _distances(site: Site, w: Array, v: Array, u: Array) -> Array:
  """Numbers whose sum is the sum of (W - V U)² of all layers."""
  partitioner = current_partitioner()
  if partitioner is None:
    return _by_layer(_distance, w, v, u)
  axes = partitioner.weight_axes()
  split = [bool(axes) and partitioner.axes_of(axis or '') == axes for axis in site.axes]
  if not any(split):
    return _by_layer(_distance, w, v, u)
  # W and one factor are split along the inputs or the outputs, and the other factor along the
  # components: all three along the first, or all along the second dimension of a layer.
  dimension = split.index(True)
  by_layers, others = _division(partitioner, site.layers)

  def of_device(*parts):
    own = [_own_layers(part, by_layers, 1 + dimension) for part in parts]

    def distance(w, v, u):
      if dimension == 0:
        return _distance(w, v, layer_weights.gather(u, others, 0, u.dtype))
      return _distance(w, layer_weights.gather(v, others, 1, v.dtype), u)

    return jnp.sum(_by_layer(distance, *own))[None]

  whole_dimensions = (None,) * (1 + dimension)
  specs = (PartitionSpec(*whole_dimensions, axes),) * 3
  return partitioner.shard_map(of_device, specs, PartitionSpec(axes))(w, v, u)


def _division(partitioner: Partitioner, layers: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """The mesh axes over which the layers are divided, and the others of the weights.

  They are the last ones, so that the parts of a layer that meet on a device are neighbors, and at
  most two, see `messages`.
  """
  axes = partitioner.weight_axes()
  by_layers = axes[-2:]
  while layers % math.prod(partitioner.mesh.shape[axis] for axis in by_layers):
    by_layers = by_layers[1:]
  count_of_others = len(axes) - len(by_layers)
  return by_layers, axes[:count_of_others]


def _own_layers(part: Array, over: Sequence[str], dimension: int) -> Array:
  """Parts of all layers, exchanged for larger parts of a device's own layers."""
  if not over:
    return part
  return lax.all_to_all(part, over, split_axis=0, concat_axis=dimension, tiled=True)


def _by_layer(distance: Callable[..., Array], w: Array, v: Array, u: Array) -> Array:
  """The distance of each layer."""
  # One layer after the other: a device of a split model holds V U of one layer at a time.
  return lax.map(jax.checkpoint(lambda matrices: distance(*matrices)), (w, v, u))


def _distance(w: Array, v: Array, u: Array) -> Array:
  """The sum of (W - V U)² of one layer."""
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
