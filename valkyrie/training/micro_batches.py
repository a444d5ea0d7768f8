"""Rows of a step in several groups, one after the other: less memory, the same gradient."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.language_model import Model
from valkyrie.training.data_parallel import Compute
from valkyrie.training.tbptt import zero_gradients
from valkyrie.types import Array, Batch, Carry, Params


def in_micro_batches(compute: Compute, model: Model, count: int) -> Compute:
  """`compute` over `count` groups of each device's rows; their gradients and sums are added up.

  Every group divides its loss by the weight of the whole step, so the gradient is the same as for
  all rows at once. Group number m has the rows m, m + count, ...: with rows over devices, each
  device keeps its own. Dropout draws other numbers than without groups.
  """
  if count == 1:
    return compute

  def in_groups(
    params: Params,
    carry: Carry,
    batch: Batch,
    total: Array,
    rng: Array | None,
    *,
    chunk_size: int,
  ) -> tuple[Params, Carry, Any]:
    batch_axes = jax.tree.map(
      lambda axes: axes.index('batch'),
      model.carry_axes(carry),
      is_leaf=lambda axes: isinstance(axes, tuple) and 'batch' in axes,
    )

    def one(gradient, now):
      number, carry, batch = now
      key = None if rng is None else jax.random.fold_in(rng, number)
      more, carry, sums = compute(params, carry, batch, total, key, chunk_size=chunk_size)
      return jax.tree.map(jnp.add, gradient, more), (carry, sums)

    groups = (
      jnp.arange(count),
      jax.tree.map(lambda leaf, axis: _split(leaf, axis, count), carry, batch_axes),
      jax.tree.map(lambda leaf: _split(leaf, 0, count), batch),
    )
    gradient, (carries, sums) = lax.scan(one, zero_gradients(params), groups)
    carry = jax.tree.map(_joined, carries, batch_axes)
    return gradient, carry, jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums)

  return in_groups


def _split(x: Array, axis: int, count: int) -> Array:
  """[..., B, ...] -> [count, ..., B / count, ...]."""
  parts = x.reshape(*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])
  return jnp.moveaxis(parts, axis + 1, 0)


def _joined(parts: Array, axis: int) -> Array:
  """The inverse of `_split`."""
  x = jnp.moveaxis(parts, 0, axis + 1)
  return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
