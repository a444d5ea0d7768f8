"""The form of a step: the names of its folders, its files, and the manifest with their digests.

    checkpoints/400/              a saved step, valid if its files match its manifest
    checkpoints/500.unfinished-0b9c.../   a save of the trainer with that token, or its remainder
    checkpoints/100.deleted-0b9c.../      a step that it deletes, or its remainder
    set_aside/300/                a damaged step: moved, never deleted

A manifest ends with its own digest:

    # step 400
    91b0...  record.json
    5a6b...  state/_METADATA
    # sha256 77cd...            of all lines above

`sha256sum -c manifest.sha256` and `md5sum -c manifest.md5` read it, too. A step that was saved in a
bucket has MD5 digests, which the bucket computes; both are read everywhere, since people copy runs.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
import contextlib
import hashlib
import os
import pathlib
import re
import time
from typing import Any, Protocol

from valkyrie import foreign
from valkyrie.storage import foreign_names

FOLDER = 'checkpoints'
SET_ASIDE = 'set_aside'
_LITTER = re.compile(r'(\d{1,18})(?:\.\d+)?\.(?:unfinished|deleted)-[0-9a-f]{32}')
SHA256 = 'sha256'
MD5 = 'md5'
_READERS = 4  # threads: hashing releases Python's lock
_TICK = 2 * 10**9  # nanoseconds: no file system's clock is coarser
_MOST_DIGESTS = 2**16
_digests: dict[tuple[Any, ...], str] = {}  # of the files that this process has read once


class Files(Protocol):
  """The files of a step, whose names are relative to it."""

  def read(self, name: str) -> bytes:
    """The content of a file; raises FileNotFoundError or NotADirectoryError without it."""
    ...

  def has(self, name: str) -> bool:
    """Whether there is a file of that name, inside the step."""
    ...

  def names(self) -> list[str]:
    """The names of all files."""
    ...

  def digests(self, names: Iterable[str], algorithm: str) -> Iterator[str]:
    """The digests of files, in hexadecimal; raises OSError if a file cannot be read."""
    ...


class DiskFiles:
  """The files of a step in a folder, as `Files`."""

  def __init__(self, place: pathlib.Path, sync: bool = False, once: bool = False):
    """With `sync`, `digests` flushes each file to disk.

    With `once`, a file that this process has read so is read again only if it has changed since.
    """
    self._place = place
    self._sync = sync
    self._once = once

  def read(self, name: str) -> bytes:
    with _named(self._place / name):
      return foreign.content(self._place / name)

  def has(self, name: str) -> bool:
    # A symbolic link would leave the step.
    file = self._place / name
    real_place = self._place.resolve()
    return file.is_file() and file.resolve() == real_place / name

  def names(self) -> list[str]:
    # A link to a folder is listed: its files would be read, and are not in the manifest.
    names = []
    for path in self._place.rglob('*'):
      if path.is_symlink() or not path.is_dir():
        relative = path.relative_to(self._place)
        names.append(relative.as_posix())
    return sorted(names)

  def digests(self, names: Iterable[str], algorithm: str) -> Iterator[str]:
    def of_file(name):
      path = self._place / name
      with _named(path), open(path, 'rb') as file:
        key = algorithm, *_identity(os.fstat(file.fileno()))
        if self._once and key in _digests:
          return _digests[key]
        digest = hashlib.file_digest(file, algorithm).hexdigest()
        if self._once:
          _remember(key, digest)
        if self._sync:
          os.fsync(file.fileno())
      return digest

    with ThreadPoolExecutor(_READERS) as readers:
      yield from readers.map(of_file, names)

  def size(self) -> int:
    """Bytes."""
    sizes = [file.stat().st_size for file in self._place.rglob('*')]
    return sum(sizes)


def _identity(status: os.stat_result) -> tuple[int, ...]:
  """Numbers of a file that differ after it was changed or replaced."""
  times = status.st_mtime_ns, status.st_ctime_ns
  return status.st_dev, status.st_ino, status.st_size, *times


def _remember(key: tuple[Any, ...], digest: str) -> None:
  """Keeps the digest of a file, unless it has changed just now: it may in the same tick again."""
  *_, changed = key
  if time.time_ns() - changed < _TICK:
    return
  if len(_digests) >= _MOST_DIGESTS:
    _digests.clear()
  _digests[key] = digest


def is_step(name: str) -> bool:
  """Whether a folder of that name is a step."""
  return name.isdecimal() and name == str(int(name))


def litter_of(name: str) -> int | None:
  """The step whose save or deletion may have left a folder of that name; None for another name.

  A token of 32 random digits ends the name. Folders of versions before 0.3 have none on a disk.
  """
  match = _LITTER.fullmatch(name)
  if match is None:
    return None
  return int(match[1])


def name(algorithm: str) -> str:
  """The name of the manifest with the digests of an algorithm."""
  return f'manifest.{algorithm}'


def content(step: int, digests: Mapping[str, str]) -> bytes:
  """The manifest of a step, from the digest of each file."""
  lines = [f'# step {step}\n']
  for file in sorted(digests):
    lines.append(f'{digests[file]}  {file}\n')
  text = ''.join(lines).encode()
  return text + _seal(text)


def read_manifest(files: Files) -> tuple[str, bytes]:
  """The algorithm and the content of the manifest of a step; FileNotFoundError without one."""
  for algorithm in (SHA256, MD5):
    try:
      return algorithm, files.read(name(algorithm))
    except (FileNotFoundError, NotADirectoryError):
      continue
  raise FileNotFoundError(f'{name(SHA256)} is missing')


def damage(files: Files, step: int) -> str | None:
  """Compares every file of a step; returns the first damage, or None if the step is valid.

  Raises an OSError if a file exists but cannot be read, so that its content is unknown.
  """
  try:
    algorithm, text = read_manifest(files)
    expected = _parsed(algorithm, text, step)
  except (FileNotFoundError, ValueError) as error:
    return str(error)
  return _difference(files, algorithm, expected)


def recorded(files: Files, step: int) -> list[str]:
  """The names of the files of a step, its manifest last; none without a whole manifest of it.

  Raises an OSError if the manifest cannot be read.
  """
  try:
    algorithm, text = read_manifest(files)
    names = list(_parsed(algorithm, text, step))
    names.append(name(algorithm))
    return names
  except (FileNotFoundError, ValueError):
    return []


def _parsed(algorithm: str, text: bytes, step: int) -> dict[str, str]:
  """{file: digest} of the manifest of a step; a ValueError names its damage."""
  manifest_name = name(algorithm)
  lines = text.splitlines(keepends=True)
  if not lines:
    raise ValueError(f'{manifest_name} is damaged')
  *sealed_lines, seal = lines
  sealed = b''.join(sealed_lines)
  if _seal(sealed) != seal:
    raise ValueError(f'{manifest_name} is damaged')
  title = f'# step {step}\n'.encode()
  if lines[0] != title:
    raise ValueError(f'{manifest_name} belongs to another step')
  lines_of_files = sealed_lines[1:]
  digests = {}
  for line in lines_of_files:
    content = line.rstrip(b'\n')
    digest, _, file = content.partition(b'  ')
    with contextlib.suppress(UnicodeDecodeError):
      digests[file.decode()] = digest.decode()
  if len(digests) < len(lines_of_files) or '' in digests:
    raise ValueError(f'{manifest_name} has other lines than digests and names')
  return digests


def _difference(files: Files, algorithm: str, expected: Mapping[str, str]) -> str | None:
  """The first difference between files and their expected digests."""
  for file in expected:
    if not foreign_names.is_below(file):
      return f'{name(algorithm)} names {file!r:.200}, which is not a path below the step'
    if not files.has(file):
      return f'{file} is missing'
  digests = files.digests(expected, algorithm)
  for file, digest in zip(expected, digests, strict=True):
    if digest != expected[file]:
      return f'{file} has changed since it was saved'
  for file in files.names():  # Orbax, or a resumed run, might read it
    top, _, _ = file.partition('/')
    if top in ('state', 'record.json') and file not in expected:
      return f'{file} is not in {name(algorithm)}'
  return None


def _seal(text: bytes) -> bytes:
  digest = hashlib.sha256(text).hexdigest()
  return f'# sha256 {digest}\n'.encode()


@contextlib.contextmanager
def _named(file: pathlib.Path) -> Iterator[None]:
  """Adds the name of a file to an OSError inside that has none, for instance from a read."""
  try:
    yield
  except OSError as error:
    if error.filename is None and error.errno is not None:
      raise type(error)(error.errno, error.strerror, str(file)) from error
    raise
