"""Rows of parquet files in a directory or bucket, by row group."""

from collections.abc import Iterator, Sequence
import fnmatch
import hashlib
import posixpath
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet

from valkyrie.errors import DataError


class ParquetShards:
  """The *.parquet files at `location`, sorted by name, with checked footers.

  Args:
    location: a file, a directory (all *.parquet below it) or a pattern of file names; local, or a
      URI that pyarrow supports (gs://, s3://, hdfs://).
    columns: the columns to read; others are never read.

  Raises:
    DataError: there are no files, or the named file is corrupt, empty or lacks a column.
  """

  def __init__(self, location: str, columns: Sequence[str]):
    self._columns = list(columns)
    self._filesystem, self._files = _files(location)
    if not self._files:
      raise DataError(
        f'There are no parquet shards at {location}. Use a file, a directory or a pattern of '
        '*.parquet files as the source.'
      )
    self._groups: list[tuple[str, int]] = []
    self._rows = 0
    for file in self._files:
      footer = self._open(file).metadata
      if not footer.num_rows:
        raise DataError(f'The parquet shard {file} is empty: it has no rows. {_REPAIR}')
      names = footer.schema.to_arrow_schema().names
      if missing := sorted(set(columns) - set(names)):
        raise DataError(
          f'The parquet shard {file} has no column {", ".join(missing)}; it has '
          f'{", ".join(names)}. {_REPAIR}'
        )
      self._rows += footer.num_rows
      self._groups += [(file, group) for group in range(footer.num_row_groups)]

  def rows(self, shard: int, shards: int) -> Iterator[dict[str, Any]]:
    """The rows, as dictionaries, of the row groups `shard`, `shard + shards`, ..."""
    for file, group in self._groups[shard::shards]:
      try:
        table = self._open(file).read_row_group(group, columns=self._columns)
        for batch in table.to_batches(max_chunksize=1024):
          yield from batch.to_pylist()
      except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
          f'The parquet shard {file} is corrupt: its row group {group} cannot be read ({error}). '
          + _REPAIR
        ) from error

  def describe(self) -> dict[str, Any]:
    """The number and the hash of the files, and the number of rows, for store.json."""
    return {
      'files': len(self._files),
      'files_sha256': hashlib.sha256('\n'.join(self._files).encode()).hexdigest(),
      'rows': self._rows,
    }

  def _open(self, file: str) -> pyarrow.parquet.ParquetFile:
    try:
      return pyarrow.parquet.ParquetFile(
        file, filesystem=self._filesystem, page_checksum_verification=True
      )
    except FileNotFoundError as error:
      raise DataError(f'The parquet shard {file} is missing. {_REPAIR}') from error
    except (pa.ArrowException, OSError, ValueError) as error:
      raise DataError(
        f'The parquet shard {file} is corrupt: it cannot be opened ({error}). {_REPAIR}'
      ) from error


_REPAIR = 'Download the file again, or exclude it from the source.'


def _files(location: str) -> tuple[pyarrow.fs.FileSystem, list[str]]:
  try:
    if '://' in location:
      filesystem, path = pyarrow.fs.FileSystem.from_uri(location)
    else:
      filesystem, path = pyarrow.fs.LocalFileSystem(), posixpath.expanduser(location)
    pattern = '*.parquet'
    if any(letter in posixpath.basename(path) for letter in '*?['):
      path, pattern = posixpath.split(path)
    found = filesystem.get_file_info(path)
    if found.type == pyarrow.fs.FileType.File:
      return filesystem, [path]
    selector = pyarrow.fs.FileSelector(path or '.', recursive=pattern == '*.parquet')
    listed = filesystem.get_file_info(selector)
  except (pa.ArrowException, OSError, ValueError) as error:
    raise DataError(
      f'The source {location} cannot be listed ({error}). Check its path and its permissions.'
    ) from error
  return filesystem, sorted(
    info.path
    for info in listed
    if info.type == pyarrow.fs.FileType.File and fnmatch.fnmatch(info.base_name, pattern)
  )
