"""A step over many devices, each of which computes on its own.

    weights                 gathered once a step, matrices in the compute dtype
    rows, time              each device reads its own rows, and its own stretch of every chunk
    gradients, float32      added up on each device, and reduced once a step to where the
                            parameters are held

Nothing that is as large as the parameters moves inside a loop. What XLA's partitioner would make of
the same step moves gradients once a layer and chunk (`Partitioner.local` chooses).
"""

from collections.abc import Sequence
import functools
from typing import Any, Protocol

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from valkyrie.models.language_model import Model
from valkyrie.sharding import partitioner, sequence_parallel
from valkyrie.types import Array, Batch, Carry, Params


class Compute(Protocol):
  """What is done on a device, with all weights and with what it holds of the rest."""

  def __call__(
    self,
    params: Params,
    carry: Carry,
    batch: Batch,
    total: Array,
    rng: Array | None,
    *,
    chunk_size: int,
  ) -> tuple[Params, Carry, Any]:
    """-> (gradients or (), the carry after the batch, sums); see `tbptt.gradients`."""
    ...


def spread(
  compute: Compute,
  model: Model,
  params: Params,
  carry: Carry,
  batch: Batch,
  rng: Array | None = None,
  *,
  chunk_size: int,
  backwards: bool,
) -> tuple[Params, Carry, Any]:
  """`compute` over the devices of the `Partitioner.partition` that this is traced in, if any.

  Args:
    compute: what one device does.
    model: the pure functions of the model.
    params, carry, rng, chunk_size: the arguments of `compute`, over all devices.
    batch: [B, N·C].
    backwards: whether it returns gradients.

  Returns:
    What `compute` would return of the whole batch: gradients lie as the parameters do, sums are
    those of all devices.
  """
  layout = partitioner.current()
  if layout is None or not layout.local or layout.mesh.size == 1:
    total = _at_least_one(jnp.sum(batch.weights))
    return compute(params, carry, batch, total, rng, chunk_size=chunk_size)
  everywhere = layout.mesh.axis_names
  shards = layout.specs('params', params) if backwards else ()
  rows, time = layout.axes_of('batch'), layout.axes_of('time')

  def of_device(params, carry, batch, rng):
    if rng is not None and rows:
      rng = jax.random.fold_in(rng, lax.axis_index(rows))
    with sequence_parallel.over(time):
      batch, size = _pieces(batch, chunk_size)
      total = _at_least_one(lax.psum(jnp.sum(batch.weights), everywhere))
      gradient, carry, sums = compute(params, carry, batch, total, rng, chunk_size=size)
      carry = sequence_parallel.settle(carry)
    gradient = jax.tree.map(functools.partial(_reduced, over=everywhere), gradient, shards)
    return gradient, carry, lax.psum(sums, everywhere)

  carries, batches = layout.specs('carry', carry), layout.batch_sharding().spec
  return layout.on_each_device(
    of_device,
    in_specs=(PartitionSpec(), carries, batches, PartitionSpec()),
    out_specs=(shards, carries, PartitionSpec()),
  )(gathered(model, params), carry, batch, rng)


def gathered(model: Model, params: Params) -> Params:
  """What each device computes with: all weights, wherever that is what the layout wants."""
  layout = partitioner.current()
  if layout is None or not layout.local:
    return params
  return layout.whole(model.narrow(params))


def _pieces(batch: Batch, chunk_size: int) -> tuple[Batch, int]:
  """This device's piece of each chunk of a batch [B, N·C], side by side, and how long one is."""
  if not sequence_parallel.axes():
    return batch, chunk_size
  size = chunk_size // sequence_parallel.count()

  def pieces(x):
    cut = x.reshape(x.shape[0], -1, sequence_parallel.count(), size)
    own = lax.dynamic_index_in_dim(cut, sequence_parallel.index(), axis=2, keepdims=False)
    return own.reshape(x.shape[0], -1)

  return jax.tree.map(pieces, batch), size


def _at_least_one(weight: Array) -> Array:
  """So that a step of padding alone has a gradient of zero, and not of NaN."""
  return jnp.maximum(weight, 1.0)


def _reduced(gradient: Array, shard: PartitionSpec, over: Sequence[str]) -> Array:
  """The sum over all devices, of which each keeps the part that it holds of the parameter."""
  for dimension, axes in enumerate(shard):
    if axes is not None:
      gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True)
      over = [axis for axis in over if axis not in partitioner.as_tuple(axes)]
  return lax.psum(gradient, tuple(over)) if over else gradient
