"""Writes tensors to safetensors files block by block, and reads each block back.

A file of any size takes the memory of a block, and of the array in which the tensor is stored: the
tensors of one stored array are written one after the other, at their places in the file.
"""

from collections.abc import Iterator, Mapping, Sequence
import errno
import json
import math
import os
import pathlib
from typing import BinaryIO

import numpy as np

from valkyrie.weights.tensor_files import INDEX_SUFFIX, SUFFIX, Tensor, name_of_dtype, numpy_dtype

_BLOCK_BYTES = 2**24
_FILE_BYTES = 5 * 10**9  # the most in one file of a folder, unless one tensor has more


def write_folder(folder: pathlib.Path, tensors: Mapping[str, Tensor], stem: str = 'model') -> None:
  """Writes `model.safetensors` into a folder, or several files and their index.

  Raises an OSError if the file system refuses, or what was written cannot be read back.
  """
  metadata = {'format': 'pt'}  # transformers asks for it; it says nothing about the content
  files = _files(tensors)
  if len(files) == 1:
    write_file(folder / f'{stem}{SUFFIX}', tensors, metadata)
    return
  file_of_tensor: dict[str, str] = {}
  for number, names in enumerate(files, start=1):
    file = f'{stem}-{number:05}-of-{len(files):05}{SUFFIX}'
    tensors_of_file = {name: tensors[name] for name in names}
    write_file(folder / file, tensors_of_file, metadata)
    file_of_tensor |= dict.fromkeys(names, file)
  sizes = [_size(tensor) for tensor in tensors.values()]
  total = sum(sizes)
  sorted_items = sorted(file_of_tensor.items())
  index = {
    'metadata': {'total_size': total},
    'weight_map': dict(sorted_items),
  }
  text = json.dumps(index, indent=2)
  index_file = folder / f'{stem}{INDEX_SUFFIX}'
  index_file.write_text(f'{text}\n')


def write_file(
  path: pathlib.Path,
  tensors: Mapping[str, Tensor],
  metadata: Mapping[str, str],
) -> None:
  """Writes a new file with each tensor in its `dtype`; raises an OSError as `write_folder` does."""
  header, places = _header(tensors, metadata)
  with open(path, 'x+b', buffering=0) as file:
    _put(file, header, 0)
    for name in _in_stored_order(tensors):
      place = len(header) + places[name]
      for block in _blocks(tensors[name]):
        _put(file, block, place)
        place += len(block)
    os.fsync(file.fileno())


def of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
  """Arrays as tensors."""
  tensors = {}
  for name, array in arrays.items():
    dtype = name_of_dtype(array.dtype)
    tensors[name] = Tensor(array.shape, array.__getitem__, dtype)
  return tensors


def _files(tensors: Mapping[str, Tensor]) -> list[list[str]]:
  """The names of the tensors in each file."""
  files: list[list[str]] = [[]]
  used = 0
  for name in _in_stored_order(tensors):
    size = _size(tensors[name])
    if files[-1] and used + size > _FILE_BYTES:
      files.append([])
      used = 0
    files[-1].append(name)
    used += size
  return files


def _in_stored_order(tensors: Mapping[str, Tensor]) -> list[str]:
  """The names; those of one stored array follow one another."""
  places: dict[str, int] = {}
  for tensor in tensors.values():
    places.setdefault(tensor.stored_in, len(places))

  def place(name: str) -> int:
    tensor = tensors[name]
    return places[tensor.stored_in]

  return sorted(tensors, key=place)


def _header(
  tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
  """The first bytes of a file, and the place of each tensor after them.

  Wide values come first, so that all are at multiples of their size, as readers that map files
  expect.
  """
  fields: dict[str, object] = {'__metadata__': dict(metadata)}
  places: dict[str, int] = {}
  place = 0

  def bytes_of_value(name: str) -> int:
    return numpy_dtype(tensors[name].dtype).itemsize

  for name in sorted(tensors, key=bytes_of_value, reverse=True):
    tensor = tensors[name]
    places[name] = place
    end = place + _size(tensor)
    fields[name] = {
      'dtype': tensor.dtype,
      'shape': [int(size) for size in tensor.shape],
      'data_offsets': [place, end],
    }
    place = end
  text = json.dumps(fields).encode()
  padding = -len(text) % 8
  text += b' ' * padding
  length = len(text).to_bytes(8, 'little')
  return length + text, places


def _size(tensor: Tensor) -> int:
  value_bytes = numpy_dtype(tensor.dtype).itemsize
  return math.prod(tensor.shape) * value_bytes


def _blocks(tensor: Tensor) -> Iterator[bytes]:
  """The bytes of a tensor."""
  dtype = numpy_dtype(tensor.dtype)
  if not tensor.shape:
    value = np.asarray(tensor.read(()))
    yield value.astype(dtype).tobytes()
    return
  rows, *inner = tensor.shape
  row_bytes = dtype.itemsize * math.prod(inner)
  at_once = _BLOCK_BYTES // max(1, row_bytes)
  at_once = max(1, at_once)
  others: Sequence[slice] = [slice(None)] * len(inner)
  for row in range(0, rows, at_once):
    end = min(rows, row + at_once)
    index = (slice(row, end), *others)
    part = np.asarray(tensor.read(index))
    values = part.astype(dtype, copy=False)
    yield values.tobytes()


def _put(file: BinaryIO, content: bytes, place: int) -> None:
  """Writes bytes at a place, and reads them back."""
  left = memoryview(content)
  while left:
    place_of_rest = place + len(content) - len(left)
    count = os.pwrite(file.fileno(), left, place_of_rest)
    left = left[count:]
  written = os.pread(file.fileno(), len(content), place)
  if written != content:
    raise OSError(errno.EIO, 'what was written cannot be read back', file.name)
