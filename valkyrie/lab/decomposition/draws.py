"""Random numbers of tokens: functions of the seed, the use, the row, and the token of the row.

So no cut into chunks, no grouping of rows and no layout changes them (D7, D21).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array


class Place(NamedTuple):
  """A carry: int32 [B], the number of each row, and how many of its tokens were read."""

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
  in_chunk = index * time + jnp.arange(time, dtype=jnp.int32)
  numbers = place.read[:, None] + in_chunk[None]
  return numbers, place._replace(read=place.read + devices * time)


def uniform(
  seed: int | Array,
  use: int | Array,
  row: Array,
  number: Array,
  size: int,
) -> Array:
  """Uniform numbers in [0, 1), float32 [B, T, size], of tokens with these numbers in their rows."""
  key_of_use = jax.random.fold_in(jax.random.key(seed), use)

  def draw_row(row, numbers):
    key_of_row = jax.random.fold_in(key_of_use, row)

    def draw_token(number):
      key = jax.random.fold_in(key_of_row, number)
      return jax.random.uniform(key, (size,))

    return jax.vmap(draw_token)(numbers)

  return jax.vmap(draw_row)(row, number)
