"""Names of a model's parameters for exchange: one tensor for each layer.

    embedding                      model/embedding
    layers.3.attention.query       model/layers/block_1/~/longformer_attention/query [1]
    layers.3.mlp.out               model/layers/block_1/~/mlp/out [1]
    final_norm.scale               model/final_norm/scale

The right column is of a pattern of two blocks: in the model, the layers with the same block of the
pattern are one stacked array. These names do not depend on the pattern, and both kinds of attention
share theirs.
"""

from collections.abc import Mapping
import re
from typing import Any, NamedTuple

_STACKED = re.compile(r'model/(upper_)?layers/block_(\d+)(/.*)?')
_ATTENTION = re.compile(r'\b(full|longformer)_attention\b')


class Leaf(NamedTuple):
  """An array of a model, and the names of its tensors.

  module, name: its place in Haiku's params.
  shape: its shape.
  tensors: a name for each layer of a stack, or a single one.
  stacked: whether it is a stack of layers.
  """

  module: str
  name: str
  shape: tuple[int, ...]
  tensors: tuple[str, ...]
  stacked: bool


def leaves(params: Mapping[str, Mapping[str, Any]]) -> list[Leaf]:
  """The arrays of a model; `params` has the arrays or their shapes by Haiku's names."""
  found = [
    (module, name, array.shape, _STACKED.fullmatch(module))
    for module, group in params.items()
    for name, array in group.items()
  ]
  stacks = [(bool(match[1]), int(match[2]), shape[0]) for *_, shape, match in found if match]
  blocks = 1 + max((block for _, block, _ in stacks), default=0)
  below = max((repeats for upper, _, repeats in stacks if not upper), default=0)

  def leaf(module: str, name: str, shape: tuple[int, ...], match: re.Match | None) -> Leaf:
    if match is None:
      inside = module.removeprefix('model').strip('/')
      return Leaf(module, name, shape, (_plain(inside, name),), False)
    first, block = below if match[1] else 0, int(match[2])
    inside = _plain((match[3] or '').removeprefix('/~').strip('/'), name)
    layers = (blocks * (first + r) + block for r in range(shape[0]))
    return Leaf(module, name, shape, tuple(f'layers.{n}.{inside}' for n in layers), True)

  return [leaf(*one) for one in found]


def tensors(params: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """The arrays of a model by the names of its tensors, one for each layer."""
  return {
    tensor: array[number] if leaf.stacked else array
    for leaf in leaves(params)
    for array in [params[leaf.module][leaf.name]]
    for number, tensor in enumerate(leaf.tensors)
  }


def _plain(module: str, name: str) -> str:
  path = [*filter(None, module.replace('/~', '').split('/')), name]
  return _ATTENTION.sub('attention', '.'.join(path))
