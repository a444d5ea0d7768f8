"""The arrays of a model, filled with tensors of a source: each device reads its own part."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from valkyrie.types import Array
from valkyrie.weights.tensor_files import Tensor

# In the place of a tensor: a layer that stays as it is, or becomes zero.
FRESH = 'fresh'
ZERO = 'zero'


def filled(before: Array, tensors: Sequence[Tensor | str], stacked: bool) -> Array:
  """The array of these tensors, one for each layer of a stack; a string is FRESH or ZERO."""
  shards = {str(shard.index): shard.data for shard in before.addressable_shards}

  def block_of_device(index: Any) -> np.ndarray:
    block = np.array(shards[str(index)])
    layers = slice(None)
    inside = index
    parts = [block]
    if stacked:
      layers, *rest = index
      inside = tuple(rest)
      parts = block
    for part, tensor in zip(parts, tensors[layers], strict=True):
      if tensor == ZERO:
        part[...] = 0
      elif isinstance(tensor, Tensor):
        _fill(part, tensor, inside)
    return block

  # Until they are copied, the blocks of the host stay, beside those of the next array.
  filled = jax.make_array_from_callback(before.shape, before.sharding, block_of_device)
  return jax.block_until_ready(filled)


def _fill(part: np.ndarray, tensor: Tensor, index: tuple[slice, ...]) -> None:
  """Copies the part of a tensor; the rows that it lacks stay."""
  if not index:
    part[...] = tensor.read(())
    return
  wanted, *others = index
  first = wanted.start or 0
  left = tensor.shape[0] - first
  rows = min(len(part), left)
  if rows > 0:
    rows_there = slice(first, first + rows)
    part[:rows] = tensor.read((rows_there, *others))
