"""The arrays of a token store, in files that others may have written, and may still change.

Nothing is mapped into memory: a mapped file that is truncated ends its process by SIGBUS. Slices
are read by `pread`, and a file whose size or time has changed is noticed by the next one.
"""

from collections.abc import Mapping
import functools
import hashlib
import os
import pathlib
from typing import Any, BinaryIO

import numpy as np

from valkyrie import foreign
from valkyrie.data.array_rows import npy_header
from valkyrie.errors import DataError, ValkyrieError, raise_outage

REBUILD = (
  'Build it again by the same build_store command with --rebuild, or delete the folder if it is a '
  'copy from a bucket.'
)
_OPEN_FILES = 64  # files that stay open: a store may have more shards than a process may open


class ArrayFile:
  """An array in a .npy file, which is read in slices along its first axis.

  Attributes:
    length: rows, the size of the first axis.
    changes: how often the file was found changed. Results of earlier checks no longer count then.
  """

  def __init__(self, path: pathlib.Path, dtype: np.dtype, shape: tuple[int | None, ...]):
    """Opens a file, which must have this dtype and shape; None is any length.

    Raises:
      DataError: it has another content, or is not there.
      StorageError: the disk refuses.
    """
    self.path = path
    self._dtype = dtype
    try:
      with foreign.opened(path) as stream:
        status = os.fstat(stream.fileno())
        self._size = status.st_size
        file_dtype, file_shape = self._header(stream)
        self._begin = stream.tell()
    except OSError as error:
      raise unreadable(path, error) from error
    if file_dtype != dtype or not _fits(file_shape, shape):
      sizes = ['any' if size is None else size for size in shape]
      raise DataError(
        f'{path} is corrupt: it has {file_dtype} {list(file_shape)}, but {dtype} {sizes} was '
        f'written. {REBUILD}'
      )
    length, *row = file_shape
    self._row = tuple(row)
    values_of_row = int(np.prod(self._row, dtype=np.int64))
    self._row_bytes = dtype.itemsize * values_of_row
    self.length = int(length)
    array_bytes = self.length * self._row_bytes
    if self._begin + array_bytes > self._size:
      raise self._truncated(self._size)
    self._version: tuple[int, int] | None = None  # inode and time
    self.changes = 0

  def read(self, begin: int, end: int) -> np.ndarray:
    """The rows [begin, end), which must exist.

    Raises:
      DataError: the file has become shorter, or is gone.
      StorageError: the disk refuses.
    """
    shape = (end - begin, *self._row)
    rows = np.empty(shape, self._dtype)
    left = rows.reshape(-1).view(np.uint8).data
    place = self._begin + begin * self._row_bytes
    try:
      opened = _opened(self)
      status = os.fstat(opened.descriptor)
      self._compare(status)
      while left:
        count = os.preadv(opened.descriptor, [left], place)
        if not count:
          raise self._truncated(place)
        left = left[count:]
        place += count
    except OSError as error:
      raise unreadable(self.path, error) from error
    return rows

  def _header(self, stream: BinaryIO) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and shape that the file says."""
    try:
      shape, in_columns, dtype = npy_header(stream)
      if in_columns and len(shape) > 1:
        raise ValueError('it is in Fortran order, expected C order')
    except ValueError as error:
      reason = foreign.reason(error)
      raise DataError(f'{self.path} is not a readable array ({reason}). {REBUILD}') from error
    return dtype, shape

  def _compare(self, found: os.stat_result) -> None:
    """Notices that the file has changed, or that another one has its name."""
    if found.st_size != self._size:
      raise self._truncated(found.st_size)
    version = (found.st_ino, found.st_mtime_ns)
    was_read = self._version is not None
    if was_read and version != self._version:
      self.changes += 1
    self._version = version

  def _truncated(self, size: int) -> DataError:
    return DataError(
      f'{self.path} is truncated or altered: it has {size:,} bytes, but {self._size:,} were there '
      f'when it was opened. {REBUILD}'
    )


def _fits(found: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
  """Whether a shape has the expected sizes; None fits any."""
  if len(found) != len(expected):
    return False
  pairs = zip(found, expected, strict=True)
  return all(size in (None, found_size) for found_size, size in pairs)


class _OpenFile:
  """A descriptor that is closed when nobody reads it any more."""

  def __init__(self, path: pathlib.Path):
    with foreign.opened(path) as stream:
      self.descriptor = os.dup(stream.fileno())

  def __del__(self):
    if hasattr(self, 'descriptor'):
      os.close(self.descriptor)


@functools.lru_cache(_OPEN_FILES)
def _opened(file: ArrayFile) -> _OpenFile:
  return _OpenFile(file.path)


def load(path: pathlib.Path, dtype: np.dtype | type, shape: tuple[int | None, ...]) -> np.ndarray:
  """A whole array; raises as `ArrayFile`."""
  file = ArrayFile(path, np.dtype(dtype), shape)
  return file.read(0, file.length)


def check_file(file: pathlib.Path, recorded: Mapping[str, Any], *, content: bool = True) -> None:
  """Checks that a file has its recorded size and, with `content`, SHA-256.

  Raises:
    DataError: it has another one, or is not there.
    StorageError: the disk refuses.
  """
  expected = recorded['bytes']
  digest = recorded['sha256']
  try:
    with foreign.opened(file) as stream:
      status = os.fstat(stream.fileno())
      size = status.st_size
      file_digest = digest
      if content and size == expected:
        file_digest = hashlib.file_digest(stream, 'sha256').hexdigest()
  except OSError as error:
    raise unreadable(file, error) from error
  if size != expected:
    damage = 'empty'
    if size:
      damage = 'truncated or altered'
    raise DataError(
      f'{file} is {damage}: it has {size} bytes, but {expected} were written. {REBUILD}'
    )
  if file_digest != digest:
    raise DataError(
      f'{file} is corrupt: its SHA-256 is {file_digest}, but {foreign.shown(digest):.80} was '
      f'written. {REBUILD}'
    )


def file_sha256(file: pathlib.Path) -> str:
  """The SHA-256 of a file."""
  with foreign.opened(file) as stream:
    return hashlib.file_digest(stream, 'sha256').hexdigest()


def unreadable(path: pathlib.Path, error: OSError) -> ValkyrieError:
  """The error for a file of a store that cannot be read; raises as `raise_outage`."""
  raise_outage(f'{path} cannot be read', error)
  reason = error.strerror or foreign.reason(error)
  if isinstance(error, FileNotFoundError):
    return DataError(f'The token store lacks {path} ({reason}). {REBUILD}')
  return DataError(f'{path} cannot be read ({reason}). {REBUILD}')
