"""Rows of texts: in plain text, JSON, CSV, parquet and arrow, or streamed from Hugging Face."""

import codecs
from collections.abc import Callable, Iterator, Sequence
import contextlib
import csv
import functools
import io
import itertools
import logging
import re
import reprlib
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from valkyrie import foreign, packages
from valkyrie.data.source_files import FORMATS, SourceFile, SourceFiles, format_of
from valkyrie.data.vocabularies import as_utf8
from valkyrie.errors import ConfigurationError, DataError, converted

_REPAIR = 'Mend the file, fetch it again, or leave it out of the source.'
_SEPARATORS = {'.csv': ',', '.tsv': '\t'}
_OF_LINES = ('.jsonl', '.ndjson', '.json', *_SEPARATORS)
_OF_ROWS = (*_OF_LINES, '.parquet', '.arrow')
_DOCUMENTS = (b'%PDF-', b'{\\rtf')  # of letters, but not text
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_JSON = re.compile(r'\s*(\[\s*)?\{')
_INDEXED = b'ARROW1'  # begins arrow's file form; its stream form has no index
_MAX_NAMED = 5
_LONGEST_VALUE = 2**31  # bytes of a file that is one JSON value
_ROWS_AT_ONCE = 1024
_BLOCK = 2**20  # bytes
_warn_once = functools.cache(logging.warning)  # every shard lists the files of the source
STREAMED = 'hf://'  # begins the address of a data set: hf://OWNER/NAME/CONFIGURATION
Row = dict[str, Any]
Check = Callable[[Row, Sequence[str], str], Row]


def texts(row: Row, columns: Sequence[str], place: str) -> Row:
  """The row at a place; raises a DataError if a column is neither a text nor None."""
  for column in columns:
    if isinstance(row[column], str):
      as_utf8(row[column], f'{place}, in its column {column},')
    elif row[column] is not None:
      raise DataError(
        f'{place} has {row[column]!r:.40} in the column {column}, expected a text. '
        'Correct or remove such rows, or name another column.'
      )
  return row


