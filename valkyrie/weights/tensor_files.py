"""Files of tensors from any program: safetensors, and folders and indexes that name several files.

A file begins with 8 bytes, the length of a JSON header, which gives each tensor a dtype, a shape
and a range of the bytes that follow (https://huggingface.co/docs/safetensors). Tensors are read
slice by slice with ordinary reads: a mapped file that is cut while it is read would end the
process with a signal.
"""

from collections.abc import Callable, Mapping
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from valkyrie import foreign
from valkyrie.errors import ConfigurationError, StorageError, converted, first_of
from valkyrie.storage import foreign_names

SUFFIX = '.safetensors'
INDEX_SUFFIX = f'{SUFFIX}.index.json'
_OWN_NAME = 'model'  # the stem of the file or index that is the model, where a folder has several
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
_LONGEST_HEADER = 2**25  # bytes: 200,000 tensors; parsed JSON takes up to 30 times its length
_LONGEST_JSON = 2**25  # bytes of an index or a configuration, for the same reason
_BLOCK = 2**24  # bytes that are read at once
_SHARD = re.compile(rf'(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}')
_OTHER_FORMATS = ('*.bin', '*.pt', '*.pth', '*.ckpt', '*.h5', '*.msgpack', '*.gguf')
_FETCH = 'Fetch it again.'


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
    return self._replace(shape=self.shape[::-1], read=lambda index: self.read(index[::-1]).T)

  def whole(self) -> np.ndarray:
    """All of it, read."""
    return self.read((slice(None),) * len(self.shape))


class Found(NamedTuple):
  """The tensors of a place, and its files with weights that were not read."""

  tensors: dict[str, Tensor]
  unread: tuple[str, ...] = ()


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

  def __init__(self, path: pathlib.Path, what: str = 'safetensors file', advice: str = _FETCH):
    """Reads the header; raises a StorageError if the file is not whole, or no such file.

    `what` and `advice` are parts of the messages.
    """
    self._path = path
    self._advice = advice
    message = f'{path} is not a whole {what}'
    with converted((OSError, ValueError), StorageError, message, advice):
      with foreign.opened(path) as file:
        self._state = _state(file)
        size = self._state[0]
        length = int.from_bytes(_bytes(file, 0, 8), 'little')
        if length > min(_LONGEST_HEADER, size - 8):
          raise ValueError(
            f'its header of {length:,} bytes exceeds {_LONGEST_HEADER:,} or the file'
          )
        header = foreign.json_object(_bytes(file, 8, length))
      self.metadata = _texts(header.pop('__metadata__', {}))
      entries = {name: _entry(name, entry) for name, entry in header.items()}
      _check_ranges(entries, size - 8 - length)
    self.tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
      self.tensors[name] = self._tensor(8 + length + entry.begin, entry)

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
    part = os.pread(file.fileno(), min(count, _BLOCK), begin)
    if not part:
      raise ValueError(f'it ends at byte {begin:,}, {count:,} bytes too early')
    parts.append(part)
    begin += len(part)
    count -= len(part)
  return b''.join(parts)


def _texts(metadata: Any) -> dict[str, str]:
  if isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values()):
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
  if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
    raise ValueError(
      f'{name!r:.80} has {entry!r:.80}, but dtype, shape and data_offsets are needed'
    )
  if len(offsets) != 2 or not all(map(_is_size, (*shape, *offsets))) or len(shape) > 32:
    raise ValueError(f'{name!r:.80} has the shape {shape!r:.80} at the bytes {offsets!r:.80}')
  begin, end = offsets
  size = end - begin
  fits = size >= 0
  if dtype in _DTYPES:
    bits, _ = _DTYPES[dtype]
    fits = fits and 8 * size == bits * math.prod(shape)
  if not fits:
    raise ValueError(f'{name!r:.80}, {dtype!r:.20} {shape!r:.80}, has {size:,} bytes')
  return _Entry(dtype, tuple(shape), begin, end)


