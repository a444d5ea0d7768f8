"""The files of a step on a file system, and their manifest."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
import hashlib
import os
import pathlib

from valkyrie.checkpoint import manifest

_READERS = 4  # threads: hashing releases Python's lock


class DiskFiles:
  """The files of a step, as `manifest.Files`."""

  def __init__(self, place: pathlib.Path, sync: bool = False):
    """The files in a folder; `sync` flushes each to disk after its digest."""
    self._place, self._sync = place, sync

  def read(self, name: str) -> bytes:
    return (self._place / name).read_bytes()

  def has(self, name: str) -> bool:
    # A symbolic link would leave the step.
    file = self._place / name
    return file.is_file() and file.resolve() == self._place.resolve() / name

  def names(self) -> list[str]:
    # A link to a folder counts: its files would be read, and are not in the manifest.
    found = (path for path in self._place.rglob('*') if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(self._place).as_posix() for path in found)

  def digests(self, names: Iterable[str], algorithm: str) -> Iterator[str]:
    def of_file(name):
      with open(self._place / name, 'rb') as file:
        digest = hashlib.file_digest(file, algorithm).hexdigest()
        if self._sync:
          os.fsync(file.fileno())
      return digest

    with ThreadPoolExecutor(_READERS) as readers:
      yield from readers.map(of_file, names)


def write_manifest(place: pathlib.Path, step: int) -> None:
  """Hashes the files of a step, writes their manifest, and flushes all of them to disk."""
  files = DiskFiles(place, sync=True)
  names = files.names()
  digests = dict(zip(names, files.digests(names, manifest.SHA256), strict=True))
  with open(place / manifest.name(manifest.SHA256), 'wb') as file:
    file.write(manifest.content(step, digests))
    file.flush()
    os.fsync(file.fileno())
  for directory in (place, *(path for path in place.rglob('*') if path.is_dir())):
    sync_directory(directory)


def sync(path: pathlib.Path) -> None:
  """Flushes what others have written to a file to disk."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
  """Flushes the list of a directory's files to disk."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
