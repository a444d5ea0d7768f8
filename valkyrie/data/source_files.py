"""The files of a text source: found by a path, a folder or a pattern, here or in a bucket."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import fnmatch
import os
import posixpath
import re
from typing import Any, NamedTuple
import urllib.parse

import pyarrow as pa
import pyarrow.fs

from valkyrie import foreign
from valkyrie.config import paths, redact
from valkyrie.data import file_names, splits
from valkyrie.data.file_names import COMPRESSIONS, FORMATS, ROWS, TABLES, format_of
from valkyrie.errors import DataError, StorageError, with_home
from valkyrie.storage import bucket

_WILDCARDS = re.compile(r'[*?[]')
# In the cache of Hugging Face's hub.
_REVISION = re.compile(r'(?P<cache>.*/(datasets|models)--[^/]+/snapshots)/(?P<revision>[^/]+)/.*')
_NO_SPLIT = '(none)'
_ALL_SPLITS = (
  "To read all splits as one text, set text_splits = 'all' (--option=splits=all of build_store)."
)
_PUBLIC = 'anonymous@'  # before the name of a bucket
_CLOUD_STORAGE = ('gs', 'gcs')
_DENIED = re.compile('ACCESS_DENIED|INVALID_ACCESS|SIGNATURE')
_ADVICE = {
  'gs': 'Give this machine a service account that may read the bucket, or run: gcloud auth '
  'application-default login. A public bucket has the address gs://anonymous@BUCKET.',
  's3': 'Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for an account that may '
  'read the bucket.',
}


class SourceFile(NamedTuple):
  """A file: its path in its file system, its bytes, and its times in nanoseconds.

  modified: of its content, which programs such as `cp -p` may set; changed: of its inode on this
    machine, which only the system sets, or 0 in a bucket.
  """

  path: str
  size: int
  modified: int
  changed: int

  def __str__(self) -> str:
    """The path as messages show it."""
    return foreign.shown(self.path)


class SourceFiles:
  """The files at a location, sorted by path, or local files named one by one.

  A folder stands for all files of known formats below it, except hidden ones and the caches that
  Hugging Face's `datasets` writes; `left_out` has its other files. In a pattern `*` stops at a
  slash, and `**` does not; a name that exists is no pattern. `root` is the folder of the listing,
  to which paths in messages and hashes are relative.

  A file is read once, by whatever links and in whatever compressions it is there. `notes` has what
  was left out and a user should know; `splits` has the files of each split that names tell, see
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
      split: which files are in `files`. None: all. 'train': those that are not of another split by
        their names. 'validation': those of the validation split, or all where no name tells one.
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
      self.root, self.files = self._listed(path) if self._place == location else self._named()
    if not self.files and self.splits:
      others = [f'{split} ({self._some(files)})' for split, files in self.splits.items()]
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
    more = '' if self._place == self.location else f' and {len(self.location) - 1} more'
    return foreign.shown(redact.in_value(self._place)) + more

  def name(self, file: SourceFile) -> str:
    """The path of a file relative to the root."""
    return posixpath.relpath(file.path, self.root)

  def open(self, file: SourceFile) -> Any:
    """A pyarrow stream of the content, decompressed."""
    compression = COMPRESSIONS.get(file_names.suffix(file.path))
    return self._filesystem.open_input_stream(file.path, compression=compression)

  def open_at_random(self, file: SourceFile) -> Any:
    """A pyarrow file with random access; a compressed one is read into memory."""
    if file_names.suffix(file.path) in COMPRESSIONS:
      with self.open(file) as stream:
        return pa.BufferReader(foreign.whole(stream))
    return self._filesystem.open_input_file(file.path)

  def shared_with(self, other: 'SourceFiles') -> list[str]:
    """The paths of the files that `other` has, too, also by another name of this machine."""
    if self._filesystem.type_name != other._filesystem.type_name:
      return []
    named = os.path.realpath if isinstance(self._filesystem, pyarrow.fs.LocalFileSystem) else str
    theirs = {named(file.path) for file in other.files}
    return [file.path for file in self.files if named(file.path) in theirs]

  def check_unchanged(self, file: SourceFile) -> None:
    """Raises a DataError if a file has changed, or a StorageError if the bucket does not answer.

    Times are compared in seconds, since S3 tells no more of a single file.
    """
    with access(self._place, f'{file} cannot be read'):
      found = self._file(self._filesystem.get_file_info(file.path))
    if (found.size, found.modified // 10**9) != (file.size, file.modified // 10**9):
      now = 'it is gone' if found.size is None else f'it has {found.size} bytes'
      raise DataError(
        f'{file} has changed since it was listed with {file.size} bytes: {now}. Run again '
        'when nobody writes to it.'
      )

  def _named(self) -> tuple[str, list[SourceFile]]:
    """The named files that are there."""
    root = posixpath.commonpath([posixpath.dirname(path) for path in self.location])
    infos = self._filesystem.get_file_info(list(self.location))
    return root, sorted(self._file(info) for info in infos if info.is_file)

  def _listed(self, path: str) -> tuple[str, list[SourceFile]]:
    root = self._literal(path)
    pattern = path[len(root) :].lstrip('/')
    if isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
      foreign.check_tree(root)
    if not pattern and (found := self._filesystem.get_file_info(root)).is_file:
      return posixpath.dirname(path), [self._file(found)]
    selector = pyarrow.fs.FileSelector(root or '.', recursive=True)
    infos = [info for info in self._filesystem.get_file_info(selector) if info.is_file]
    if pattern:
      wanted = file_names.regex(path.removesuffix(pattern), pattern)
      chosen = [info for info in infos if wanted.fullmatch(posixpath.normpath(info.path))]
    else:
      index = posixpath.join(root, 'dataset_dict.json')
      if any(info.path == index for info in infos):  # of Hugging Face's folder of several splits
        parts = [posixpath.relpath(info.path, root).partition('/') for info in infos]
        splits = sorted({folder for folder, slash, _ in parts if slash})
        raise ValueError(f'it holds several splits; name one: {", ".join(splits)}')
      chosen = self._wanted({info.path.removeprefix(root).strip('/'): info for info in infos})
    self.root = root or '.'
    files = sorted(map(self._file, chosen))
    self._check_revisions(files)
    return self.root, self._of_split(self._once(files), pattern)

  def _once(self, files: list[SourceFile]) -> list[SourceFile]:
    """Each file by one of its names, and each name in one compression."""
    others = self._further_links(files)
    by_name: dict[str, SourceFile] = {}
    by_stem: dict[str, SourceFile] = {}
    for file in sorted(files, key=lambda file: file_names.suffix(file.path) in COMPRESSIONS):
      if file in others:
        continue
      first = by_name.setdefault(file_names.without_compression(file.path), file)
      if first is not file:
        others[file] = first
        continue
      first = by_stem.setdefault(file_names.without_formats(file.path), file)
      if first is not file and {format_of(file.path), format_of(first.path)} <= {*ROWS}:
        self.notes.append(
          f'{self.name(file)} and {self.name(first)} differ only in their format, and both are '
          'read. If they have the same texts, name one of them by a pattern.'
        )
    if others:
      pairs = [f'{self.name(file)} is {self.name(first)}' for file, first in others.items()]
      self.notes.append(
        f'{len(others)} files are links to others, or compressed copies, and are not read again: '
        f'{file_names.some(pairs)}.'
      )
    return [file for file in files if file not in others]

  def _further_links(self, files: list[SourceFile]) -> dict[SourceFile, SourceFile]:
    """Each name of a local file after its first one, and the first one."""
    if not isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
      return {}
    similar: dict[tuple[int, int, int], list[SourceFile]] = {}
    for file in files:
      similar.setdefault((file.size, file.modified, file.changed), []).append(file)
    first: dict[tuple[int, int], SourceFile] = {}
    others: dict[SourceFile, SourceFile] = {}
    for group in similar.values():
      if len(group) == 1:
        continue
      for file in sorted(group, key=lambda file: format_of(file.path) not in self.formats):
        status = os.stat(file.path)
        kept = first.setdefault((status.st_dev, status.st_ino), file)
        if kept is not file:
          others[file] = kept
    return others

  def _check_revisions(self, files: list[SourceFile]) -> None:
    """Raises a DataError for several revisions of a data set in the cache of Hugging Face's hub."""
    revisions: dict[str, set[str]] = {}
    for file in files:
      if match := _REVISION.fullmatch(file.path):
        revisions.setdefault(match['cache'], set()).add(match['revision'])
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
      self.splits.setdefault(split, []).append(names[name])
    if self.split == splits.VALIDATION:
      return self.splits.get(splits.VALIDATION) or files
    others = [
      f'{len(found)} of the split {split} ({self._some(found)})'
      for split, found in self.splits.items()
      if split != splits.TRAIN
    ]
    if others:
      self.notes.append(
        'By their names or by README.md, these files are not trained on: '
        f'{"; ".join(others)}. Those of the split validation are the validation split, unless '
        f'held_out has a value. {_ALL_SPLITS}'
      )
    if doubtful and not pattern:
      self.notes.append(
        f'{len(doubtful)} files are named like a split for validation or tests, but have no '
        f'counterpart for training beside them, so they are trained on: '
        f'{file_names.some(doubtful)}. To leave them out, name the others by a pattern.'
      )
    return [file for name, file in names.items() if known.get(name, splits.TRAIN) == splits.TRAIN]

  def _splits_of(
    self, names: Mapping[str, SourceFile], *, is_folder: bool
  ) -> tuple[dict[str, str], list[str]]:
    """The splits that a dataset card or the names tell, and names that are doubtful."""
    rows = {name for name in names if format_of(name) in ROWS}
    stems = {name: file_names.without_formats(name) for name in names}
    by_name = splits.named(stems, rows)
    card = self._card() if is_folder else []
    if len(card) > 1:
      raise DataError(
        f'The source {self} has {len(card)} configurations by its README.md, which may have the '
        f'same texts: {file_names.some([one.name for one in card])}. Name the files of one by a '
        'folder or a pattern.'
      )
    by_card = splits.of_configuration(card[0], names) if card else {}
    if not by_card:
      return by_name
    known = {name: by_card.get(name, _NO_SPLIT) for name in names}
    for name, split in by_card.items():
      if not split:
        known[name] = by_name.splits.get(name, splits.TRAIN)
    return known, []

  def _card(self) -> list[splits.Configuration]:
    """The configurations of the README.md in the folder, as Hugging Face's hub has them."""
    path = posixpath.join(self.root, 'README.md')
    if not self._filesystem.get_file_info(path).is_file:
      return []
    with self._filesystem.open_input_stream(path, compression=None) as stream:
      return splits.configurations(stream.read(splits.LARGEST_CARD).decode(errors='replace'))

  def _some(self, files: Sequence[SourceFile]) -> str:
    return file_names.some([self.name(file) for file in files])

  def _literal(self, path: str) -> str:
    """The beginning of a path before its pattern; a name that exists is no pattern."""
    missing = pyarrow.fs.FileType.NotFound
    while _WILDCARDS.search(path) and self._filesystem.get_file_info(path).type == missing:
      path = posixpath.dirname(path)
    return path

  def _wanted(self, found: dict[str, Any]) -> list[Any]:
    """The files of a folder that are read, selected by their names."""
    visible = {
      name: info
      for name, info in found.items()
      if not any(part.startswith('.') for part in name.split('/'))
      and not fnmatch.fnmatch(posixpath.basename(name), 'cache-*.arrow')
    }
    known = {name: format_of(name) for name in visible if format_of(name) in self.formats}
    # A README may describe tables and files of rows, but is no reason to leave them out.
    of_text = {name for name, kind in known.items() if kind not in TABLES}
    tables = known.keys() - of_text
    if any(not file_names.is_readme(name) for name in of_text):
      wanted = of_text
      if any(format_of(name) in ROWS for name in of_text):
        wanted = {name for name in of_text if not file_names.is_readme(name)}
    else:
      wanted = tables or of_text
    self.left_out = [self._file(info) for name, info in visible.items() if name not in wanted]
    return [visible[name] for name in wanted]

  def _file(self, info: Any) -> SourceFile:
    is_here = isinstance(self._filesystem, pyarrow.fs.LocalFileSystem)
    changed = os.stat(info.path).st_ctime_ns if is_here and info.is_file else 0
    return SourceFile(info.path, info.size, info.mtime_ns or 0, changed)


class _CloudStorage(pyarrow.fs.FSSpecHandler):
  """gcsfs for pyarrow. The base class would take denied access for a missing file."""

  def get_file_info_selector(self, selector: Any) -> list[Any]:
    found = self.fs.find(selector.base_dir, detail=True)
    return [self._create_file_info(path, info) for path, info in found.items()]

  def open_input_file(self, path: str) -> Any:
    return pa.PythonFile(self.fs.open(path), mode='r')

  open_input_stream = open_input_file


def filesystem_of(location: str) -> tuple[Any, str]:
  """The file system of a location, and its path there.

  The path of a URI may have spaces, brackets and letters of any language; `%20` is a space, too.

  Raises:
    ArrowInvalid, OSError: of pyarrow.
    ConfigurationError, StorageError: as `bucket.client`.
  """
  if not paths.is_address(location):
    return pyarrow.fs.LocalFileSystem(), os.path.abspath(with_home(location))
  scheme, _, rest = location.partition('://')
  path, _, query = rest.partition('?')
  if scheme in _CLOUD_STORAGE:
    seconds = dict(urllib.parse.parse_qsl(query)).get('retry_limit_seconds')
    patience = {'timeout': float(seconds)} if seconds else {}
    client = bucket.client(f'gs://{path}', anonymous=path.startswith(_PUBLIC), **patience)
    files = pyarrow.fs.PyFileSystem(_CloudStorage(client))
    return files, urllib.parse.unquote(path.removeprefix(_PUBLIC)).rstrip('/')
  quoted = urllib.parse.quote(path, safe="/%:@*~!$&'()+,;=")
  return pyarrow.fs.FileSystem.from_uri(f'{scheme}://{quoted}{"?" if query else ""}{query}')


@contextlib.contextmanager
def access(location: str, failure: str) -> Iterator[None]:
  """Converts errors of pyarrow inside: 'FAILURE (reason). ADVICE'.

  A missing file or bucket, and any error of this machine, is a DataError; denied access and a
  service that does not answer are a StorageError.
  """
  try:
    yield
  except (pa.ArrowException, OSError, ValueError) as error:
    kind, advice = StorageError, 'Check the address and the network, and run again.'
    reason = foreign.reason(error)
    wrong = isinstance(error, ValueError | FileNotFoundError) or 'NO_SUCH_' in str(error)
    if wrong or not paths.is_address(location):
      kind, advice = DataError, 'Check its path and its permissions.'
      if isinstance(error, FileNotFoundError) and not paths.is_address(location):
        reason = 'there is no such file or folder'
    elif isinstance(error, PermissionError) or _DENIED.search(str(error)):
      advice = _ADVICE.get(location.partition('://')[0].replace('gcs', 'gs'), advice)
    raise kind(f'{failure} ({reason}). {advice}') from error