def _check_ranges(entries: Mapping[str, _Entry], size: int) -> None:
  """Raises a ValueError unless the ranges follow one another through all bytes after the header."""
  place = 0
  for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
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
    return np.frombuffer(_bytes(file, begin, dtype.itemsize), dtype)[0]
  first, last, _ = index[0].indices(entry.shape[0])
  inner = entry.shape[1:]
  row_bytes = dtype.itemsize * math.prod(inner)
  at_once = max(1, _BLOCK // max(1, row_bytes))
  parts = [np.zeros((0, *inner), dtype)[(slice(None), *index[1:])]]
  for row in range(first, last, at_once):
    rows = min(at_once, last - row)
    content = _bytes(file, begin + row * row_bytes, rows * row_bytes)
    block = np.frombuffer(content, dtype).reshape(rows, *inner)
    parts.append(block[(slice(None), *index[1:])])
  return np.concatenate(parts)


def in_files(path: pathlib.Path) -> Found:
  """The tensors of a safetensors file, of an index, or of a folder with such files.

  With an index, the file that it names for a tensor counts. In a folder the model's own index,
  `model.safetensors.index.json`, comes before any other one. Without an index all files are read,
  and a name in two files is refused.

  Raises:
    ConfigurationError: there is no such file, or it is not clear which one is meant.
    StorageError: a file is missing, not whole, not in the folder, or does not fit the index.
  """
  if path.name.endswith(INDEX_SUFFIX):
    return _in_index(path, path.parent)
  if path.name.endswith(SUFFIX):
    return Found(TensorFile(path).tensors)
  files = sorted(file.name for file in path.glob(f'*{SUFFIX}'))
  others: list[str] = []
  for pattern in _OTHER_FORMATS:
    others += [file.name for file in path.glob(pattern)]
  others.sort()
  index = _index_of(path)
  if index is not None:
    return _in_index(index, path)
  if not files:
    raise ConfigurationError(_no_weights(path, others))
  has_index = any(path.glob(f'*{INDEX_SUFFIX}'))
  if has_index and (path / f'{_OWN_NAME}{SUFFIX}').exists():
    files = [_OWN_NAME + SUFFIX]
  _check_complete(path, files)
  tensors: dict[str, Tensor] = {}
  file_of: dict[str, str] = {}
  for file in files:
    for name, tensor in TensorFile(path / file).tensors.items():
      if name in tensors:
        raise ConfigurationError(
          f'{path} has the tensor {name!r:.80} in {file_of[name]} and in {file}, and no index that '
          'says which one counts. Move away the one that you do not want to load.'
        )
      tensors[name] = tensor
      file_of[name] = file
  return Found(tensors, _unread(path, files))


def _index_of(path: pathlib.Path) -> pathlib.Path | None:
  """The index of a folder; None if its files count."""
  indexes = sorted(path.glob(f'*{INDEX_SUFFIX}'))
  own = path / (_OWN_NAME + INDEX_SUFFIX)
  single = path / (_OWN_NAME + SUFFIX)
  if own in indexes:
    if single.exists() and single.name not in _weight_map(own).values():
      raise ConfigurationError(
        f'{path} has {single.name} and {own.name}, which names other files: one of the two is of '
        f'other weights, perhaps of an earlier time. Move away the one that you do not want to '
        'load.'
      )
    return own
  if not indexes or single.exists():
    return None
  if len(indexes) > 1:
    raise ConfigurationError(
      f'{path} has {" and ".join(first_of([index.name for index in indexes], 4))}, but no '
      f'{own.name}. Move away those that you do not want to load.'
    )
  return indexes[0]


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  """{tensor: name of its file}, checked to be in the folder."""
  listed = read_json(index).get('weight_map')
  fetch = 'Fetch these weights again, from a source that you trust.'
  if not isinstance(listed, dict) or not listed:
    raise StorageError(f'{index} has no weight_map, but {listed!r:.80}. {_FETCH}')
  return {tensor: foreign_names.checked(file, index, fetch) for tensor, file in listed.items()}


def _in_index(index: pathlib.Path, folder: pathlib.Path) -> Found:
  """The tensors that an index names, in the files that it names for them."""
  file_of = _weight_map(index)
  files = sorted(set(file_of.values()))
  tensors: dict[str, Tensor] = {}
  for file in files:
    place = folder / file
    if not place.exists():
      raise StorageError(
        f'{index} names {file}, which is not there. Fetch all files of these weights.'
      )
    content = TensorFile(place).tensors
    named = [name for name in file_of if file_of[name] == file]
    missing = [name for name in named if name not in content]
    unknown = [name for name in content if name not in file_of]
    if missing or unknown:
      misfit = f'also has {_listed(unknown)}'
      if missing:
        misfit = f'lacks {_listed(missing)}'
      raise StorageError(
        f'{place} does not fit {index.name}: it {misfit}. They are of different weights. Fetch all '
        'files of these weights again, or move the index away to read the files without it.'
      )
    tensors |= {name: content[name] for name in named}
  return Found(tensors, _unread(folder, files))


def _listed(names: list[str]) -> str:
  return ', '.join(first_of([repr(name)[:80] for name in names], 3))


def _check_complete(path: pathlib.Path, files: list[str]) -> None:
  """Raises a StorageError if a file is one of several that are not all there."""
  for file in files:
    match = _SHARD.fullmatch(file)
    if match is None:
      continue
    stem = match[1]
    count = int(match[3])
    missing = []
    for number in range(1, min(count, 9999) + 1):
      name = f'{stem}-{number:05}-of-{count:05}{SUFFIX}'
      if name not in files:
        missing.append(name)
    if missing:
      raise StorageError(
        f'{path} has {file}, but not {", ".join(first_of(missing, 3))}. Fetch all files of these '
        'weights.'
      )


def _unread(path: pathlib.Path, files: list[str]) -> tuple[str, ...]:
  """The files of a folder that look like weights and are not read."""
  names: set[str] = set()
  for pattern in (f'*{SUFFIX}', *_OTHER_FORMATS):
    names.update(file.name for file in path.glob(pattern))
  return tuple(sorted(names - set(files)))


def _no_weights(path: pathlib.Path, others: list[str]) -> str:
  message = f'{path} has no {SUFFIX} file and no checkpoints. '
  if path.name.isdecimal() and path.parent.name == 'checkpoints':
    run = path.parent.parent
    return message + (
      f'It is a step of the run {run}: name {run}, and set InitialWeights.step = {path.name!r}.'
    )
  if others:
    return message + (
      f'{", ".join(first_of(others, 3))} may hold weights in another format, which can execute '
      f'code when it is opened. Name a folder with {SUFFIX} files of these weights, such as '
      'model.save_pretrained(FOLDER) of transformers writes.'
    )
  return message + f'Name the directory of a run, a {SUFFIX} file, or a folder with such files.'


def read_json(file: pathlib.Path) -> dict[str, Any]:
  """The object in a file; raises a StorageError if it has none."""
  message = f'{file} cannot be read'
  with converted((OSError, ValueError), StorageError, message, _FETCH):
    return foreign.json_object(foreign.content(file, _LONGEST_JSON))
