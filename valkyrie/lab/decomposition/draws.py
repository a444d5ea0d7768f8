"""Random numbers of tokens: functions of the seed, the use, the row, and the token of the row.

So no cut into chunks, no grouping of rows and no layout changes them (D7, D21).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array


class Place(NamedTuple):
  """A carry: int32 [B], the number of each row, and the tokens that it has read."""

  row: Array
  read: Array


def start(rows: int) -> Place:
  """The places before the first token."""
  return Place(jnp.arange(rows, dtype=jnp.int32), jnp.zeros(rows, jnp.int32))


def tokens(place: Place, time: int) -> tuple[Array, Place]:
  """The numbers of the tokens of a chunk in their rows, [B, T], and the places after it."""
  devices = 1
  index = 0
  if sequence_parallel.axes():
    devices = sequence_parallel.size()
    index = sequence_parallel.index()
  numbers = place.read[:, None] + (index * time + jnp.arange(time, dtype=jnp.int32))[None]
  return numbers, place._replace(read=place.read + devices * time)


def uniform(seed: int | Array, use: int | Array, row: Array, number: Array, size: int) -> Array:
  """Uniform numbers in [0, 1), float32 [B, T, size], of tokens with these numbers in their rows."""
  of_use = jax.random.fold_in(jax.random.key(seed), use)

  def of_row(row, numbers):
    key = jax.random.fold_in(of_use, row)
    return jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(key, n), (size,)))(numbers)

  return jax.vmap(of_row)(row, number)
