"""Norms of the gradient of a step, by the parts of the model and by its layers."""

import jax.numpy as jnp

from valkyrie.models.parts import sums_of_parts
from valkyrie.models.stacks import place_of
from valkyrie.types import Array, Params


def by_part(gradient: Params) -> dict[str, Array]:
  """{part: the norm of its gradient}, see `models.parts`."""

  def sum_of_squares(leaf):
    squares = jnp.square(leaf)
    return jnp.sum(squares)

  totals = sums_of_parts(gradient, sum_of_squares)
  return {part: jnp.sqrt(total) for part, total in totals.items()}


def by_part_and_layer(gradient: Params) -> dict[str, Array]:
  """As `by_part`, and {'layers/N': the norm of layer N, from 0}, counted from the embedding."""
  norms = by_part(gradient)
  for layer, total in enumerate(_squares_of_layers(gradient)):
    norms[f'layers/{layer}'] = jnp.sqrt(total)
  return norms


def _squares_of_layers(gradient: Params) -> Array:
  """The sum of the squares of each layer's gradient, [layers]."""
  stacks: dict[tuple[bool, int], dict[int, Array]] = {}  # by height: {block: [repeats]}
  for module, group in gradient.items():
    place = place_of(module)
    if place is None:
      continue
    height = (place.is_upper, place.first)
    blocks = stacks.setdefault(height, {})
    for leaf in group.values():
      repeats = leaf.shape[0]
      each_repeat = leaf.reshape(repeats, -1)
      squares = jnp.square(each_repeat)
      total = jnp.sum(squares, axis=1)
      blocks[place.block] = blocks.get(place.block, 0) + total
  by_height = []
  for _, blocks in sorted(stacks.items(), key=_height):
    columns = [blocks[number] for number in sorted(blocks)]
    layers = jnp.stack(columns, axis=1)  # the layers of a repeat follow one another
    by_height.append(layers.ravel())
  return jnp.concatenate(by_height)


def _height(stack: tuple[tuple[bool, int], dict[int, Array]]) -> tuple[bool, int]:
  height, _ = stack
  return height
