"""Rows of parquet and arrow files. Every batch is validated before a value is read.

Arrow trusts the offsets in a file: an offset behind the end of a buffer would read other memory of
this process, or end it. A value that Python cannot hold, such as a date after the year 9999, is an
error of the file, too.
"""

from collections.abc import Iterator, Sequence
import itertools
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

_INDEXED = b'ARROW1'  # begins arrow's file form; its stream form has no index
_ROWS_AT_ONCE = 1024
_VALUES_AT_ONCE = 2**20  # in the lists of these rows
_MOST_VALUES = 2**26  # in the lists of one row: a small file can have many empty values
Row = dict[str, Any]


def parquet_file(stream: Any) -> pyarrow.parquet.ParquetFile:
  """A file of parquet; raises errors of pyarrow, here and for its rows."""
  return pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)


def filled_groups(file: pyarrow.parquet.ParquetFile) -> list[int]:
  """The numbers of the row groups that have rows."""
  footer = file.metadata
  groups = range(footer.num_row_groups)
  filled = []
  for group in groups:
    if footer.row_group(group).num_rows:
      filled.append(group)
  return filled


def parquet_rows(
  file: pyarrow.parquet.ParquetFile,
  group: int,
  columns: Sequence[str],
) -> Iterator[tuple[int, Row]]:
  """The rows of a row group, with their numbers in the file from 0.

  Raises errors of pyarrow, or a ValueError.
  """
  footer = file.metadata
  groups_before = range(group)
  first = sum(footer.row_group(before).num_rows for before in groups_before)
  table = file.read_row_group(group, columns=[*columns])
  table.validate(full=True)
  batches = table.to_batches(max_chunksize=_ROWS_AT_ONCE)
  rows = itertools.chain.from_iterable(map(_values, batches))
  yield from enumerate(rows, first)


def is_indexed(begin: bytes) -> bool:
  """Whether a file that begins so has arrow's file form, which is read at random."""
  return begin.startswith(_INDEXED)


def arrow_names(stream: Any, *, indexed: bool) -> list[str]:
  """The names of the columns of an arrow file."""
  with _open(stream, indexed) as reader:
    return reader.schema.names


def arrow_rows(
  stream: Any,
  columns: Sequence[str],
  part: int,
  parts: int,
  *,
  indexed: bool,
) -> Iterator[tuple[int, Row]]:
  """The rows of every `parts`-th batch, with their numbers in the file from 0.

  Raises errors of pyarrow, or a ValueError.
  """
  with _open(stream, indexed) as reader:
    batches = reader
    if indexed:
      numbers = range(reader.num_record_batches)
      batches = map(reader.get_batch, numbers)
    next_row = 0
    for number, batch in enumerate(batches):
      first = next_row
      next_row += batch.num_rows
      if number % parts != part:
        continue
      chosen = batch.select([*columns])
      chosen.validate(full=True)
      for begin in range(0, chosen.num_rows, _ROWS_AT_ONCE):
        some_rows = chosen.slice(begin, _ROWS_AT_ONCE)
        yield from enumerate(_values(some_rows), first + begin)


def _open(stream: Any, indexed: bool) -> Any:
  if indexed:
    return pyarrow.ipc.open_file(stream)
  return pyarrow.ipc.open_stream(stream)


def _values(batch: pa.RecordBatch) -> Iterator[Row]:
  """The rows of a validated batch as Python's values; long rows are read a few at once."""
  for field, column in zip(batch.schema, batch.columns, strict=True):
    count = _count(column)
    if batch.num_rows == 1 and count > _MOST_VALUES:
      raise ValueError(f'a row of its column {field.name} holds too many values')
    if batch.num_rows > 1 and count > _VALUES_AT_ONCE:
      half = batch.num_rows // 2
      yield from _values(batch.slice(0, half))
      yield from _values(batch.slice(half))
      return
  try:
    rows = batch.to_pylist()
  except (pa.ArrowException, MemoryError):
    raise
  except Exception as error:  # any conversion may fail, for instance of a date
    described = [f'{field.name} of {field.type}' for field in batch.schema]
    kinds = ', '.join(described)
    raise ValueError(f'Python cannot hold a value of its columns {kinds}: {error}') from error
  yield from rows


def _count(column: pa.Array) -> int:
  """The values of a column, with those inside its lists and structs."""
  kind = column.type
  if isinstance(column, pa.ExtensionArray):
    return _count(column.storage)
  if pa.types.is_struct(kind):
    fields = [column.field(number) for number in range(kind.num_fields)]
    return sum(map(_count, fields))
  if pa.types.is_map(kind):
    return len(column) + _count(column.keys) + _count(column.items)
  may_have_lists = pa.types.is_nested(kind) and hasattr(column, 'flatten')
  if may_have_lists:
    inner = column.flatten()
    if isinstance(inner, pa.Array):
      return len(column) + _count(inner)
  return len(column)
