"""Folders and indexes of safetensors files: which files of a place hold which tensors."""

from collections.abc import Sequence
import os
import pathlib
import re
from typing import NamedTuple

from valkyrie.errors import ConfigurationError, StorageError, first_of, storage_errors
from valkyrie.storage import foreign_names
from valkyrie.weights.tensor_files import (
  FETCH,
  INDEX_SUFFIX,
  SUFFIX,
  Tensor,
  TensorFile,
  read_json,
)

_OWN_NAME = 'model'  # the stem of the file or index that is the model, where a folder has several
_SHARD = re.compile(rf'(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(SUFFIX)}')
_OTHER_FORMATS = ('.bin', '.pt', '.pth', '.ckpt', '.h5', '.msgpack', '.gguf')


class Found(NamedTuple):
  """The tensors of a place, and its files with weights that were not read."""

  tensors: dict[str, Tensor]
  unread: tuple[str, ...] = ()


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
  names = _names(path)
  files = [name for name in names if name.endswith(SUFFIX)]
  index = _index_of(path, names)
  if index is not None:
    return _in_index(index, path)
  if not files:
    others = [name for name in names if name.endswith(_OTHER_FORMATS)]
    raise ConfigurationError(_no_weights(path, others))
  has_index = any(name.endswith(INDEX_SUFFIX) for name in names)
  own_file = f'{_OWN_NAME}{SUFFIX}'
  if has_index and own_file in files:
    files = [own_file]
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


def _names(path: pathlib.Path) -> list[str]:
  """The names in a folder; none if it is a file. Raises a StorageError if it cannot be listed."""
  if not path.is_dir():
    return []
  with storage_errors(f'{path} cannot be listed', 'Give this user the right to list the folder.'):
    return sorted(os.listdir(path))


def _index_of(path: pathlib.Path, names: Sequence[str]) -> pathlib.Path | None:
  """The index of a folder with these names; None if its files count."""
  indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
  own = _OWN_NAME + INDEX_SUFFIX
  single = _OWN_NAME + SUFFIX
  if own in indexes:
    if single in names and single not in _weight_map(path / own).values():
      raise ConfigurationError(
        f'{path} has {single} and {own}, which names other files: one of the two is of other '
        'weights, perhaps of an earlier time. Move away the one that you do not want to load.'
      )
    return path / own
  if not indexes or single in names:
    return None
  if len(indexes) > 1:
    raise ConfigurationError(
      f'{path} has {" and ".join(first_of(indexes, 4))}, but no {own}. Move away those that you do '
      'not want to load.'
    )
  return path / indexes[0]


def _weight_map(index: pathlib.Path) -> dict[str, str]:
  """{tensor: name of its file}, checked to be in the folder."""
  listed = read_json(index).get('weight_map')
  fetch = 'Fetch these weights again, from a source that you trust.'
  if not isinstance(listed, dict) or not listed:
    raise StorageError(f'{index} has no weight_map, but {listed!r:.80}. {FETCH}')
  files = {}
  for tensor, file in listed.items():
    files[tensor] = foreign_names.checked(file, index, fetch)
  return files


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
    for name in named:
      tensors[name] = content[name]
  return Found(tensors, _unread(folder, files))


def _listed(names: list[str]) -> str:
  quoted = [repr(name)[:80] for name in names]
  return ', '.join(first_of(quoted, 3))


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
  weights = [name for name in _names(path) if name.endswith((SUFFIX, *_OTHER_FORMATS))]
  return tuple(name for name in weights if name not in files)


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
