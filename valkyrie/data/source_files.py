"""The files of a text source: found by a path, a folder or a pattern, here or in a bucket."""

from collections.abc import Mapping, Sequence
import fnmatch
import os
import posixpath
import re
from typing import Any

import pyarrow as pa
import pyarrow.fs

from valkyrie import foreign
from valkyrie.config import redact
from valkyrie.data import file_names, splits
from valkyrie.data.file_names import COMPRESSIONS, FORMATS, ROWS, TABLES, format_of
from valkyrie.data.file_systems import access, filesystem_of
from valkyrie.data.source_file import SourceFile, further_links
from valkyrie.errors import DataError

_WILDCARDS = re.compile(r'[*?[]')
# In the cache of Hugging Face's hub.
_REVISION = re.compile(r'(?P<cache>.*/(datasets|models)--[^/]+/snapshots)/(?P<revision>[^/]+)/.*')
_NO_SPLIT = '(none)'
_ALL_SPLITS = (
  "To read all splits as one text, set text_splits = 'all' (--option=splits=all of build_store)."
)


class SourceFiles:
  """The files at a location, sorted by path, or local files named one by one.

  A folder means all files of known formats below it, except hidden ones and the caches that
  Hugging Face's `datasets` writes; `left_out` has its other files. In a pattern `*` stops at a
  slash, and `**` does not. A path that exists is taken literally, even with `*` in it. `root` is
  the folder of the listing, to which paths in messages and hashes are relative.

  A file is read once, even if there are several links to it or compressed copies of it. `notes`
  tells a user what was left out; `splits` has the files of each split that names tell, see
  `valkyrie.data.splits`.

  Raises:
    DataError: there are no files, none is for training, they are of several revisions or
      configurations of a data set, or they cannot be listed.
    StorageError: a bucket cannot be listed.
  """

  def __init__(
    self,
    location: str | Sequence[str],
    formats: Sequence[str] = FORMATS,
    split: str | None = None,
  ):
    """Lists `location`: a local path, or a URI that pyarrow supports (gs://, s3://, hdfs://).

    Args:
      location: a file, a folder or a pattern; or several files.
      formats: the suffixes of files that a folder is read for.
      split: which files are in `files`. None: all. 'train': all whose names tell no other split.
        'validation': the files of the validation split, or all if no name tells a split.
    """
    self.location = location
    self.formats = tuple(formats)
    self.split = split
    self._place = location if isinstance(location, str) else location[0]
    self.left_out: list[SourceFile] = []
    self.splits: dict[str, list[SourceFile]] = {}
    self.notes: list[str] = []
    with access(self._place, f'The source {self} cannot be listed'):
      self._filesystem, path = filesystem_of(self._place)
      self._is_local = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
      if self._place == location:
        self.root, self.files = self._listed(path)
      else:
        self.root, self.files = self._named()
    if not self.files and self.splits:
      others: list[str] = []
      for other, split_files in self.splits.items():
        others.append(f'{other} ({self._some(split_files)})')
      raise DataError(
        f'The source {self} has no files for training. By their names or by README.md they are of '
        f'the split {"; ".join(others)}. To train on them, name a file, a folder of this name, or '
        f'a pattern that has its word, such as test-*. {_ALL_SPLITS}'
      )
    if not self.files:
      raise DataError(
        f'The source {self} has no files of a known format. Found nothing that ends with '
        f'{", ".join(self.formats)}, also compressed as {" or ".join(COMPRESSIONS)}. Name a '
        'file, a folder or a pattern of such files.'
      )

  def __str__(self) -> str:
    """The location, without secrets."""
    text = foreign.shown(redact.in_value(self._place))
    if self._place != self.location:
      more = len(self.location) - 1
      text += f' and {more} more'
    return text

  def name(self, file: SourceFile) -> str:
    """The path of a file relative to the root."""
    return posixpath.relpath(file.path, self.root)

  def open(self, file: SourceFile) -> Any:
    """A pyarrow stream of the content, decompressed."""
    suffix = file_names.suffix(file.path)
    compression = COMPRESSIONS.get(suffix)
    return self._filesystem.open_input_stream(file.path, compression=compression)

  def open_at_random(self, file: SourceFile) -> Any:
    """A pyarrow file with random access; a compressed one is read into memory."""
    if file_names.suffix(file.path) in COMPRESSIONS:
      with self.open(file) as stream:
        return pa.BufferReader(foreign.whole(stream))
    return self._filesystem.open_input_file(file.path)

  def shared_with(self, other: 'SourceFiles') -> list[str]:
    """The paths of the files that `other` has, too, also under another name on this machine."""
    if self._filesystem.type_name != other._filesystem.type_name:
      return []
    real_path = str
    if self._is_local:
      real_path = os.path.realpath
    others = {real_path(file.path) for file in other.files}
    shared: list[str] = []
    for file in self.files:
      if real_path(file.path) in others:
        shared.append(file.path)
    return shared

  def check_unchanged(self, file: SourceFile) -> None:
    """Raises a DataError if a file has changed, or a StorageError if the bucket does not answer.

    Times are compared in seconds, since S3 tells no more of a single file.
    """
    with access(self._place, f'{file} cannot be read'):
      info = self._filesystem.get_file_info(file.path)
      present = self._file(info)
    second = present.modified // 10**9
    known_second = file.modified // 10**9
    is_of_size = present.size == file.size
    if not is_of_size or second != known_second:
      change = f'it has {present.size} bytes'
      if present.size is None:
        change = 'it is gone'
      raise DataError(
        f'{file} has changed since it was listed with {file.size} bytes: {change}. Run again '
        'when nobody writes to it.'
      )

  def _named(self) -> tuple[str, list[SourceFile]]:
    """The named files that are there."""
    folders = [posixpath.dirname(path) for path in self.location]
    root = posixpath.commonpath(folders)
    paths = list(self.location)
    infos = self._filesystem.get_file_info(paths)
    files = [self._file(info) for info in infos if info.is_file]
    return root, sorted(files)

  def _listed(self, path: str) -> tuple[str, list[SourceFile]]:
    root = self._literal(path)
    pattern = path[len(root) :].lstrip('/')
    if self._is_local:
      foreign.check_tree(root)
    if not pattern:
      info = self._filesystem.get_file_info(root)
      if info.is_file:
        return posixpath.dirname(path), [self._file(info)]
    selector = pyarrow.fs.FileSelector(root or '.', recursive=True)
    all_infos = self._filesystem.get_file_info(selector)
    infos = [info for info in all_infos if info.is_file]
    if pattern:
      folder = path.removesuffix(pattern)
      regex = file_names.regex(folder, pattern)
      chosen = []
      for info in infos:
        normal_path = posixpath.normpath(info.path)
        if regex.fullmatch(normal_path):
          chosen.append(info)
    else:
      _check_single_split(root, [info.path for info in infos])
      by_name = {}
      for info in infos:
        name = info.path.removeprefix(root).strip('/')
        by_name[name] = info
      chosen = self._wanted(by_name)
    self.root = root or '.'
    files = sorted(self._file(info) for info in chosen)
    self._check_revisions(files)
    unique_files = self._once(files)
    return self.root, self._of_split(unique_files, pattern)

  def _once(self, files: list[SourceFile]) -> list[SourceFile]:
    """Each file by one of its names, and each name in one compression."""
    copies: dict[SourceFile, SourceFile] = {}
    if self._is_local:
      copies = further_links(files, self.formats)
    by_name: dict[str, SourceFile] = {}
    by_stem: dict[str, SourceFile] = {}
    for file in sorted(files, key=_is_compressed):
      if file in copies:
        continue
      name = file_names.without_compression(file.path)
      first = by_name.setdefault(name, file)
      if first is not file:
        copies[file] = first
        continue
      stem = file_names.without_formats(file.path)
      first = by_stem.setdefault(stem, file)
      both_are_rows = format_of(file.path) in ROWS and format_of(first.path) in ROWS
      if first is not file and both_are_rows:
        self.notes.append(
          f'{self.name(file)} and {self.name(first)} differ only in their format, and both are '
          'read. If they have the same texts, name only one, by a pattern.'
        )
    if copies:
      pairs = []
      for copy, first in copies.items():
        pairs.append(f'{self.name(copy)} is {self.name(first)}')
      self.notes.append(
        f'Links and compressed copies of other files are not read again: {file_names.some(pairs)}.'
      )
    return [file for file in files if file not in copies]

  def _check_revisions(self, files: list[SourceFile]) -> None:
    """Raises a DataError for several revisions of a data set in the cache of Hugging Face's hub."""
    revisions: dict[str, set[str]] = {}
    for file in files:
      match = _REVISION.fullmatch(file.path)
      if match:
        names = revisions.setdefault(match['cache'], set())
        names.add(match['revision'])
    for cache, names in revisions.items():
      if len(names) > 1:
        raise DataError(
          f'The source {self} has {len(names)} revisions of one data set: '
          f'{", ".join(sorted(names))}. Name the folder of one, such as {cache}/{max(names)}.'
        )

  def _of_split(self, files: list[SourceFile], pattern: str) -> list[SourceFile]:
    """The files of `self.split`; it fills `splits`, and notes what is left out."""
    if self.split is None:
      return files
    names = {self.name(file): file for file in files}
    known, doubtful = self._splits_of(names, is_folder=not pattern)
    for split in splits.spelled(pattern):
      known = {name: told for name, told in known.items() if told != split}
    for name, split in known.items():
      files_of_split = self.splits.setdefault(split, [])
      files_of_split.append(names[name])
    if self.split == splits.VALIDATION:
      return self.splits.get(splits.VALIDATION) or files
    others = []
    for split, split_files in self.splits.items():
      if split != splits.TRAIN:
        named = self._some(split_files)
        others.append(f'{len(split_files)} of the split {split} ({named})')
    if others:
      self.notes.append(
        'By their names or by README.md, these files are not trained on: '
        f'{"; ".join(others)}. Those of the split validation are the validation split, unless '
        f'held_out has a value. {_ALL_SPLITS}'
      )
    if doubtful and not pattern:
      self.notes.append(
        'These files are named like a split for validation or tests, but have no counterpart for '
        'training beside them, so they are trained on: '
        f'{file_names.some(doubtful)}. To leave them out, name the others by a pattern.'
      )
    training = []
    for name, file in names.items():
      if known.get(name, splits.TRAIN) == splits.TRAIN:
        training.append(file)
    return training

  def _splits_of(
    self,
    names: Mapping[str, SourceFile],
    *,
    is_folder: bool,
  ) -> tuple[dict[str, str], list[str]]:
    """The splits that a dataset card or the names tell, and names that are doubtful."""
    rows = {name for name in names if format_of(name) in ROWS}
    stems = {name: file_names.without_formats(name) for name in names}
    by_name = splits.named(stems, rows)
    if not is_folder:
      return by_name
    card = self._card()
    if len(card) > 1:
      names_of_card = [configuration.name for configuration in card]
      raise DataError(
        f'The source {self} has {len(card)} configurations by its README.md, which may have the '
        f'same texts: {file_names.some(names_of_card)}. Name the files of one by a folder or a '
        'pattern.'
      )
    if not card:
      return by_name
    by_card = splits.of_configuration(card[0], names)
    if not by_card:
      return by_name
    known = {name: by_card.get(name, _NO_SPLIT) for name in names}
    for name, split in by_card.items():
      if not split:
        told = by_name.splits.get(name, splits.TRAIN)
        known[name] = told
    return known, []

  def _card(self) -> list[splits.Configuration]:
    """The configurations of the README.md in the folder, as Hugging Face's hub has them."""
    path = posixpath.join(self.root, 'README.md')
    info = self._filesystem.get_file_info(path)
    if not info.is_file:
      return []
    with self._filesystem.open_input_stream(path, compression=None) as stream:
      content = stream.read(splits.LARGEST_CARD)
    card = content.decode(errors='replace')
    return splits.configurations(card)

  def _some(self, files: Sequence[SourceFile]) -> str:
    names = [self.name(file) for file in files]
    return file_names.some(names)

  def _literal(self, path: str) -> str:
    """The beginning of a path before its pattern; a path that exists is taken literally."""
    while _WILDCARDS.search(path):
      info = self._filesystem.get_file_info(path)
      if info.type != pyarrow.fs.FileType.NotFound:
        break
      path = posixpath.dirname(path)
    return path

  def _wanted(self, infos: dict[str, Any]) -> list[Any]:
    """The files of a folder that are read, selected by their names."""
    formats = {}
    for name in infos:
      if not _is_hidden(name):
        formats[name] = format_of(name)
    known = {name for name, form in formats.items() if form in self.formats}
    tables = {name for name in known if formats[name] in TABLES}
    texts = known - tables
    # A README may describe tables and files of rows, but is not a reason to leave them out.
    readmes = {name for name in texts if file_names.is_readme(name)}
    has_rows = any(formats[name] in ROWS for name in texts)
    wanted = texts
    if texts == readmes:
      wanted = tables or texts
    elif has_rows:
      wanted = texts - readmes
    self.left_out = []
    for name in formats:
      if name not in wanted:
        left_out = self._file(infos[name])
        self.left_out.append(left_out)
    return [infos[name] for name in wanted]

  def _file(self, info: Any) -> SourceFile:
    changed = 0
    if info.is_file and self._is_local:
      changed = os.stat(info.path).st_ctime_ns
    return SourceFile(info.path, info.size, info.mtime_ns or 0, changed)


def _check_single_split(root: str, files: Sequence[str]) -> None:
  """Raises a ValueError for a folder in which Hugging Face's `datasets` keeps several splits."""
  index = posixpath.join(root, 'dataset_dict.json')
  if index not in files:
    return
  folders = set()
  for file in files:
    relative = posixpath.relpath(file, root)
    folder, slash, _ = relative.partition('/')
    if slash:
      folders.add(folder)
  named = ', '.join(sorted(folders))
  raise ValueError(f'it holds several splits; name one: {named}')


def _is_hidden(name: str) -> bool:
  """Whether a file below a folder is hidden, or a cache of Hugging Face's `datasets`."""
  parts = name.split('/')
  if any(part.startswith('.') for part in parts):
    return True
  file_name = posixpath.basename(name)
  return fnmatch.fnmatch(file_name, 'cache-*.arrow')


def _is_compressed(file: SourceFile) -> bool:
  return file_names.suffix(file.path) in COMPRESSIONS
