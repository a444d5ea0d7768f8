"""Embeddings of n-grams: each token with those before it, hashed into a table of narrow rows.

A small model spends its first layers on what a table of n-grams knows at once. Collisions share a
row: the hashing trick (Weinberger et al. 2009), for the n-grams before a token as in Scone (Yu et
al. 2025, arXiv 2502.01637) and in the speed records of modded-nanogpt (#201, #360).
"""

from collections.abc import Sequence
import dataclasses
from typing import Annotated

import gin
import haiku as hk
import jax.numpy as jnp

from valkyrie.config.ranges import PositiveInt, Range
from valkyrie.models.layers import Module, parameter, projections
from valkyrie.models.matrices import products
from valkyrie.models.recurrence.convolution import Tail, lagged
from valkyrie.models.tables import rows_of
from valkyrie.types import Array, DType

_INIT = hk.initializers.RandomNormal(1e-3)


@gin.configurable
@dataclasses.dataclass(eq=False)
class NgramEmbedding(Module):
  """What the tokens up to each one add to its embedding; the tables begin near zero.

  Attributes:
    rows: of each table.
    width: of a row; a matrix projects the rows of all orders to the width of the model.
    orders: lengths of the n-grams, 2 or more; each has a table.
  """

  rows: PositiveInt
  width: PositiveInt
  orders: Sequence[Annotated[int, Range('[2, 2147483647]')]] = (2, 3)

  def __post_init__(self):
    super().__post_init__()
    self._before = max(self.orders) - 1

  def initial_carry(self, batch_size: int) -> Tail:
    """The tokens before a chunk, int32 [B, n - 1, 1]; no document reads those before its start."""
    tokens = jnp.zeros((batch_size, self._before, 1), jnp.int32)
    return Tail(tokens)

  def forward_flops(self, width: int) -> int:
    """A matrix product for each token."""
    return 2 * len(self.orders) * self.width * width

  def __call__(
    self,
    tokens: Array,
    carry: Tail,
    d_model: int,
    dtype: DType,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Tail]:
    """tokens int32 [B, T] -> (what is added to their embeddings, [B, T, D], the carry after)."""
    shifted, tail = lagged(carry, tokens[..., None], segment_ids)
    # 1 + the token that many places before each, or 0 before the start of its document.
    numbers = []
    for lag, token in enumerate(shifted):
      is_inside = positions >= lag
      number = jnp.where(is_inside, 1 + token[..., 0], 0)
      numbers.append(number.astype(jnp.uint32))
    digest, *earlier = numbers
    table_shape = (self.rows, self.width)
    embedded = []
    for lag, number in enumerate(earlier, 1):
      order = lag + 1
      salted = digest + jnp.uint32(lag)
      digest = mixed(salted) ^ number
      if order in self.orders:
        table = parameter(f'table_{order}', table_shape, _INIT, axes=('ngrams', 'embed'))
        row = mixed(digest) % self.rows
        row = row.astype(jnp.int32)
        embedding = rows_of(table, row)
        embedded.append(embedding.astype(dtype))
    rows = jnp.concatenate(embedded, axis=-1)
    axes = (None, 'embed')
    weights = projections(rows, axes, out=d_model)
    (added,) = products(rows, weights, axes)
    return added, tail


def mixed(x: Array) -> Array:
  """A hash of uint32, whose bits all depend on all of x: lowbias32 (Wellons 2018)."""
  x = x ^ (x >> 16)
  x = x * jnp.uint32(0x7FEB352D)
  x = x ^ (x >> 15)
  x = x * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
