"""Tensors by name: of a model's parameters, one for each layer.

    embedding                      model/embedding
    layers.3.attention.query       model/layers/block_1/~/longformer_attention/query [1]
    layers.3.mlp.out               model/layers/block_1/~/mlp/out [1]
    final_norm.scale               model/final_norm/scale

The right column is of a pattern of two blocks: in the model, the layers with the same block of the
pattern are one stacked array. These names do not depend on the pattern, and both kinds of attention
share theirs. Matrices are [inputs, outputs]. `tensor_files` reads them.
"""

from collections.abc import Mapping
import errno
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import save_file

from valkyrie.errors import ConfigurationError
from valkyrie.models.declarations import Parameter
from valkyrie.models.lora import A, B
from valkyrie.models.parts import is_of_model
from valkyrie.types import Params
from valkyrie.weights.tensor_files import Tensor

FORMAT = 'valkyrie'  # in the config.json of an export
TABLES = ('embedding', 'unembedding')  # one row for each token
_STACKED = re.compile(r'model/(upper_)?layers/block_(\d+)(/.*)?')
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

  What a term of the objective has added is left out.
  """
  found = [
    (module, name, array.shape, _STACKED.fullmatch(module))
    for module, group in params.items()
    if is_of_model(module)
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


def _plain(module: str, name: str) -> str:
  path = [*filter(None, module.replace('/~', '').split('/')), name]
  return _ATTENTION.sub('attention', '.'.join(path))


def names_of(parameters: Mapping[str, Mapping[str, Parameter]]) -> dict[str, tuple[str, ...]]:
  """{path in Haiku's params: its `Leaf.tensors`} of declared parameters."""
  shapes = {m: {n: p.shape for n, p in group.items()} for m, group in parameters.items()}
  return {f'{leaf.module}/{leaf.name}': leaf.tensors for leaf in leaves(shapes)}


def of_params(params: Params) -> dict[str, Tensor]:
  """The tensors of a model, on the host."""
  found = {}
  for leaf in leaves(params):
    array = np.asarray(params[leaf.module][leaf.name])
    for number, name in enumerate(leaf.tensors):
      part = array[number] if leaf.stacked else array
      found[name] = Tensor(part.shape, part.__getitem__)
  return found


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
      (rows, columns), every = index, slice(None)
      parts = [whole.read(index), down.read((rows, every)), up.read((every, columns))]
      w, a, b = (part.astype(np.promote_types(part.dtype, np.float32)) for part in parts)
      return w + a @ b

    return Tensor(whole.shape, read)

  found = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
  for name in sorted({half[: -len(A)] for half in tensors if is_adapter(half)}):
    parts = {part: tensors.get(part) for part in (name, name + A, name + B)}
    whole, down, up = (part or Tensor((), lambda _: np.zeros(())) for part in parts.values())
    if len(down.shape) != 2 or whole.shape + down.shape[1:] != down.shape[:1] + up.shape[::-1]:
      shapes = ', '.join(f'{n}: {list(p.shape) if p else "missing"}' for n, p in parts.items())
      raise ConfigurationError(
        f'An adapter is not whole, or of another model: {shapes}. Expected a matrix [inputs, '
        'outputs] with halves [inputs, rank] and [rank, outputs]. Fetch all of it.'
      )
    found[name] = with_adapter(whole, down, up)
  return found


def write(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
  """Writes a file and reads it back; raises an OSError if it has not the bits of the arrays."""
  try:
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, path, metadata)
    with safetensors.safe_open(path, 'numpy') as file:
      whole = {*file.keys()} == {*arrays} and all(
        file.get_tensor(name).tobytes() == array.tobytes() for name, array in arrays.items()
      )
  except safetensors.SafetensorError as error:
    raise OSError(errno.EIO, str(error), str(path)) from error
  if not whole:
    raise OSError(errno.EIO, 'what was written cannot be read back', str(path))
