"""The manifest of a checkpoint: the SHA-256 of each of its files, and of the manifest itself.

    # step 400
    91b0...  record.json
    5a6b...  state/_METADATA
    # sha256 77cd...            of all lines above

`sha256sum -c manifest.sha256` reads it too.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
import hashlib
import os
import pathlib

NAME = 'manifest.sha256'
_READERS = 4  # threads: hashing releases Python's lock


def write(place: pathlib.Path, step: int) -> None:
  """Hashes the files below `place`, writes their manifest, and flushes all of them to disk."""
  names = sorted(
    path.relative_to(place).as_posix() for path in place.rglob('*') if not path.is_dir()
  )
  hashes = _hashes((place / name for name in names), sync=True)
  lines = [f'{digest}  {name}\n' for digest, name in zip(hashes, names, strict=True)]
  text = ''.join([f'# step {step}\n', *lines]).encode()
  with open(place / NAME, 'wb') as file:
    file.write(text + _seal(text))
    file.flush()
    os.fsync(file.fileno())
  for directory in (place, *(path for path in place.rglob('*') if path.is_dir())):
    sync_directory(directory)


def damage(place: pathlib.Path, step: int) -> str | None:
  """Reads every file of a step once; returns the first damage, or None if the step is valid.

  Raises:
    OSError: a file exists but cannot be read, so that its content is unknown.
  """
  try:
    text = (place / NAME).read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    return f'{NAME} is missing'
  lines = text.splitlines(keepends=True)
  if not lines or _seal(b''.join(lines[:-1])) != lines[-1]:
    return f'{NAME} is damaged'
  if lines[0] != f'# step {step}\n'.encode():
    return f'{NAME} belongs to another step'
  expected = [line.decode().rstrip('\n').split('  ', 1) for line in lines[1:-1]]
  root = place.resolve()
  for _, name in expected:
    # A symbolic link, or a name with `..`, would leave the directory.
    if not (place / name).is_file() or (place / name).resolve() != root / name:
      return f'{name} is missing'
  found = _hashes((place / name for _, name in expected), sync=False)
  for (digest, name), actual in zip(expected, found, strict=True):
    if actual != digest:
      return f'{name} has changed since it was saved'
  return _unnamed(place, {name for _, name in expected})


def _unnamed(place: pathlib.Path, names: set[str]) -> str | None:
  """The first file of the state that the manifest does not name: Orbax might read it."""
  for path in sorted((place / 'state').rglob('*')):
    if (name := path.relative_to(place).as_posix()) not in names and not path.is_dir():
      return f'{name} is not in {NAME}'
  return None


def sync_directory(path: pathlib.Path) -> None:
  """Flushes the list of a directory's files to disk."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _seal(text: bytes) -> bytes:
  return f'# sha256 {hashlib.sha256(text).hexdigest()}\n'.encode()


def _hashes(paths: Iterable[pathlib.Path], sync: bool) -> Iterator[str]:
  def of_file(path):
    with open(path, 'rb') as file:
      digest = hashlib.file_digest(file, 'sha256').hexdigest()
      if sync:
        os.fsync(file.fileno())
    return digest

  with ThreadPoolExecutor(_READERS) as readers:
    yield from readers.map(of_file, paths)