class Records:
  """The rows of all files at a location; only the named columns are read.

  A plain text, and one of unknown suffix that its name or a pattern selects, is one row with the
  column `text`. JSON is an object a line, a list of objects, or an object. `rows` divides files,
  row groups of parquet, batches of arrow and rows of JSON and CSV among the parts. `check`
  gets each row, the columns, and the row's place for errors, and returns what `rows` yields.
  `split` is as in `SourceFiles`.

  Raises:
    DataError: there are no files, or the named file is corrupt, empty, no text, or lacks a column.
    StorageError: a bucket refuses.
  """

  def __init__(
    self,
    location: str,
    columns: Sequence[str],
    formats: Sequence[str] = FORMATS,
    check: Check = texts,
    split: str | None = None,
  ):
    self._columns, self._check = list(columns), check
    self.files = SourceFiles(location, formats, split)
    for note in self.files.notes:
      _warn_once(f'The source {self.files}: {note}')
    if names := sorted(map(self.files.name, self.files.left_out)):
      _warn_once(
        f'The source {self.files} is read without {len(names)} files of the folder: '
        f'{", ".join(names[:_MAX_NAMED])}. To read others, name them by a pattern, or convert them '
        f'to {", ".join(FORMATS)}.'
      )
    self._groups: list[tuple[SourceFile, int]] = []  # row groups of parquet; -1 is a whole file
    for file in self.files.files:
      kind = format_of(file.path)
      if not file.size and kind in _OF_ROWS:
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
      place = f'A row of {file.path}'
      if kind in _OF_LINES:  # may be one large file, so its rows are divided
        read = self._lines(file, part, parts)
      elif kind == '.arrow':
        read = ((place, row) for row in self._batches(file, part, parts))
      elif number % parts == part:
        rows = self._group(file, group) if kind == '.parquet' else self._text(file)
        read = ((place, row) for row in rows)
      else:
        continue
      with self._errors(file):
        for place, row in read:
          yield self._check(row, self._columns, place)

  def has_fewer_rows(self, count: int) -> bool:
    """Whether there are fewer rows than `count`; it reads no more than these."""
    if len(self._groups) >= count:  # each has a row
      return False
    return sum(1 for _ in itertools.islice(self.rows(0, 1), count)) < count

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
    with self.files.open(file) as stream:
      has_index = stream.read(len(_INDEXED)) == _INDEXED
    opened = self.files.open_at_random if has_index else self.files.open
    read = pyarrow.ipc.open_file if has_index else pyarrow.ipc.open_stream
    with opened(file) as stream, read(stream) as reader:
      _check_columns(self._columns, reader.schema.names, file.path)
      batches = map(reader.get_batch, range(reader.num_record_batches)) if has_index else reader
      for number, batch in enumerate(batches):
        if number % parts == part:
          yield from batch.select(self._columns).to_pylist()

  def _text(self, file: SourceFile) -> Iterator[Row]:
    with self.files.open(file) as stream:
      content = stream.read()
    if content.startswith(_DOCUMENTS) or (b'\0' in content and not content.startswith(_UTF_16)):
      raise DataError(
        f'{file.path} is not text: it begins with {content[:12]!r} and has {content.count(0)} null '
        'bytes. Extract its text to a file in UTF-8, or leave it out of the source.'
      )
    text = content.decode('utf-8-sig').replace('\r\n', '\n')
    named = format_of(file.path) in FORMATS
    if not named and _JSON.match(text) and (_value(content.partition(b'\n')[0]) or _value(content)):
      raise DataError(
        f'{file.path} is JSON, but its name does not say so. Rename it to end with .json or '
        '.jsonl: then its columns are read.'
      )
    yield {'text': text}

  def _lines(self, file: SourceFile, part: int, parts: int) -> Iterator[tuple[str, Row]]:
    kind = format_of(file.path)
    with self.files.open(file) as stream:
      # A compressed stream of pyarrow offers no lines.
      lines = io.BufferedReader(stream, _BLOCK)
      if kind in _SEPARATORS:
        read = _separated(lines, _SEPARATORS[kind], file.path)
      else:
        read = _json_values(lines, file.path, may_be_one=kind == '.json')
      for number, (place, row) in enumerate(read):
        if number % parts != part:
          continue
        if isinstance(row, bytes):
          if not row.strip():
            continue
          row = _parsed(row, place)  # noqa: PLW2901
        if not isinstance(row, dict):
          raise DataError(
            f'{place} is not a JSON object: it has {reprlib.repr(row)}. Expected an object such as '
            '{"text": "..."}.'
          )
        _check_columns(self._columns, list(row), place)
        yield place, {column: row[column] for column in self._columns}

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
    except MemoryError as error:
      raise DataError(
        f'A document of {file.path} is larger than the memory that is left. Cut or remove it.'
      ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
      self.files.check_unchanged(file)
      raise DataError(f'{file.path} is corrupt: it cannot be read ({error}). {_REPAIR}') from error
    self.files.check_unchanged(file)


class StreamedRecords:
  """The rows of the split 'train' of a data set that Hugging Face streams; see `Records`."""

  def __init__(self, location: str, columns: Sequence[str], check: Check = texts):
    self._location, self._columns, self._check = location, columns, check
    failed = (OSError, ValueError), DataError, f'Streaming {location} failed'
    self._errors = functools.partial(converted, *failed, 'Run again to continue.')

  def rows(self, part: int, parts: int) -> Iterator[Row]:
    """The rows of one of `parts` parts. Every part streams all rows."""
    with self._errors():
      streamed = _revision(self._location).as_streaming_dataset(split='train')
      for row in itertools.islice(streamed, part, None, parts):
        _check_columns(self._columns, list(row), self._location)
        yield self._check(row, self._columns, f'A row of {self._location}')

  def describe(self) -> dict[str, Any]:
    """For store.json: the hash of the revision, since the files are not known."""
    with self._errors():
      return {'streamed': _revision(self._location).hash}


@functools.cache
def _revision(location: str) -> Any:
  """The builder of a data set, at the revision of its first use in this process."""
  lacks = f'The source {location} needs the package datasets, which is not installed'
  advice = f'Use a directory of parquet shards, or install it: {packages.install("datasets")}'
  with converted((ImportError,), ConfigurationError, lacks, advice):
    import datasets  # noqa: PLC0415  (an optional package)  # pyright: ignore
  owner, _, rest = location.removeprefix(STREAMED).partition('/')
  name, _, configuration = rest.partition('/')
  return datasets.load_dataset_builder(f'{owner}/{name}', configuration or None)


def _check_columns(columns: Sequence[str], names: Sequence[str], place: str) -> None:
  """Raises a DataError if a column is not among the names of a place."""
  if missing := [column for column in columns if column not in names]:
    raise DataError(
      f'{place} has no column {", ".join(missing)}; it has {", ".join(names)}. Name the one to '
      'read: text_column in gin (prompt_column and answer_column of prompts, messages_column of '
      'conversations), or --option=column=NAME of build_store.'
    )


def _separated(lines: Any, separator: str, path: str) -> Iterator[tuple[str, Row]]:
  """(place, row) of each row below the names of the columns."""
  csv.field_size_limit(foreign.LONGEST_LINE)
  text = io.TextIOWrapper(lines, 'utf-8-sig', newline='')
  rows = csv.reader(foreign.lines(text, foreign.LONGEST_LINE), delimiter=separator, strict=True)
  try:
    names = next(rows, [])
    for row in filter(None, rows):
      place = f'The row that ends on line {rows.line_num} of {path}'
      if len(row) != len(names):
        raise DataError(
          f'{place} has {len(row)} fields, but the first line names {len(names)} columns. {_REPAIR}'
        )
      yield place, dict(zip(names, row, strict=True))
  except csv.Error as error:
    raise DataError(f'Line {rows.line_num} of {path} is wrong ({error}). {_REPAIR}') from error


def _json_values(lines: Any, path: str, *, may_be_one: bool) -> Iterator[tuple[str, Any]]:
  """(place, bytes) of each line, or (place, value) of each member of a file that is one value."""
  each = foreign.lines(lines, _LONGEST_VALUE if may_be_one else foreign.LONGEST_LINE)
  begin = [next(each, b'')]
  while may_be_one and begin[-1].isspace():
    begin.append(next(each, b''))
  if may_be_one and not isinstance(_value(begin[-1]), dict):
    value = _parsed(b''.join([*begin, *each]), path)
    for number, member in enumerate(value if isinstance(value, list) else [value]):
      yield f'Member {number + 1} of {path}', member
    return
  for number, line in enumerate(itertools.chain(begin, each)):
    yield f'Line {number + 1} of {path}', line


def _value(content: bytes) -> Any:
  """The value of a JSON text, or None."""
  with contextlib.suppress(ValueError):
    return foreign.json_value(content)


def _parsed(content: bytes, place: str) -> Any:
  try:
    return foreign.json_value(content)
  except ValueError as error:
    raise DataError(
      f'{place} is not JSON ({error}): it begins with {content.rstrip()[:40]!r}. {_REPAIR}'
    ) from error
