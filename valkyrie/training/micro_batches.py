"""Rows in groups, one after the other, for steps whose rows do not fit into memory at once."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.model import Model
from valkyrie.training import tbptt
from valkyrie.training.data_parallel import Compute
from valkyrie.types import Array, Batch, Carry, Params


def in_micro_batches(
  compute: Compute,
  model: Model,
  count: int,
  learns: tbptt.Learns,
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
    compute: see `data_parallel.Compute`.
    learns: the parameters whose gradients it returns.
    params, carry, batch, total, rng, chunk_size: its arguments, of all rows.

  Returns:
    The result of `compute` for all rows.
  """
  if count == 1:
    return compute(params, carry, batch, total, rng, chunk_size=chunk_size)
  batch_axes = jax.tree.map(
    lambda axes: axes.index('batch'),
    model.carry_axes(carry),
    is_leaf=lambda axes: isinstance(axes, tuple) and 'batch' in axes,
  )

  def split(x, axis):
    # [..., B, ...] -> [count, ..., B / count, ...]. Group m has the rows m, m + count, ...: with
    # rows over devices, each device keeps its own.
    parts = x.reshape(*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis + 1, 0)

  def join(parts, axis):
    x = jnp.moveaxis(parts, 0, axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

  def add_group(gradient, group):
    number, carry, batch = group
    key = None if rng is None else jax.random.fold_in(rng, number)
    more, carry, sums = compute(params, carry, batch, total, key, chunk_size=chunk_size)
    return jax.tree.map(jnp.add, gradient, more), (carry, sums)

  groups = (
    jnp.arange(count),
    jax.tree.map(split, carry, batch_axes),
    jax.tree.map(lambda leaf: split(leaf, 0), batch),
  )
  learning, _ = tbptt.learned_and_frozen(params, learns)
  gradient, (carries, sums) = lax.scan(add_group, tbptt.zero_gradients(learning), groups)
  carry = jax.tree.map(join, carries, batch_axes)
  return gradient, carry, jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums)
