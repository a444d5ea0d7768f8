"""Tensors by name: of a model's parameters, one for each layer.

    embedding                      model/embedding
    layers.3.attention.query       model/layers/block_1/~/longformer_attention/query [1]
    layers.3.mlp.out               model/layers/block_1/~/mlp/out [1]
    final_norm.scale               model/final_norm/scale

The right column shows a pattern of two blocks: in the model, the layers with the same block of the
pattern are one stacked array. The names on the left do not depend on the pattern. Both kinds of
attention share them, but in a block with both, each has its own: layers.3.full_attention.query.
Matrices are [inputs, outputs]. `tensor_files` reads them.
"""

from collections.abc import Container, Iterable, Mapping
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
_ATTENTION = re.compile(r'\b((full|longformer)_)?attention\b')


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
  blocks, lower_repeats = _pattern(params)
  paths = _paths(params)
  model_leaves = []
  for module, group in params.items():
    if not is_of_model(module):
      continue
    path = paths[module]
    stack = place_of(path)
    for name, array in group.items():
      if stack is None:
        module_in_model = path.removeprefix('model').strip('/')
        plain_name = _plain(module_in_model, name)
        leaf = Leaf(module, name, array.shape, (plain_name,), stacked=False)
        model_leaves.append(leaf)
        continue
      plain_name = _plain(stack.module, name)
      first_repeat = lower_repeats if stack.is_upper else stack.first
      tensors = []
      for repeat in range(array.shape[0]):
        layer = blocks * (first_repeat + repeat) + stack.block
        tensors.append(f'layers.{layer}.{plain_name}')
      leaf = Leaf(module, name, array.shape, tuple(tensors), stacked=True)
      model_leaves.append(leaf)
  return model_leaves


def _pattern(params: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
  """(The blocks of the pattern, its repeats in the layers below the upper part)."""
  blocks = 1
  lower_repeats = 0
  for module, group in params.items():
    stack = place_of(module)
    if stack is None:
      continue
    blocks = max(blocks, stack.block + 1)
    if not stack.is_upper:
      repeats = [array.shape[0] for array in group.values()]
      lower_repeats = max([lower_repeats, *repeats])
  return blocks, lower_repeats


def _paths(modules: Iterable[str]) -> dict[str, str]:
  """{module: its path}, with one name for all kinds of attention unless a block has several."""
  kinds: dict[str, set[str]] = {}
  for module in modules:
    place, kind = _attention(module)
    kinds.setdefault(place, set()).add(kind)
  paths = {}
  for module in modules:
    place, _ = _attention(module)
    paths[module] = module
    if len(kinds[place]) == 1:
      paths[module] = _ATTENTION.sub('attention', module)
  return paths


def _attention(module: str) -> tuple[str, str]:
  """(Where the attention is that a module is, or belongs to; its kind); ('', '') without one."""
  match = _ATTENTION.search(module)
  if match is None:
    return '', ''
  return module[: match.start()], match[0]


def _plain(module: str, name: str) -> str:
  below_method = module.replace('/~', '')
  parts = below_method.split('/')
  path = [part for part in parts if part]
  path.append(name)
  return '.'.join(path)


def declared_leaves(parameters: Mapping[str, Mapping[str, Parameter]]) -> list[Leaf]:
  """The arrays of a model with these declared parameters."""
  shapes = {}
  for module, group in parameters.items():
    shapes[module] = {name: parameter.shape for name, parameter in group.items()}
  return leaves(shapes)


def names_of(parameters: Mapping[str, Mapping[str, Parameter]]) -> dict[str, tuple[str, ...]]:
  """{path in Haiku's params: its `Leaf.tensors`} of declared parameters."""
  names = {}
  for leaf in declared_leaves(parameters):
    path = f'{leaf.module}/{leaf.name}'
    names[path] = leaf.tensors
  return names


def of_params(params: Params) -> dict[str, Tensor]:
  """The tensors of a model, which come to the host when they are read."""
  tensors = {}
  for leaf in leaves(params):
    array = params[leaf.module][leaf.name]
    shape = leaf.shape
    if leaf.stacked:
      _, *rest = shape
      shape = tuple(rest)
    dtype = name_of_dtype(array.dtype)
    path = f'{leaf.module}/{leaf.name}'
    for number, name in enumerate(leaf.tensors):
      layer = number if leaf.stacked else None
      read = functools.partial(_part, array, layer)
      tensors[name] = Tensor(shape, read, dtype, stored_in=path)
  return tensors


def _part(array: Any, layer: int | None, index: tuple[slice, ...]) -> np.ndarray:
  """A part of an array, or of a layer of a stack."""
  whole = np.asarray(array)
  if layer is not None:
    whole = whole[layer]
  return whole[index]


def is_adapter(name: str) -> bool:
  """Whether a tensor is part of a low-rank adapter, see `models.lora`."""
  return name.endswith((A, B))


def is_first_carry(name: str) -> bool:
  """Whether a tensor is a state that a model with `learned_carry` begins documents with."""
  return '.first_carry' in name


def other_half(name: str) -> str:
  """The name of the other half of an adapter."""
  matrix = name[: -len(A)]
  return matrix + (B if name.endswith(A) else A)


def merged(tensors: Mapping[str, Tensor], kept: Container[str] = ()) -> dict[str, Tensor]:
  """The tensors with adapters added to their matrices, in float32 or wider.

  In bfloat16 a small adapter would vanish in the rounding of the sum. The halves whose names are
  in `kept` stay apart from their matrices.

  Raises a ConfigurationError if an adapter lacks a half or its matrix, or has other sizes.
  """
  result = {}
  adapted = set()
  for name, tensor in tensors.items():
    if is_adapter(name) and name not in kept:
      adapted.add(name[: -len(A)])
    else:
      result[name] = tensor
  for name in sorted(adapted):
    whole = tensors.get(name)
    down = tensors.get(name + A)
    up = tensors.get(name + B)
    if not whole or not down or not up or not _fit(whole.shape, down.shape, up.shape):
      shapes = _shapes(name, tensors)
      raise ConfigurationError(
        f'An adapter is not whole, or of another model: {shapes}. Expected a matrix '
        '[inputs, outputs] with halves [inputs, rank] and [rank, outputs]. Fetch all of it.'
      )
    result[name] = _with_adapter(whole, down, up)
  return result


def _with_adapter(whole: Tensor, down: Tensor, up: Tensor) -> Tensor:
  """A matrix with the product of the halves added."""

  def read(index: tuple[slice, ...]) -> np.ndarray:
    rows, columns = index
    every = slice(None)
    w = forms.wide(whole.read(index))
    a = forms.wide(down.read((rows, every)))
    b = forms.wide(up.read((every, columns)))
    return w + a @ b

  dtypes = (whole.dtype, down.dtype, up.dtype)
  wide = 'F64' if 'F64' in dtypes else 'F32'
  return whole._replace(read=read, dtype=wide)


def _shapes(name: str, tensors: Mapping[str, Tensor]) -> str:
  """The shapes of a matrix and of the halves of its adapter, for a message."""
  shapes = []
  for part in (name, name + A, name + B):
    shape = 'missing'
    if part in tensors:
      shape = [*tensors[part].shape]
    shapes.append(f'{part}: {shape}')
  return ', '.join(shapes)


def _fit(whole: tuple[int, ...], down: tuple[int, ...], up: tuple[int, ...]) -> bool:
  """Whether a matrix [inputs, outputs] fits halves [inputs, rank] and [rank, outputs]."""
  if len(down) != 2:
    return False
  inputs, rank = down
  return (*whole, rank) == (inputs, *reversed(up))
