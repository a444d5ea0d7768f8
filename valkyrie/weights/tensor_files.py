"""Files of tensors from any program, in the format safetensors.

A file begins with 8 bytes, the length of a JSON header, which gives each tensor a dtype, a shape
and a range of the bytes that follow (https://huggingface.co/docs/safetensors). Tensors are read
slice by slice with ordinary reads: a mapped file that is cut while it is read would end the
process with a signal.
"""

from collections.abc import Callable, Mapping
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from valkyrie import foreign
from valkyrie.errors import StorageError, converted

SUFFIX = '.safetensors'
INDEX_SUFFIX = f'{SUFFIX}.index.json'
# {name in a header: (bits of a value, dtype in numpy)}; other dtypes are listed, but not read.
_DTYPES: Mapping[str, tuple[int, Any]] = {
  'F64': (64, '<f8'),
  'F32': (32, '<f4'),
  'F16': (16, '<f2'),
  'BF16': (16, jnp.bfloat16),
  'I64': (64, '<i8'),
  'I32': (32, '<i4'),
  'I16': (16, '<i2'),
  'I8': (8, 'i1'),
  'U64': (64, '<u8'),
  'U32': (32, '<u4'),
  'U16': (16, '<u2'),
  'U8': (8, 'u1'),
  'BOOL': (8, '?'),
}
_LENGTH_BYTES = 8  # of the number before the header
_LONGEST_HEADER = 2**25  # bytes: 200,000 tensors; parsed JSON takes up to 30 times its length
_LONGEST_JSON = 2**25  # bytes of an index or a configuration, for the same reason
_MOST_DIMENSIONS = 32  # of a tensor
_BLOCK = 2**24  # bytes that are read at once
FETCH = 'Fetch it again.'


class Tensor(NamedTuple):
  """A tensor that is not read yet.

  read: index, a slice for each dimension -> that part, in the dtype in which it is stored.
  dtype: its name in safetensors; anything but F64, F32, F16 and BF16 is quantized, or not a weight.
  stored_in: the array in which it is stored, with other layers; those of one are read together.
  """

  shape: tuple[int, ...]
  read: Callable[[tuple[slice, ...]], np.ndarray]
  dtype: str = 'F32'
  stored_in: str = ''

  @property
  def T(self) -> 'Tensor':
    """The tensor with its dimensions reversed, as numpy's."""
    shape = self.shape[::-1]

    def read(index: tuple[slice, ...]) -> np.ndarray:
      reversed_index = index[::-1]
      return self.read(reversed_index).T

    return self._replace(shape=shape, read=read)

  def whole(self) -> np.ndarray:
    """All of it, read."""
    everything = (slice(None),) * len(self.shape)
    return self.read(everything)


def name_of_dtype(dtype: Any) -> str:
  """The name of a dtype in a header; '' if a header cannot have it."""
  for name in _DTYPES:
    if numpy_dtype(name) == dtype:
      return name
  return ''


def numpy_dtype(name: str) -> Any:
  """The dtype with this name in a header."""
  _, dtype = _DTYPES[name]
  return np.dtype(dtype)


class TensorFile:
  """A safetensors file whose header fits its size; reads its tensors, also after it was closed.

  Attributes:
    tensors: {name: Tensor}, which read the file when they are asked.
    metadata: the texts of the header.
  """

  def __init__(self, path: pathlib.Path, what: str = 'safetensors file', advice: str = FETCH):
    """Reads the header; raises a StorageError if the file is not whole, or no such file.

    `what` and `advice` are parts of the messages.
    """
    self._path = path
    self._advice = advice
    message = f'{path} is not a whole {what}'
    with converted((OSError, ValueError), StorageError, message, advice):
      with foreign.opened(path) as file:
        self._state = _state(file)
        size, _ = self._state
        length_bytes = _bytes(file, 0, _LENGTH_BYTES)
        length = int.from_bytes(length_bytes, 'little')
        longest = min(_LONGEST_HEADER, size - _LENGTH_BYTES)
        if length > longest:
          raise ValueError(
            f'its header of {length:,} bytes exceeds {_LONGEST_HEADER:,} or the file'
          )
        text = _bytes(file, _LENGTH_BYTES, length)
        header = foreign.json_object(text)
      metadata = header.pop('__metadata__', {})
      self.metadata = _texts(metadata)
      entries = {}
      for name, fields in header.items():
        entries[name] = _entry(name, fields)
      values_begin = _LENGTH_BYTES + length
      _check_ranges(entries, size - values_begin)
    self.tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
      begin = values_begin + entry.begin
      self.tensors[name] = self._tensor(begin, entry)

  def _tensor(self, begin: int, entry: '_Entry') -> Tensor:
    def read(index: tuple[slice, ...]) -> np.ndarray:
      message = f'{self._path} cannot be read'
      kinds = (OSError, ValueError)
      with (
        converted(kinds, StorageError, message, self._advice),
        foreign.opened(self._path) as file,
      ):
        self._check_unchanged(file)
        part = _part(file, begin, entry, index)
        self._check_unchanged(file)
      return part

    return Tensor(entry.shape, read, entry.dtype)

  def _check_unchanged(self, file: Any) -> None:
    if _state(file) != self._state:
      raise ValueError('it has changed since it was opened')


