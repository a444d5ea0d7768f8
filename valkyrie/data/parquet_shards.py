"""Rows of parquet files in a directory or bucket, read one row group at a time."""

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
  """The *.parquet files at `location`, in the order of their names, every one checked.

  Raises:
    DataError: there are none, or one is corrupt, empty or lacks a column: by name.
  """

  def __init__(self, location: str, columns: Sequence[str]):
    """Lists the files and reads their footers.

    Args:
      location: a file, a directory (all *.parquet below it) or a pattern of file names; local, or
        a URI that pyarrow knows (gs://, s3://, hdfs://).
      columns: those wanted; others are never read.
    """
    self._columns = list(columns)
    self._filesystem, self._files = _files(location)
    if not self._files:
      raise DataError(
        f'There are no parquet shards at {location}: expected *.parquet files. Correct the source.'
      )
    self._groups: list[tuple[str, int]] = []
    self._rows = 0
    for file in self._files:
      footer = self._open(file).metadata
      if not footer.num_rows:
        raise DataError(f'The parquet shard {file} is empty: it has no rows. {_REPAIR}')
      missing = sorted(set(columns) - set(footer.schema.to_arrow_schema().names))
      if missing:
        raise DataError(
          f'The parquet shard {file} has no column {", ".join(missing)}; it has '
          f'{", ".join(footer.schema.to_arrow_schema().names)}. {_REPAIR}'
        )
      self._rows += footer.num_rows
      self._groups += [(file, group) for group in range(footer.num_row_groups)]

  def rows(self, shard: int, shards: int) -> Iterator[dict[str, Any]]:
    """The rows of every `shards`-th row group, from number `shard` on, as dictionaries."""
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
    """Which files, for the records."""
    names = '\n'.join(self._files)
    return {
      'files': len(self._files),
      'files_sha256': hashlib.sha256(names.encode()).hexdigest(),
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


_REPAIR = 'Fetch it again, or leave it out of the source.'


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
    raise DataError(f'The source {location} cannot be listed ({error}). Correct it.') from error
  return filesystem, sorted(
    info.path
    for info in listed
    if info.type == pyarrow.fs.FileType.File and fnmatch.fnmatch(info.base_name, pattern)
  )
