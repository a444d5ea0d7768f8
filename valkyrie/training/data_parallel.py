"""The rows of a step, over many devices and in groups one after the other.

`shard_map_step` computes on every device with all weights, under `shard_map`:

    weights                 gathered once a step, cast parameters in the compute dtype
    rows, time              each device reads its own rows, and its own piece of every chunk
    gradients, float32      accumulated on each device, and reduce-scattered once a step to the
                            sharding of the parameters

No message inside a loop is as large as a parameter. XLA's partitioner would reduce the gradients of
the same step once for each layer and chunk (`Partitioner.manual` chooses). With
`Partitioner.gather_layers` the weights of layers stay split, and so do their gradients: each layer
gathers and scatters its own, once for each chunk and pass (see `layer_weights`).

`in_micro_batches` splits the rows of a device that do not fit into memory at once.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from valkyrie.models.model import Model
from valkyrie.sharding import ambient, messages, sequence_parallel
from valkyrie.sharding.partitioner import Partitioner, as_tuple, current_partitioner
from valkyrie.training.tbptt import Learns, learned_and_frozen, zero_gradients
from valkyrie.types import Array, Batch, Carry, Params

# The computation of one device, with all weights and its part of the other arguments, which are
# (params, carry, batch, total, rng, *, chunk_size) -> (gradients or (), the carry after the batch,
# sums); see `tbptt.gradients`.
Compute = Callable[..., tuple[Params, Carry, Any]]


def shard_map_step(
  compute: Compute,
  model: Model,
  params: Params,
  carry: Carry,
  batch: Batch,
  rng: Array | None = None,
  *,
  chunk_size: int,
  learns: Learns | None,
) -> tuple[Params, Carry, Any]:
  """`compute` over the devices of the current partitioner, if any.

  Args:
    params, carry, rng, chunk_size: the arguments of `compute`, over all devices.
    batch: [B, N·C].
    learns: the parameters whose gradients it returns; None for no gradients.

  Returns:
    The result of `compute` for the whole batch: gradients with the sharding of the parameters, and
    the sums of all devices.
  """
  partitioner = current_partitioner()
  if partitioner is None or not partitioner.manual or partitioner.mesh.size == 1:
    weight = jnp.sum(batch.weights)
    total = _at_least_one(weight)
    return compute(params, carry, batch, total, rng, chunk_size=chunk_size)
  everywhere = partitioner.mesh.axis_names
  rows = partitioner.axes_of('batch')
  time = partitioner.axes_of('time')

  def specs(tree, axes):
    shardings = partitioner.shardings(tree, axes)
    return jax.tree.map(lambda sharding: sharding.spec, shardings)

  parameter_axes = model.parameter_axes(partitioner.parameter_axes)
  shards = specs(params, parameter_axes)
  kept = _kept_split(model, partitioner, params)
  held = jax.tree.map(lambda keep, shard: shard if keep else PartitionSpec(), kept, shards)

  def learned_part(tree):
    if learns is None:
      return ()
    learned, _ = learned_and_frozen(tree, learns)
    return learned

  learned = learned_part(shards)

  def of_device(params, carry, batch, rng):
    if rng is not None and rows:
      rng = jax.random.fold_in(rng, lax.axis_index(rows))
    with ambient.within(time=time, weights=partitioner.weight_axes()):
      batch, size = _local_pieces(batch, chunk_size)
      weight = jnp.sum(batch.weights)
      total = _at_least_one(lax.psum(weight, everywhere))
      gradient, carry, sums = compute(params, carry, batch, total, rng, chunk_size=size)
      carry = sequence_parallel.broadcast_carry(carry)
    if learns is not None:
      reduce_scatter = functools.partial(_reduce_scatter, over=everywhere)
      gradient = jax.tree.map(reduce_scatter, gradient, learned, learned_part(kept))
    all_sums = lax.psum(sums, everywhere)
    return gradient, carry, all_sums

  carries = specs(carry, model.carry_axes(carry))
  batches = partitioner.batch_sharding().spec
  step_of_devices = partitioner.shard_map(
    of_device,
    in_specs=(held, carries, batches, PartitionSpec()),
    out_specs=(learned, carries, PartitionSpec()),
  )
  return step_of_devices(gather_params(model, params), carry, batch, rng)


def in_micro_batches(
  compute: Compute,
  model: Model,
  count: int,
  learns: Learns,
  params: Params,
  carry: Carry,
  batch: Batch,
  total: Array,
  rng: Array | None,
  *,
  chunk_size: int,
) -> tuple[Params, Carry, Any]:
  """`compute` over `count` groups of rows; gradients and sums are added up.

  Every group divides its loss by the weight of the whole step, so the gradient is the same as for
  all rows at once, from less memory. Dropout draws other numbers than without groups.

  Args:
    compute: see `Compute`.
    learns: the parameters whose gradients it returns.
    params, carry, batch, total, rng, chunk_size: its arguments, of all rows.

  Returns:
    The result of `compute` for all rows.
  """
  if count == 1:
    return compute(params, carry, batch, total, rng, chunk_size=chunk_size)

  def is_axes(leaf):
    return isinstance(leaf, tuple) and 'batch' in leaf

  carry_axes = model.carry_axes(carry)
  batch_axes = jax.tree.map(lambda axes: axes.index('batch'), carry_axes, is_leaf=is_axes)

  def split(x, axis):
    # [..., B, ...] -> [count, ..., B / count, ...]. Group m has the rows m, m + count, ...: with
    # rows over devices, each device keeps its own.
    leading = x.shape[:axis]
    trailing = x.shape[axis + 1 :]
    rows = x.shape[axis] // count
    parts = x.reshape(*leading, rows, count, *trailing)
    return jnp.moveaxis(parts, axis + 1, 0)

  def join(parts, axis):
    x = jnp.moveaxis(parts, 0, axis + 1)
    leading = x.shape[:axis]
    trailing = x.shape[axis + 2 :]
    return x.reshape(*leading, -1, *trailing)

  def add_group(gradient, group):
    number, carry, batch = group
    key = None
    if rng is not None:
      key = jax.random.fold_in(rng, number)
    more, carry, sums = compute(params, carry, batch, total, key, chunk_size=chunk_size)
    return jax.tree.map(jnp.add, gradient, more), (carry, sums)

  groups = (
    jnp.arange(count),
    jax.tree.map(split, carry, batch_axes),
    jax.tree.map(lambda leaf: split(leaf, 0), batch),
  )
  learning, _ = learned_and_frozen(params, learns)
  nothing = zero_gradients(learning)
  gradient, (carries, sums) = lax.scan(add_group, nothing, groups)
  carry = jax.tree.map(join, carries, batch_axes)
  total_sums = jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums)
  return gradient, carry, total_sums


def gather_params(model: Model, params: Params) -> Params:
  """The weights with which a step begins: replicated and cast, but for those that layers gather."""
  partitioner = current_partitioner()
  if partitioner is None or not partitioner.manual:
    return params
  kept = _kept_split(model, partitioner, params)
  whole = partitioner.sharding(())

  def gather(keep, leaf, cast):
    if keep:
      return leaf
    return jax.lax.with_sharding_constraint(cast, whole)

  return jax.tree.map(gather, kept, params, model.cast(params))


def _kept_split(model: Model, partitioner: Partitioner, params: Params) -> Any:
  """Whether the layers gather a parameter: a pytree like `params`."""
  declared = model.parameters()
  axes = model.parameter_axes(partitioner.parameter_axes)

  def kept(module, name, _):
    own = axes[module][name]
    declared_axes = declared[module][name].axes
    of_layer = declared_axes is not None and 'layers' in own
    is_split = any(partitioner.axes_of(axis) for axis in own if axis)
    return partitioner.gather_layers and of_layer and is_split

  return hk.data_structures.map(kept, params)


def _local_pieces(batch: Batch, chunk_size: int) -> tuple[Batch, int]:
  """This device's piece of each chunk of a batch [B, N·C], joined, and the size of a piece."""
  if not sequence_parallel.axes():
    return batch, chunk_size
  size = chunk_size // sequence_parallel.size()

  def pieces(x):
    cut = x.reshape(x.shape[0], -1, sequence_parallel.size(), size)
    index = sequence_parallel.index()
    own = lax.dynamic_index_in_dim(cut, index, axis=2, keepdims=False)
    return own.reshape(x.shape[0], -1)

  return jax.tree.map(pieces, batch), size


def _at_least_one(weight: Array) -> Array:
  """The weight, or 1 for a step of only padding, whose gradient is then zero instead of NaN."""
  return jnp.maximum(weight, 1.0)


def _reduce_scatter(
  gradient: Array,
  shard: PartitionSpec,
  scattered: bool,
  *,
  over: Sequence[str],
) -> Array:
  """The sum over all devices; each keeps its shard of the parameter."""
  for dimension, axes in enumerate(shard):
    if axes is None:
      continue
    shard_axes = as_tuple(axes)
    if not scattered:
      gradient = messages.reduce_scatter(gradient, shard_axes, dimension)
    over = [axis for axis in over if axis not in shard_axes]
  if not over:
    return gradient
  return lax.psum(gradient, tuple(over))
