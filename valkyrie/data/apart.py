"""Folders of output, which lie apart from the texts that are read.

Folders are compared by what the system knows of them, so that links, `..` and second mounts of a
folder change nothing.
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
Identity = tuple[int, int]  # of a folder: its device and number


def check_store(output: pathlib.Path, source: str | None, options: Mapping[str, str]) -> None:
  """Raises a ConfigurationError if a store at `output` would be mixed with what it is made from.

  It may be neither inside the source nor above it, nor inside or above a location that an option
  of the task names, such as `held_out`.
  """
  named = {'the source': source}
  named |= {f'the option {name}': value for name, value in options.items()}
  for what, location in named.items():
    place = local_path(location)
    if place is None or (what != 'the source' and not os.path.lexists(_literal(place)[0])):
      continue
    if relation := relation_to(output, place, _STORE_FILES, links=True):
      raise ConfigurationError(
        f'The token store {shown(output)} {relation} {what}, {shown(redact.in_value(place))}. Its '
        'files would be mixed with these texts. Nothing was written. Name a folder apart from '
        'them: by --output of build_store, or TaskFeed.data_dir or VALKYRIE_CACHE of a run.'
      )


def check_files(output: pathlib.Path, files: Any) -> None:
  """Raises a ConfigurationError if `SourceFiles` of a task are in the folder `output` or below."""
  place = _identity(os.path.realpath(output))
  if place is not None and place in {*_identities_above_files(files)}:
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
    bindings: of the run, see `config.record.bindings`.
  """
  for location in _sources_of(bindings):
    place = local_path(location)
    relation = place and relation_to(model_dir, place, _RUN_FILES, links=False)
    if place is not None and relation in ('is', 'is inside'):
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
      for each in value.values():
        location = each.get('source') if isinstance(each, Mapping) else each
        if isinstance(location, str):
          yield location


def relation_to(
  output: str | os.PathLike, source: str, written: Iterable[str], *, links: bool
) -> str | None:
  """'is', 'is inside' or 'is above', of a folder and a source of texts; None if they are apart.

  A folder holds all that is below it, and with `links` what links in it lead to. A file holds
  nothing, and a pattern what it matches.

  Args:
    output: a path, which need not exist.
    source: a local path or pattern, see `SourceFiles`.
    written: names of files below `output`, for instance.
  """
  root, pattern = _literal(source)
  place, real_root = os.path.realpath(output), os.path.realpath(root)
  identity, root_identity = _identity(place), _identity(real_root)
  if place == real_root or (identity is not None and identity == root_identity):
    return 'is above' if pattern else 'is'
  above_root = {*_identities_above(real_root), *_identities_above(os.path.abspath(root))}
  if pattern:
    from valkyrie.data import source_files  # noqa: PLC0415  (pyarrow, only for patterns)

    with contextlib.suppress(DataError, StorageError):  # which the reader of the source raises
      files = source_files.SourceFiles(source)
      above_root.update(_identities_above_files(files))
  if _is_below(real_root, place) or identity in above_root:
    return 'is above'
  if pattern:
    matches = file_names.regex(f'{real_root.rstrip("/")}/', pattern).fullmatch
    is_inside = any(matches(f'{place}/{name}') for name in written)
  else:
    above_output = {*_identities_above(place), identity} - {None}
    is_inside = _is_below(place, real_root) or root_identity in above_output
    if links and not is_inside:
      is_inside = any(folder in above_output for folder in _folders_below(real_root))
  return 'is inside' if is_inside else None


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
  """The beginning of a path before its pattern, and the pattern; a name that exists is none."""
  root = path
  while _WILDCARDS.search(root) and not os.path.lexists(root):
    root = os.path.dirname(root)
  return root, path[len(root) :].lstrip('/')


def _is_below(path: str, folder: str) -> bool:
  return path != folder and os.path.commonpath([path, folder]) == folder


def _identity(path: str) -> Identity | None:
  try:
    found = os.stat(path)
  except (OSError, ValueError):
    return None
  return found.st_dev, found.st_ino


def _identities_above(path: str) -> Iterator[Identity]:
  """Of the existing folders above a path."""
  for folder in pathlib.PurePath(path).parents:
    if identity := _identity(str(folder)):
      yield identity


def _identities_above_files(files: Any) -> Iterator[Identity]:
  """Of the folders above files, also by other paths to them; none above files in a bucket."""
  for folder in {os.path.dirname(file.path) for file in files.files if file.changed}:
    yield from _identities_above(f'{folder}/file')
    yield from _identities_above(f'{os.path.realpath(folder)}/file')


def _folders_below(root: str) -> Iterator[Identity]:
  """Of the folders below a folder, also those that links in it lead to."""
  known: set[Identity | None] = {None}
  waiting = [root]
  while waiting:
    heartbeat.beat()  # of the run that waits for the store
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
