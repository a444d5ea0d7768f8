"""The files of a text source: found by a path, a folder or a pattern, here or in a bucket."""

from collections.abc import Iterator, Sequence
import contextlib
import fnmatch
import os
import posixpath
import re
from typing import Any, NamedTuple
import urllib.parse

import pyarrow as pa
import pyarrow.fs

from valkyrie.config import paths, redact
from valkyrie.errors import DataError, StorageError
from valkyrie.storage import bucket

# Suffixes of the formats that `records` reads, and of a compression around them.
# A folder with files of other formats is read without its TABLES, which may describe those.
TABLES = ('.json', '.csv', '.tsv')
FORMATS = ('.txt', '.md', '.jsonl', '.ndjson', '.parquet', '.arrow', *TABLES)
COMPRESSIONS = {'.gz': 'gzip', '.zst': 'zstd'}
_WILDCARDS = re.compile(r'[*?[]')
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


class SourceFiles:
  """The files at a location, sorted by path, or local files named one by one.

  A folder stands for all files of known formats below it, except hidden ones and the caches that
  Hugging Face's `datasets` writes; `left_out` has its other files. In a pattern `*` stops at a
  slash, and `**` does not; a name that exists is no pattern. `root` is the folder of the listing,
  to which paths in messages and hashes are relative.

  Raises:
    DataError: there are no files, or they cannot be listed.
    StorageError: a bucket cannot be listed.
  """

  def __init__(self, location: str | Sequence[str], formats: Sequence[str] = FORMATS):
    """Lists `location`: a local path, or a URI that pyarrow supports (gs://, s3://, hdfs://)."""
    self.location, self.formats = location, tuple(formats)
    self._place = location if isinstance(location, str) else location[0]
    self.left_out: list[SourceFile] = []
    with access(self._place, f'The source {self} cannot be listed'):
      self._filesystem, path = filesystem_of(self._place)
      self.root, self.files = self._listed(path) if self._place == location else self._named()
    if not self.files:
      raise DataError(
        f'The source {self} has no files of a known format. Found nothing that ends with '
        f'{", ".join(self.formats)}, also compressed as {" or ".join(COMPRESSIONS)}. Name a '
        'file, a folder or a pattern of such files.'
      )

  def __str__(self) -> str:
    """The location, without secrets."""
    more = '' if self._place == self.location else f' and {len(self.location) - 1} more'
    return redact.in_value(self._place) + more

  def name(self, file: SourceFile) -> str:
    """The path of a file relative to the root."""
    return posixpath.relpath(file.path, self.root)

  def open(self, file: SourceFile) -> Any:
    """A pyarrow stream of the content, decompressed."""
    compression = COMPRESSIONS.get(_suffix(file.path))
    return self._filesystem.open_input_stream(file.path, compression=compression)

  def open_at_random(self, file: SourceFile) -> Any:
    """A pyarrow file with random access; a compressed one is read into memory."""
    if _suffix(file.path) in COMPRESSIONS:
      return pa.BufferReader(self.open(file).read())
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
    with access(self._place, f'{file.path} cannot be read'):
      found = self._file(self._filesystem.get_file_info(file.path))
    if (found.size, found.modified // 10**9) != (file.size, file.modified // 10**9):
      now = 'it is gone' if found.size is None else f'it has {found.size} bytes'
      raise DataError(
        f'{file.path} has changed since it was listed with {file.size} bytes: {now}. Run again '
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
    if not pattern and (found := self._filesystem.get_file_info(root)).is_file:
      return posixpath.dirname(path), [self._file(found)]
    selector = pyarrow.fs.FileSelector(root or '.', recursive=True)
    infos = [info for info in self._filesystem.get_file_info(selector) if info.is_file]
    if pattern:
      wanted = regex(path.removesuffix(pattern), pattern)
      chosen = [info for info in infos if wanted.fullmatch(posixpath.normpath(info.path))]
    else:
      index = posixpath.join(root, 'dataset_dict.json')
      if any(info.path == index for info in infos):  # of Hugging Face's folder of several splits
        parts = [posixpath.relpath(info.path, root).partition('/') for info in infos]
        splits = sorted({folder for folder, slash, _ in parts if slash})
        raise ValueError(f'it holds several splits; name one: {", ".join(splits)}')
      chosen = self._wanted({info.path.removeprefix(root).strip('/'): info for info in infos})
    return root or '.', sorted(map(self._file, chosen))

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
    # A README may describe tables, but is no reason to leave them out.
    of_text = {name for name, kind in known.items() if kind not in TABLES}
    tables = known.keys() - of_text
    if tables and any(not posixpath.basename(n).lower().startswith('readme') for n in of_text):
      wanted = of_text
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
    return pyarrow.fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location))
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
    kind, advice, reason = StorageError, 'Check the address and the network, and run again.', error
    wrong = isinstance(error, ValueError | FileNotFoundError) or 'NO_SUCH_' in str(error)
    if wrong or not paths.is_address(location):
      kind, advice = DataError, 'Check its path and its permissions.'
      if isinstance(error, FileNotFoundError) and not paths.is_address(location):
        reason = 'there is no such file or folder'
    elif isinstance(error, PermissionError) or _DENIED.search(str(error)):
      advice = _ADVICE.get(location.partition('://')[0].replace('gcs', 'gs'), advice)
    raise kind(f'{failure} ({reason}). {advice}') from error


def format_of(path: str) -> str:
  """The suffix of a file's format in lower case, without the suffix of a compression."""
  suffix = _suffix(path)
  return _suffix(posixpath.splitext(path)[0]) if suffix in COMPRESSIONS else suffix


def _suffix(path: str) -> str:
  return posixpath.splitext(path)[1].lower()


def regex(root: str, pattern: str) -> re.Pattern:
  """The paths below a root that a pattern matches: `**` any, `*` and `?` all but a slash."""
  parts = re.split(r'(\*\*/|\*\*|\*|\?|\[!?\]?[^]]*\])', posixpath.normpath(pattern))
  known = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
  for number, part in enumerate(parts):
    of_class = part.replace('\\', r'\\').replace('[!', '[^')
    parts[number] = known.get(part, of_class) if number % 2 else re.escape(part)
  try:
    return re.compile(re.escape(root) + ''.join(parts))
  except re.error as error:  # such as [z-a]
    raise ValueError(f'its pattern {pattern!r} is wrong: {error}') from error
