"""Tensors by name: of a model's parameters, one for each layer.

    embedding                      model/embedding
    layers.3.attention.query       model/layers/block_1/~/longformer_attention/query [1]
    layers.3.mlp.out               model/layers/block_1/~/mlp/out [1]
    final_norm.scale               model/final_norm/scale

The right column shows a pattern of two blocks: in the model, the layers with the same block of the
pattern are one stacked array. The names on the left do not depend on the pattern, and both kinds of
attention share them. Matrices are [inputs, outputs]. `tensor_files` reads them.
"""

from collections.abc import Mapping
import functools
import re
from typing import Any, NamedTuple

import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.models.declarations import Parameter
from valkyrie.models.lora import A, B
from valkyrie.models.parts import is_of_model
from valkyrie.models.stacks import place_of
from valkyrie.types import Params
from valkyrie.weights import forms
from valkyrie.weights.tensor_files import Tensor, name_of_dtype

FORMAT = 'valkyrie'  # in the config.json of an export
TABLES = ('embedding', 'unembedding')  # one row for each token
_ATTENTION = re.compile(r'\b(full|longformer)_attention\b')


class Leaf(NamedTuple):
  """An array of a model, by its place in Haiku's params.

  tensors: a name for each layer of a stack, or a single one.
  stacked: whether it is a stack of layers.
  """

  module: str
  name: str
  shape: tuple[int, ...]
  tensors: tuple[str, ...]
  stacked: bool


def leaves(params: Mapping[str, Mapping[str, Any]]) -> list[Leaf]:
  """The arrays of a model; `params` has the arrays or their shapes by Haiku's names.

  Arrays that a term of the objective has added are left out.
  """
  blocks = 1  # of the pattern
  lower_repeats = 0  # of the pattern, in the layers below the upper part
  for module, group in params.items():
    stack = place_of(module)
    if stack is not None:
      blocks = max(blocks, stack.block + 1)
      if not stack.is_upper:
        repeats = [array.shape[0] for array in group.values()]
        lower_repeats = max([lower_repeats, *repeats])

  found = []
  for module, group in params.items():
    if not is_of_model(module):
      continue
    stack = place_of(module)
    for name, array in group.items():
      if stack is None:
        plain_name = _plain(module.removeprefix('model').strip('/'), name)
        found.append(Leaf(module, name, array.shape, (plain_name,), False))
        continue
      plain_name = _plain(stack.module, name)
      first_repeat = lower_repeats if stack.is_upper else stack.first
      tensors = []
      for repeat in range(array.shape[0]):
        layer = blocks * (first_repeat + repeat) + stack.block
        tensors.append(f'layers.{layer}.{plain_name}')
      found.append(Leaf(module, name, array.shape, tuple(tensors), True))
  return found


def _plain(module: str, name: str) -> str:
  parts = module.replace('/~', '').split('/')
  path = [part for part in parts if part]
  path.append(name)
  return _ATTENTION.sub('attention', '.'.join(path))


def declared_leaves(parameters: Mapping[str, Mapping[str, Parameter]]) -> list[Leaf]:
  """The arrays of a model with these declared parameters."""
  shapes = {}
  for module, group in parameters.items():
    shapes[module] = {name: parameter.shape for name, parameter in group.items()}
  return leaves(shapes)


def names_of(parameters: Mapping[str, Mapping[str, Parameter]]) -> dict[str, tuple[str, ...]]:
  """{path in Haiku's params: its `Leaf.tensors`} of declared parameters."""
  return {f'{leaf.module}/{leaf.name}': leaf.tensors for leaf in declared_leaves(parameters)}


def of_params(params: Params) -> dict[str, Tensor]:
  """The tensors of a model, which come to the host when they are read."""
  found = {}
  for leaf in leaves(params):
    array = params[leaf.module][leaf.name]
    shape = leaf.shape[1:] if leaf.stacked else leaf.shape
    dtype = name_of_dtype(array.dtype)
    for number, name in enumerate(leaf.tensors):
      layer = number if leaf.stacked else None
      read = functools.partial(_part, array, layer)
      found[name] = Tensor(shape, read, dtype, stored_in=f'{leaf.module}/{leaf.name}')
  return found


def _part(array: Any, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
  """A part of an array, or of a layer of a stack."""
  whole = np.asarray(array)
  if layer is not None:
    whole = whole[layer]
  return whole[index]


def is_adapter(name: str) -> bool:
  """Whether a tensor is part of a low-rank adapter, see `models.lora`."""
  return name.endswith((A, B))


def merged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """The tensors with adapters added to their matrices, in float32 or wider.

  In bfloat16 a small adapter would vanish in the rounding of the sum.

  Raises a ConfigurationError if an adapter lacks a half or its matrix, or has other sizes.
  """

  def with_adapter(whole: Tensor, down: Tensor, up: Tensor) -> Tensor:
    def read(index: tuple[slice, ...]) -> np.ndarray:
      rows, columns = index
      every = slice(None)
      w = forms.wide(whole.read(index))
      a = forms.wide(down.read((rows, every)))
      b = forms.wide(up.read((every, columns)))
      return w + a @ b

    wide = 'F64' if 'F64' in (whole.dtype, down.dtype, up.dtype) else 'F32'
    return whole._replace(read=read, dtype=wide)

  result = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
  for name in sorted({half[: -len(A)] for half in tensors if is_adapter(half)}):
    whole = tensors.get(name)
    down = tensors.get(name + A)
    up = tensors.get(name + B)
    if not whole or not down or not up or not _fit(whole.shape, down.shape, up.shape):
      shapes = []
      for part in (name, name + A, name + B):
        shape = list(tensors[part].shape) if part in tensors else 'missing'
        shapes.append(f'{part}: {shape}')
      raise ConfigurationError(
        f'An adapter is not whole, or of another model: {", ".join(shapes)}. Expected a matrix '
        '[inputs, outputs] with halves [inputs, rank] and [rank, outputs]. Fetch all of it.'
      )
    result[name] = with_adapter(whole, down, up)
  return result


def _fit(whole: tuple[int, ...], down: tuple[int, ...], up: tuple[int, ...]) -> bool:
  """Whether a matrix [inputs, outputs] fits halves [inputs, rank] and [rank, outputs]."""
  if len(down) != 2:
    return False
  inputs, rank = down
  return (*whole, rank) == (inputs, *reversed(up))
