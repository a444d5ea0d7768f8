"""The stacks of a model's layers: consecutive repeats of the pattern with stacked parameters.

A stack is one loop over equal layers. There are several where layers in a row differ: an insert
stands between two, and only some layers may be sites of a decomposition. The layers below the
first stack with something to learn then have no backward pass.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import itertools
import re
from typing import Any, NamedTuple

import haiku as hk
import jax.numpy as jnp

from valkyrie.types import Array

_MODULE = re.compile(r'model/(?:(upper)_|from_(\d+)_)?layers/block_(\d+)(/.*)?')


class Stack(NamedTuple):
  """Consecutive repeats of the pattern.

  prefix: the beginning of the names of its modules and of its carry; none for the lowest stack.
  first, repeats: the number of its first repeat, and how many it has.
  """

  prefix: str
  first: int
  repeats: int

  @property
  def name(self) -> str:
    """The name of its modules in the model."""
    return f'{self.prefix}layers'

  @property
  def memory(self) -> str:
    """The name of its carry in `hk.State`."""
    return f'{self.prefix}carry'

  def loop(self, layer: Callable, unroll: int) -> Callable:
    """The function (x, *inputs by repeat) -> (x, outputs by repeat) of all repeats of a layer."""
    stacked = hk.layer_stack(
      self.repeats,
      with_per_layer_inputs=True,
      unroll=unroll,
      name=self.name,
    )
    return stacked(layer)


def around_insert(repeats: int) -> tuple[list[Stack], list[Stack]]:
  """The stacks below an insert and above it."""
  lower = repeats - repeats // 2
  upper = repeats - lower
  below = Stack('', 0, lower)
  above = Stack('upper_', lower, upper)
  return [below], [above]


def divided(repeats: int, cuts: Collection[int]) -> list[Stack]:
  """The stacks of a model whose layers differ from those below at these repeats."""
  ends = [0, *sorted(cuts), repeats]
  stacks = []
  for begin, end in itertools.pairwise(ends):
    prefix = f'from_{begin}_' if begin else ''
    stacks.append(Stack(prefix, begin, end - begin))
  return stacks


def within(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """The values whose paths begin with this place."""
  return {path: value for path, value in values.items() if path.startswith(place)}


def by_layer(values: Sequence[Mapping[str, Sequence[Array]]]) -> dict[str, Array]:
  """{kind: [layers, ...]}, from [repeats, ...] of each block of the pattern in each stack."""
  first, *_ = values
  joined = {}
  for kind in first:
    parts = []
    for values_of_stack in values:
      by_repeat = jnp.stack(values_of_stack[kind], axis=1)
      _, _, *rest = by_repeat.shape
      parts.append(by_repeat.reshape(-1, *rest))
    joined[kind] = jnp.concatenate(parts)
  return joined


class Place(NamedTuple):
  """The place of a module in a model.

  is_upper: whether it is above the insert.
  first: the number of the first repeat of its stack; 0 above an insert, where the name lacks it.
  block: the number of its block in the pattern.
  module: the path of the module inside the block.
  """

  is_upper: bool
  first: int
  block: int
  module: str


def place_of(module: str) -> Place | None:
  """The place of a module in a stack, by its path in Haiku; None outside of stacks."""
  match = _MODULE.fullmatch(module)
  if match is None:
    return None
  upper, first, block, rest = match.groups()
  inside = rest or ''
  inside = inside.removeprefix('/~').strip('/')
  first_repeat = int(first or 0)
  return Place(bool(upper), first_repeat, int(block), inside)
