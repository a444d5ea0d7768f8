"""Products whose weights stay split in two dimensions, for layouts without `Partitioner.manual`.

A weight is split along its inputs over some mesh axes, y, and along its outputs over others, x.
Between products, the features of an activation are split over both:

    x [..., inputs / yx]   gathered over x:          [..., inputs / y]
    product                by each device:           [..., outputs / x], in parts of a sum over y
    the sum over y         each keeps its features:  [..., outputs / xy]

The next weight, split over x along its inputs, begins with these features. So what stands between
products, such as norms, recurrences and heads, has every token of a row and a share of the features
on each device, and is computed once. XLA splits it like the arrays around it.

A device sends for each token and feature, of the inputs and of the outputs, b (n - 1) / n² bytes
forwards and as many backwards, with b bytes a number and n devices along each axis; the inputs once
more where they are gathered again for the gradient of the weights. Weights that are also split over
the axes of rows are gathered over those.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from valkyrie.sharding import layer_weights, messages
from valkyrie.sharding.partitioner import Partitioner, current_partitioner
from valkyrie.types import Array, Axes

MeshAxes = tuple[str, ...]


def split_product(
  product: Callable[[Any, Any], Any],
  x: Any,
  weights: Any,
  axes: Axes,
  *,
  inputs: int = 0,
  rows: tuple[int, int] = (0, 0),
) -> Any:
  """`product(x, weights)`, in parts on each device if the weights are split; else as it is.

  Args:
    product: linear in x and in the weights, with a sum over input features. It casts the weights to
      the dtype of x.
    x: a pytree of activations [..., input features].
    weights: a pytree of matrices, each with these logical `axes`.
    inputs: the dimension of the matrices that is summed over.
    rows: the dimensions of x and of the result that have rows.

  Returns:
    A pytree of activations [..., output features].
  """
  partitioner = current_partitioner()
  if partitioner is None or partitioner.manual:
    return product(x, weights)
  over_rows = partitioner.axes_of('batch')
  split, gathered = _weight_axes(partitioner, axes)
  summed = split[inputs]
  kept = split[1 - inputs]
  if not summed and not kept:
    return product(x, weights)

  def divides(size: int, mesh_axes: tuple[str, ...]) -> bool:
    sizes = [partitioner.mesh.shape[axis] for axis in mesh_axes]
    return size % math.prod(sizes) == 0

  def splits_over_both(leaf: Array) -> bool:
    return divides(leaf.shape[-1], summed + kept)

  def spec(leaf, row, first, then):
    entries: list[tuple[str, ...]] = [()] * leaf.ndim
    if divides(leaf.shape[row], over_rows):
      entries[row] = over_rows
    entries[-1] = first
    if splits_over_both(leaf):
      entries[-1] = first + then
    return _spec(entries)

  result = jax.eval_shape(product, x, weights)
  inputs_split = jax.tree.map(splits_over_both, x)
  results_split = jax.tree.map(splits_over_both, result)
  dtype = jnp.result_type(*jax.tree.leaves(x))

  def gather(leaf, is_split):
    if not is_split:
      return leaf
    return messages.all_gather(leaf, kept, leaf.ndim - 1)

  def gather_weight(part):
    for dimension, mesh_axes in enumerate(gathered):
      if mesh_axes:
        part = layer_weights.gather(part, mesh_axes, dimension, dtype)
    return part

  def scatter(leaf, is_split):
    if not is_split:
      return lax.psum(leaf, summed)
    return messages.reduce_scatter(leaf, summed, leaf.ndim - 1)

  def product_of_device(x, weights):
    whole = jax.tree.map(gather, x, inputs_split)
    whole_weights = jax.tree.map(gather_weight, weights)
    parts = product(whole, whole_weights)
    return jax.tree.map(scatter, parts, results_split)

  rows_of_x, rows_of_result = rows
  x_specs = jax.tree.map(lambda leaf: spec(leaf, rows_of_x, summed, kept), x)
  result_specs = jax.tree.map(lambda leaf: spec(leaf, rows_of_result, kept, summed), result)
  pairs = zip(split, gathered, strict=True)
  weight_spec = _spec([split_axes + row_axes for split_axes, row_axes in pairs])
  split_over_devices = partitioner.shard_map(
    product_of_device,
    in_specs=(x_specs, weight_spec),
    out_specs=result_specs,
  )
  results = split_over_devices(x, weights)
  return jax.tree.map(lambda leaf: checkpoint_name(leaf, 'product'), results)


def _weight_axes(partitioner: Partitioner, axes: Axes) -> tuple[list[MeshAxes], list[MeshAxes]]:
  """The mesh axes over which each dimension of a weight stays split, and is gathered.

  It is gathered over axes that split rows. These come last, so that a part that is gathered over
  them has features that stand together.
  """
  over_rows = partitioner.axes_of('batch')
  split = []
  gathered = []
  for axis in axes:
    mesh_axes = partitioner.axes_of(axis or '')
    stays = tuple(name for name in mesh_axes if name not in over_rows)
    goes = tuple(name for name in mesh_axes if name in over_rows)
    split.append(stays)
    gathered.append(goes)
  return split, gathered


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
  """The PartitionSpec of these mesh axes of each dimension."""
  mesh_axes = [entry or None for entry in entries]
  return PartitionSpec(*mesh_axes)


def devices() -> int:
  """The number of devices that share what stands between products."""
  partitioner = current_partitioner()
  if partitioner is None or partitioner.manual:
    return 1
  return partitioner.mesh.size
