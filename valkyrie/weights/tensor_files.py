"""Tensors by name: in safetensors files, read slice by slice, and in memory."""

from collections.abc import Callable, Mapping
import errno
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import save_file

from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.storage import foreign_names

SUFFIX = '.safetensors'


class Tensor(NamedTuple):
  """A tensor that is not read yet.

  shape: its shape.
  read: index, a slice for each dimension -> that part, in the dtype in which it is stored.
  """

  shape: tuple[int, ...]
  read: Callable[[tuple[slice, ...]], np.ndarray]


def in_memory(array: np.ndarray) -> Tensor:
  """An array as a tensor."""
  return Tensor(array.shape, array.__getitem__)


def transposed(tensor: Tensor) -> Tensor:
  """A matrix with its dimensions exchanged."""
  return Tensor(tensor.shape[::-1], lambda index: tensor.read(index[::-1]).T)


def is_adapter(name: str) -> bool:
  """Whether a tensor is part of a low-rank adapter, see `models.lora`."""
  return name.endswith(('_lora_a', '_lora_b'))


def merged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """The tensors with adapters added to their matrices."""

  def with_adapter(whole: Tensor, down: Tensor, up: Tensor) -> Tensor:
    def read(index: tuple[slice, ...]) -> np.ndarray:
      rows, columns = index
      every = slice(None)
      return whole.read(index) + down.read((rows, every)) @ up.read((every, columns))

    return Tensor(whole.shape, read)

  return {
    name: with_adapter(tensor, tensors[f'{name}_lora_a'], tensors[f'{name}_lora_b'])
    if f'{name}_lora_a' in tensors
    else tensor
    for name, tensor in tensors.items()
    if not is_adapter(name)
  }


def in_files(path: pathlib.Path) -> dict[str, Tensor]:
  """The tensors of a safetensors file, or of all files in a folder or in its index.

  Raises:
    ConfigurationError: there are no weights.
    StorageError: a file is missing, or not whole; or the index names one outside the folder.
  """
  files, named_by = _files(path)
  tensors: dict[str, Tensor] = {}
  for file in files:
    try:
      opened: Any = safetensors.safe_open(file, 'numpy')
    except FileNotFoundError:
      raise StorageError(
        f'{named_by} names {file.name}, which is not there. Fetch all files of these weights.'
      ) from None
    except (OSError, safetensors.SafetensorError) as error:
      raise StorageError(
        f'{file} is not a whole safetensors file ({error}). Fetch it again.'
      ) from error
    for name in opened.keys():  # noqa: SIM118, it is no mapping
      tensors[name] = _in_file(opened, name)
  return tensors


def write(path: pathlib.Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
  """Writes a safetensors file, and reads it back.

  Raises:
    OSError: the file cannot be written, or has not the bits of the arrays.
  """
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


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """The object in a file; raises a StorageError if it has none."""
  try:
    found = json.loads(file.read_text())
  except (OSError, ValueError) as error:
    raise StorageError(f'{file} cannot be read ({error}). Fetch it again.') from error
  if not isinstance(found, dict):
    raise StorageError(f'{file} has {found!r:.40}, but a JSON object was expected. Fetch it again.')
  return found


def _files(path: pathlib.Path) -> tuple[list[pathlib.Path], pathlib.Path]:
  """The files with tensors, and the file or folder that names them."""
  if path.suffix == SUFFIX:
    return [path], path.parent
  indexes = sorted(path.glob(f'*{SUFFIX}.index.json'))
  files = sorted(path.glob(f'*{SUFFIX}'))
  if indexes:
    listed = read_json(indexes[0]).get('weight_map')
    names = listed.values() if isinstance(listed, dict) else [listed]
    fetch = 'Fetch these weights again, from a source that you trust.'
    found = {path / foreign_names.checked(name, indexes[0], fetch) for name in names}
    return sorted(found), indexes[0]
  if not files:
    raise ConfigurationError(
      f'{path} has no {SUFFIX} file and no checkpoints. Name the directory of a run, a {SUFFIX} '
      'file, or a folder with such files.'
    )
  return files, path


def _in_file(file: Any, name: str) -> Tensor:
  part = file.get_slice(name)
  return Tensor(tuple(part.get_shape()), part.__getitem__)
