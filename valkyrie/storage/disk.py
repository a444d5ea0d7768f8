"""Files of this machine: absolute paths, a write test, flushes."""

import os
import pathlib
import tempfile

from valkyrie.errors import storage_errors


def local_path(path: str | os.PathLike) -> pathlib.Path:
  """The absolute path of --model_dir."""
  return pathlib.Path(os.path.abspath(os.path.expanduser(path)))


def writable_directory(path: str | os.PathLike) -> pathlib.Path:
  """Creates a directory, writes a temporary file in it, and returns its absolute path.

  Raises:
    StorageError: the directory cannot be created or written.
  """
  directory = local_path(path)
  with storage_errors(
    f'--model_dir={os.fspath(path)} is not a directory that can be written ({directory})',
    'Nothing was changed. Name another --model_dir, or make room there.',
  ):
    try:
      directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
      raise OSError('there is a file of that name, or above it') from error
    with tempfile.TemporaryFile(dir=directory) as trial:
      trial.write(bytes(4096))
      trial.flush()
      os.fsync(trial.fileno())
    sync_directory(directory)  # which some file systems refuse
  return directory


def sync(path: pathlib.Path) -> None:
  """Flushes a file to disk, whoever has written it."""
  with open(path, 'rb') as file:
    os.fsync(file.fileno())


def write_synced(path: pathlib.Path, content: bytes) -> None:
  """Writes a file and flushes it to disk."""
  with open(path, 'wb') as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: pathlib.Path) -> None:
  """Flushes the list of a directory's files to disk."""
  descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
