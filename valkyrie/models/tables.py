"""Rows of a table of embeddings, with a gradient that is the same in every run.

The gradient of a row is a sum over the tokens that read it. A GPU adds them as its threads arrive,
so that the roundings of two runs differ. There the tokens are sorted by row, a scan adds the tokens
of a row in order, and the sum that stands at its last token is the row's.
"""

import functools

import jax
import jax.numpy as jnp

from valkyrie.models.precision import wide
from valkyrie.models.recurrence import scan
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array


def rows_of(table: Array, index: Array) -> Array:
  """The rows [..., D] of table [R, D] with these numbers, int32 [...]."""
  if platform() == 'gpu':
    return _sorted_rows(len(table), table, index)
  return table[index]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sorted_rows(_: int, table: Array, index: Array) -> Array:
  return table[index]


def _forward(_, table, index):
  return table[index], index


def _backward(count, index, gradient):
  order = jnp.argsort(index, axis=None)
  rows = index.reshape(-1)[order]
  width = gradient.shape[-1]
  by_token = gradient.reshape(-1, 1, width)
  by_row = by_token[order]
  inputs = by_row.astype(wide(gradient.dtype))
  previous_rows = rows[:-1]
  next_rows = rows[1:]
  differs = next_rows != previous_rows
  one = jnp.ones(1, bool)
  first = jnp.concatenate([one, differs])
  last = jnp.concatenate([differs, one])
  zero = jnp.zeros_like(inputs[0])
  # A growth of zero is a decay of one: the states are running sums, which begin again at each row.
  reset = first[:, None]
  growth = zero[0]
  states = scan.diagonal_scan(growth, inputs, zero, reset, form='associative')
  sums = states[:, 0].astype(gradient.dtype)
  d_table = jnp.zeros((count, width), gradient.dtype)
  target = jnp.where(last, rows, count)  # beyond the end, so that it is dropped
  d_table = d_table.at[target].set(sums, mode='drop')
  return d_table, None


_sorted_rows.defvjp(_forward, _backward)
