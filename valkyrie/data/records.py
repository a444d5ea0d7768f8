"""Rows of texts: in plain text, JSON lines, parquet and arrow, or streamed from Hugging Face."""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import io
import itertools
import json
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from valkyrie.data.source_files import FORMATS, SourceFile, SourceFiles, format_of
from valkyrie.errors import ConfigurationError, DataError

_REPAIR = 'Mend the file, fetch it again, or leave it out of the source.'
_OF_ROWS = ('.jsonl', '.parquet', '.arrow')
_ROWS_AT_ONCE = 1024
_BLOCK = 2**20  # bytes
STREAMED = 'hf://'  # begins the address of a data set: hf://OWNER/NAME/CONFIGURATION
Row = dict[str, Any]


class Records:
  """The rows of all files at a location; only the named columns are read.

  A plain text, and a file of another format that its name or a pattern selects, is one row with the
  column `text`. `rows` divides files, row groups of parquet, batches of arrow and lines of JSON
  lines among the parts.

  Raises:
    DataError: there are no files, or the named file is corrupt, empty or lacks a column.
    StorageError: a bucket refuses.
  """

  def __init__(self, location: str, columns: Sequence[str], formats: Sequence[str] = FORMATS):
    self._columns = list(columns)
    self.files = SourceFiles(location, formats)
    self._groups: list[tuple[SourceFile, int]] = []  # row groups of parquet; -1 is a whole file
    for file in self.files.files:
      kind = format_of(file.path)
      if not file.size:
        raise DataError(f'{file.path} is empty. {_REPAIR}')
      if kind == '.parquet':
        self._groups += [(file, group) for group in range(self._row_groups(file))]
        continue
      if kind not in _OF_ROWS:
        _check_columns(self._columns, ['text'], file.path)
      self._groups.append((file, -1))

  def rows(self, part: int, parts: int) -> Iterator[Row]:
    """The rows of one of `parts` parts; each row is in exactly one part."""
    for number, (file, group) in enumerate(self._groups):
      kind = format_of(file.path)
      if kind == '.jsonl':  # may be one large file, so its lines are divided
        read = self._lines(file, part, parts)
      elif kind == '.arrow':
        read = self._batches(file, part, parts)
      elif number % parts == part:
        read = self._group(file, group) if kind == '.parquet' else self._text(file)
      else:
        continue
      with self._errors(file):
        for row in read:
          _check_texts(row, self._columns, file.path)
          yield row

  def describe(self) -> dict[str, Any]:
    """The number of the files, for store.json."""
    return {'files': len(self.files.files)}

  def _row_groups(self, file: SourceFile) -> int:
    with self._errors(file):
      footer = self._parquet(file).metadata
    if not footer.num_rows:
      raise DataError(f'{file.path} is empty: it has no rows. {_REPAIR}')
    _check_columns(self._columns, footer.schema.to_arrow_schema().names, file.path)
    return footer.num_row_groups

  def _parquet(self, file: SourceFile) -> pyarrow.parquet.ParquetFile:
    return pyarrow.parquet.ParquetFile(
      self.files.open_at_random(file), page_checksum_verification=True
    )

  def _group(self, file: SourceFile, group: int) -> Iterator[Row]:
    table = self._parquet(file).read_row_group(group, columns=self._columns)
    for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
      yield from batch.to_pylist()

  def _batches(self, file: SourceFile, part: int, parts: int) -> Iterator[Row]:
    with self.files.open(file) as stream, pyarrow.ipc.open_stream(stream) as reader:
      _check_columns(self._columns, reader.schema.names, file.path)
      for number, batch in enumerate(reader):
        if number % parts == part:
          yield from batch.select(self._columns).to_pylist()

  def _text(self, file: SourceFile) -> Iterator[Row]:
    with self.files.open(file) as stream:
      yield {'text': stream.read().decode()}

  def _lines(self, file: SourceFile, part: int, parts: int) -> Iterator[Row]:
    with self.files.open(file) as stream:
      # A compressed stream of pyarrow offers no lines.
      for number, line in enumerate(io.BufferedReader(stream, _BLOCK)):
        if number % parts != part or not line.strip():
          continue
        place, begins = f'Line {number + 1} of {file.path}', line.rstrip(b'\n')[:40]
        try:
          row = json.loads(line)
        except ValueError as error:
          raise DataError(
            f'{place} is not JSON ({error}): it begins with {begins!r}. {_REPAIR}'
          ) from error
        if not isinstance(row, dict):
          raise DataError(
            f'{place} is not a JSON object: it begins with {begins!r}. Each line must be an object '
            'such as {"text": "..."}.'
          )
        _check_columns(self._columns, list(row), place)
        yield {column: row[column] for column in self._columns}

  @contextlib.contextmanager
  def _errors(self, file: SourceFile) -> Iterator[None]:
    """Converts errors to DataErrors that name the file, or its change while it was read."""
    try:
      yield
    except UnicodeDecodeError as error:
      raise DataError(
        f'{file.path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. '
        'Convert it, for instance with iconv, or leave it out of the source.'
      ) from error
    except FileNotFoundError as error:
      raise DataError(f'{file.path} is missing. {_REPAIR}') from error
    except (pa.ArrowException, OSError, ValueError) as error:
      self.files.check_unchanged(file)
      raise DataError(f'{file.path} is corrupt: it cannot be read ({error}). {_REPAIR}') from error
    self.files.check_unchanged(file)


