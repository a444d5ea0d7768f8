"""Folders of output, which lie apart from the texts that are read.

Folders are compared by their identity in the file system, so that links, `..` and second mounts of
a folder change nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import os
import pathlib
import re
from typing import Any
import urllib.parse

from valkyrie.config import paths, redact
from valkyrie.data import file_names
from valkyrie.distributed import heartbeat
from valkyrie.errors import ConfigurationError, DataError, StorageError, with_home
from valkyrie.foreign import shown

_STORE_FILES = ('store.json', 'shard-00000-of-00001/shard.json', 'shard-00000-of-00001/tokens.npy')
_RUN_FILES = ('metrics.jsonl', 'log.txt', 'config.json', 'eval/metrics.jsonl')
_WILDCARDS = re.compile(r'[*?[]')
Identity = tuple[int, int]  # device and inode of a folder


def check_store(output: pathlib.Path, source: str | None, options: Mapping[str, str]) -> None:
  """Raises a ConfigurationError if a store at `output` would be mixed with what it is made from.

  It may be neither inside the source nor above it, nor inside or above a location that an option
  of the task names, such as `held_out`.
  """
  places = {'the source': local_path(source)}
  for option, value in options.items():
    place = local_path(value)
    if place is not None:
      root, _ = _literal(place)
      if os.path.lexists(root):
        places[f'the option {option}'] = place
  for role, place in places.items():
    if place is None:
      continue
    relation = relation_to(output, place, _STORE_FILES, links=True)
    if relation is not None:
      raise ConfigurationError(
        f'The token store {shown(output)} {relation} {role}, {shown(redact.in_value(place))}. Its '
        'files would be mixed with these texts. Nothing was written. Name a folder apart from '
        'them: by --output of build_store, or TaskFeed.data_dir or VALKYRIE_CACHE of a run.'
      )


def check_files(output: pathlib.Path, files: Any) -> None:
  """Raises a ConfigurationError if `SourceFiles` of a task are in the folder `output` or below."""
  place = _identity(os.path.realpath(output))
  if place is None:
    return
  folders_above = {*_identities_above_files(files)}
  if place in folders_above:
    raise ConfigurationError(
      f'The token store {shown(output)} is above the files of its task, {shown(files)}. Nothing '
      'was written. Name a folder apart from them: by --output of build_store, or '
      'TaskFeed.data_dir of a run.'
    )


def check_run(model_dir: str | os.PathLike, bindings: Mapping[str, Any]) -> None:
  """Raises a ConfigurationError if a run's directory is a text that it reads, or inside one.

  Its logs would be texts of the next start.

  Args:
    model_dir: the directory, or a `BucketDirectory`.
    bindings: the bindings of the run, see `config.record.bindings`.
  """
  for location in _sources_of(bindings):
    place = local_path(location)
    if place is None:
      continue
    relation = relation_to(model_dir, place, _RUN_FILES, links=False)
    if relation in ('is', 'is inside'):
      raise ConfigurationError(
        f'--model_dir={shown(model_dir)} {relation} the source of texts '
        f'{shown(redact.in_value(place))}. The files of the run would be read as texts. Nothing '
        'was written. Name another --model_dir.'
      )


def _sources_of(bindings: Mapping[str, Any]) -> Iterator[str]:
  """The locations of texts that the bindings of a run name."""
  for name, value in bindings.items():
    binding = name.rpartition('/')[2]
    if binding.endswith('TaskFeed.source') and isinstance(value, str):
      yield value
    if binding.endswith('Mixture.sources') and isinstance(value, Mapping):
      for source in value.values():
        location = source
        if isinstance(source, Mapping):
          location = source.get('source')
        if isinstance(location, str):
          yield location


def relation_to(
  output: str | os.PathLike,
  source: str,
  written: Iterable[str],
  *,
  links: bool,
) -> str | None:
  """How a folder lies to a source of texts: 'is', 'is inside' or 'is above'; None if apart.

  A source that is a folder holds all that is below it, and with `links` also the folders to which
  links in it lead. A file holds nothing, and a pattern holds the files that it matches.

  Args:
    output: a path, which need not exist.
    source: a local path or pattern, see `SourceFiles`.
    written: names of files below `output`, for instance.
  """
  root, pattern = _literal(source)
  place = os.path.realpath(output)
  real_root = os.path.realpath(root)
  identity = _identity(place)
  is_same = identity is not None and identity == _identity(real_root)
  if place == real_root or is_same:
    if pattern:
      return 'is above'
    return 'is'
  above_root = set(_identities_above(real_root))
  above_root.update(_identities_above(os.path.abspath(root)))
  if pattern:
    from valkyrie.data import source_files  # noqa: PLC0415  (pyarrow, only for patterns)

    with contextlib.suppress(DataError, StorageError):  # the reader of the source raises them
      files = source_files.SourceFiles(source)
      above_root.update(_identities_above_files(files))
  if _is_below(real_root, place) or identity in above_root:
    return 'is above'
  if pattern:
    folder = real_root.rstrip('/')
    regex = file_names.regex(f'{folder}/', pattern)
    written_files = [f'{place}/{name}' for name in written]
    is_inside = any(map(regex.fullmatch, written_files))
  else:
    is_inside = _is_inside(place, real_root, links=links)
  if is_inside:
    return 'is inside'
  return None


def _is_inside(place: str, root: str, *, links: bool) -> bool:
  """Whether a real path is below a folder, or with `links` below a folder that links in it name."""
  if _is_below(place, root):
    return True
  above_place = set(_identities_above(place))
  identity = _identity(place)
  if identity is not None:
    above_place.add(identity)
  if _identity(root) in above_place:
    return True
  if not links:
    return False
  return any(folder in above_place for folder in _folders_below(root))


def local_path(location: str | None) -> str | None:
  """The path of a location on this machine, or None."""
  if not location:
    return None
  scheme, separator, rest = location.partition('://')
  if separator and scheme.lower() == 'file':
    return urllib.parse.unquote(rest.partition('?')[0])
  if paths.is_address(location):
    return None
  return os.path.abspath(with_home(location))


def _literal(path: str) -> tuple[str, str]:
  """The beginning of a path before its pattern, and the pattern.

  A path that exists is taken literally, even with `*` in it.
  """
  root = path
  while _WILDCARDS.search(root) and not os.path.lexists(root):
    root = os.path.dirname(root)
  return root, path[len(root) :].lstrip('/')


def _is_below(path: str, folder: str) -> bool:
  common = os.path.commonpath([path, folder])
  return path != folder and common == folder


def _identity(path: str) -> Identity | None:
  try:
    status = os.stat(path)
  except (OSError, ValueError):
    return None
  return status.st_dev, status.st_ino


def _identities_above(path: str) -> Iterator[Identity]:
  """The identities of the existing folders above a path."""
  for folder in pathlib.PurePath(path).parents:
    identity = _identity(str(folder))
    if identity is not None:
      yield identity


def _identities_above_files(files: Any) -> Iterator[Identity]:
  """The identities of the folders above local files, also by other paths to them."""
  folders = set()
  for file in files.files:
    if file.changed:
      folders.add(os.path.dirname(file.path))
  for folder in folders:
    yield from _identities_above(f'{folder}/file')
    yield from _identities_above(f'{os.path.realpath(folder)}/file')


def _folders_below(root: str) -> Iterator[Identity]:
  """The identities of the folders below a folder, also of those that links in it lead to."""
  known: set[Identity | None] = {None}
  waiting = [root]
  while waiting:
    heartbeat.beat()  # a run may wait for the store
    folder = waiting.pop()
    identity = _identity(folder)
    if identity in known or identity is None:
      continue
    known.add(identity)
    yield identity
    try:
      with os.scandir(folder) as entries:
        waiting += [entry.path for entry in entries if entry.is_dir()]
    except OSError:  # it cannot be read, neither for texts
      continue