class _Entry(NamedTuple):
  """A tensor in a header; its values are the bytes [begin, end) after the header."""

  dtype: str
  shape: tuple[int, ...]
  begin: int
  end: int


def _state(file: Any) -> tuple[int, int]:
  """The size and the time of a file: at least one changes when it is written."""
  status = os.fstat(file.fileno())
  return status.st_size, status.st_mtime_ns


def _bytes(file: Any, begin: int, count: int) -> bytes:
  """So many bytes of a file; a ValueError if it ends before."""
  parts = []
  while count:
    size = min(count, _BLOCK)
    part = os.pread(file.fileno(), size, begin)
    if not part:
      raise ValueError(f'it ends at byte {begin:,}, {count:,} bytes too early')
    parts.append(part)
    begin += len(part)
    count -= len(part)
  return b''.join(parts)


def _texts(metadata: Any) -> dict[str, str]:
  is_object = isinstance(metadata, dict)
  if is_object and all(isinstance(text, str) for text in metadata.values()):
    return metadata
  raise ValueError(f'its __metadata__ are {metadata!r:.80}, but an object of texts was expected')


def _is_size(value: Any) -> bool:
  return type(value) is int and 0 <= value < 2**63


def _entry(name: str, entry: Any) -> _Entry:
  if not name.isprintable():
    raise ValueError(f'a tensor has the name {name!a:.80}')
  fields: dict[str, Any] = {}
  if isinstance(entry, dict):
    fields = entry
  dtype = fields.get('dtype')
  shape = fields.get('shape')
  offsets = fields.get('data_offsets')
  if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list)):
    raise ValueError(
      f'{name!r:.80} has {entry!r:.80}, but dtype, shape and data_offsets are needed'
    )
  numbers = [*shape, *offsets]
  are_sizes = all(map(_is_size, numbers))
  is_range = len(offsets) == 2
  is_array = len(shape) <= _MOST_DIMENSIONS
  if not (is_range and are_sizes and is_array):
    raise ValueError(f'{name!r:.80} has the shape {shape!r:.80} at the bytes {offsets!r:.80}')
  begin, end = offsets
  size = end - begin
  fits = size >= 0
  if dtype in _DTYPES:
    value_bits, _ = _DTYPES[dtype]
    bits = value_bits * math.prod(shape)
    fits = fits and 8 * size == bits
  if not fits:
    raise ValueError(f'{name!r:.80}, {dtype!r:.20} {shape!r:.80}, has {size:,} bytes')
  return _Entry(dtype, tuple(shape), begin, end)


def _check_ranges(entries: Mapping[str, _Entry], size: int) -> None:
  """Raises a ValueError unless the ranges follow one another through all bytes after the header."""
  place = 0

  def by_range(item: tuple[str, _Entry]) -> tuple[int, int]:
    _, entry = item
    return entry.begin, entry.end

  for name, entry in sorted(entries.items(), key=by_range):
    if entry.begin != place:
      raise ValueError(f'{name!r:.80} begins at {entry.begin:,}, but {place:,} was expected')
    place = entry.end
  if place != size:
    raise ValueError(f'its tensors have {place:,} bytes, but the file has {size:,} for them')


def _part(file: Any, begin: int, entry: _Entry, index: tuple[slice, ...]) -> np.ndarray:
  """A part of a tensor whose first byte is at `begin`; rows are read in blocks of bounded size."""
  if entry.dtype not in _DTYPES:
    raise ValueError(f'a tensor has the dtype {entry.dtype!r:.20}')
  dtype = numpy_dtype(entry.dtype)
  if not entry.shape:
    content = _bytes(file, begin, dtype.itemsize)
    return np.frombuffer(content, dtype)[0]
  wanted_rows, *others = index
  all_rows, *inner = entry.shape
  first, last, _ = wanted_rows.indices(all_rows)
  row_bytes = dtype.itemsize * math.prod(inner)
  at_once = _BLOCK // max(1, row_bytes)
  at_once = max(1, at_once)
  index_in_block = (slice(None), *others)
  no_rows = np.zeros((0, *inner), dtype)
  parts = [no_rows[index_in_block]]
  for row in range(first, last, at_once):
    rows = min(at_once, last - row)
    block_begin = begin + row * row_bytes
    content = _bytes(file, block_begin, rows * row_bytes)
    values = np.frombuffer(content, dtype)
    block = values.reshape(rows, *inner)
    parts.append(block[index_in_block])
  return np.concatenate(parts)


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """The object in a file; raises a StorageError if it has none."""
  message = f'{file} cannot be read'
  with converted((OSError, ValueError), StorageError, message, FETCH):
    return foreign.json_object(foreign.content(file, _LONGEST_JSON))