class StreamedRecords:
  """The rows of the split 'train' of a data set that Hugging Face streams; see `Records`."""

  def __init__(self, location: str, columns: Sequence[str]):
    self._location, self._columns = location, columns

  def rows(self, part: int, parts: int) -> Iterator[Row]:
    """The rows of one of `parts` parts. Every part streams all rows."""
    with self._errors():
      streamed = _revision(self._location).as_streaming_dataset(split='train')
      for row in itertools.islice(streamed, part, None, parts):
        _check_columns(self._columns, list(row), self._location)
        _check_texts(row, self._columns, self._location)
        yield row

  def describe(self) -> dict[str, Any]:
    """For store.json: the hash of the revision, since the files are not known."""
    with self._errors():
      return {'streamed': _revision(self._location).hash}

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except (OSError, ValueError) as error:
      raise DataError(
        f'Streaming {self._location} failed ({error}). Run again to continue.'
      ) from error


@functools.cache
def _revision(location: str) -> Any:
  """The builder of a data set, at the revision of its first use in this process."""
  try:
    import datasets  # noqa: PLC0415  (an optional package)  # pyright: ignore
  except ImportError as error:
    raise ConfigurationError(
      f'The source {location} needs the package datasets, which is not installed. '
      'Run pip install datasets, or use a directory of parquet shards.'
    ) from error
  owner, _, rest = location.removeprefix(STREAMED).partition('/')
  name, _, configuration = rest.partition('/')
  return datasets.load_dataset_builder(f'{owner}/{name}', configuration or None)


def _check_columns(columns: Sequence[str], names: Sequence[str], place: str) -> None:
  """Raises a DataError if a column is not among the names of a place."""
  if missing := [column for column in columns if column not in names]:
    raise DataError(
      f'{place} has no column {", ".join(missing)}; it has {", ".join(names)}. Name the one to '
      'read: text_column in gin (prompt_column and answer_column of prompts), or '
      '--option=column=NAME of build_store.'
    )


def _check_texts(row: Row, columns: Sequence[str], place: str) -> None:
  """Raises a DataError if a column of a row is neither a text nor None."""
  for column in columns:
    if row[column] is not None and not isinstance(row[column], str):
      raise DataError(
        f'A row of {place} has {row[column]!r:.40} in the column {column}, expected a text. '
        'Correct or remove such rows, or name another column.'
      )
