"""Rows of plain text, JSON, CSV, parquet, arrow and npy, or streamed from Hugging Face."""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import io
import itertools
import logging
import reprlib
from typing import Any

import pyarrow as pa

from valkyrie import foreign, packages
from valkyrie.data import array_rows, columnar, file_names, line_rows
from valkyrie.data.file_names import ARRAY
from valkyrie.data.line_rows import REPAIR
from valkyrie.data.source_file import SourceFile
from valkyrie.data.source_files import FORMATS, SourceFiles, format_of
from valkyrie.data.vocabularies import as_utf8
from valkyrie.errors import ConfigurationError, DataError, converted, first_of, raise_outage

_SEPARATORS = {'.csv': ',', '.tsv': '\t'}
_OF_LINES = ('.jsonl', '.ndjson', '.json', *_SEPARATORS)
_OF_COLUMNS = ('.parquet', '.arrow')
_OF_ROWS = (*_OF_LINES, *_OF_COLUMNS, ARRAY)
_DOCUMENTS = (b'%PDF-', b'{\\rtf')  # of letters, but not text
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BLOCK = 2**20  # bytes
_warn_once = functools.cache(logging.warning)  # every shard lists the files of the source
STREAMED = 'hf://'  # begins the address of a data set: hf://OWNER/NAME/CONFIGURATION
_NAMED_BY = {  # the option that names a column -> what to do without the column
  'column': 'Name the one to read: --gin.text_column=\'"NAME"\' with gin/data/text.gin, '
  '--gin.messages_column=\'"NAME"\' with gin/data/conversations.gin, '
  '--gin.ids_column=\'"NAME"\' with gin/data/token_ids.gin, '
  "TaskFeed.options = {'column': 'NAME'} elsewhere, or --option=column=NAME of build_store",
  'prompt': 'Name the one to read: --gin.prompt_column=\'"NAME"\', or --option=prompt=NAME of '
  'build_store',
  'answer': 'Name the one to read: --gin.answer_column=\'"NAME"\', or --option=answer=NAME of '
  'build_store',
  'together': "Name the one to read: TaskFeed.options = {'together': 'NAME'} in gin, or "
  '--option=together=NAME of build_store. An empty NAME keeps no documents together',
  'conversation': 'Give the list of messages this name, or the name conversations',
}
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

  `columns` may be a mapping with the option that names each column, for messages.
  A plain text, and one of unknown suffix that its name or a pattern selects, is one row with the
  column `text`. JSON is an object a line, a list of objects, or an object. A row of an npy file is
  in the first column. `rows` divides files, row groups of parquet, batches of arrow, and rows of
  JSON, CSV and npy among the parts. `check` gets each row, the columns, and the row's place for
  errors, and returns what `rows` yields. `split` is as in `SourceFiles`. `also` names columns that
  are read where they are, and says of each whether a row that has it may lack the others.

  Raises:
    DataError: there are no files, or a file is corrupt or empty, is not text, or lacks a column.
    StorageError: a bucket refuses.
  """

  def __init__(
    self,
    location: str,
    columns: Sequence[str] | Mapping[str, str],
    formats: Sequence[str] = FORMATS,
    check: Check = texts,
    split: str | None = None,
    also: Mapping[str, bool] | None = None,
  ):
    self._columns = columns
    self._check = check
    self._also = also or {}
    self.files = SourceFiles(location, formats, split)
    for note in self.files.notes:
      _warn_once(f'The source {self.files}: {note}')
    names = sorted(map(self.files.name, self.files.left_out))
    if names:
      _warn_once(
        f'The source {self.files} is read without these files of the folder: '
        f'{file_names.some(names)}. To read them, name them by a pattern, or convert them to '
        f'{", ".join(formats)}.'
      )
    self._groups: list[tuple[SourceFile, int]] = []  # row groups of parquet; -1 is a whole file
    for file in self.files.files:
      self._groups += self._groups_of(file)
    if not self._groups:
      first, *_ = self.files.files
      raise DataError(f'{first} is empty: it has no rows, nor has any other file. {REPAIR}')

  def _groups_of(self, file: SourceFile) -> list[tuple[SourceFile, int]]:
    """The groups of a file; raises a DataError if it is empty, or lacks a column."""
    kind = self._kind(file)
    if not file.size and kind in _OF_ROWS:
      raise DataError(f'{file} is empty. {REPAIR}')
    if kind == '.parquet':
      return [(file, group) for group in self._row_groups(file)]
    if kind not in _OF_ROWS:
      if 'text' not in self._columns and kind not in self.files.formats:
        raise DataError(
          f'{file} has no name of a known format, and a plain text has no column '
          f'{next(iter(self._columns))}. Name files that end with {", ".join(self.files.formats)}.'
        )
      self._present(['text'], str(file))
    return [(file, -1)]

  def rows(self, part: int, parts: int) -> Iterator[Row]:
    """The rows of one of `parts` parts; each row is in exactly one part."""
    columns = list(self._columns)
    for number, (file, group) in enumerate(self._groups):
      kind = self._kind(file)
      if kind in _OF_LINES:  # may be one large file, so its rows are divided
        read = self._lines(file, part, parts)
      elif kind == '.arrow':
        read = _placed(file, self._batches(file, part, parts))
      elif kind == ARRAY:
        read = _placed(file, self._array(file, part, parts))
      elif number % parts != part:
        continue
      elif kind == '.parquet':
        read = _placed(file, self._group(file, group))
      else:
        read = self._text(file)
      with self._errors(file):
        for place, row in read:
          yield self._check(row, columns, place)

  def has_fewer_rows(self, count: int) -> bool:
    """Whether there are fewer rows than `count`; it reads no more than these."""
    if len(self._groups) >= count:  # each has a row
      return False
    first_rows = itertools.islice(self.rows(0, 1), count)
    return sum(1 for _ in first_rows) < count

  def describe(self) -> dict[str, Any]:
    """The number of the files, for store.json."""
    return {'files': len(self.files.files)}

  def _kind(self, file: SourceFile) -> str:
    """The format of a file; an array is one only where arrays are read."""
    kind = format_of(file.path)
    if kind == ARRAY and ARRAY not in self.files.formats:
      return ''
    return kind

  def _row_groups(self, file: SourceFile) -> list[int]:
    """The numbers of the row groups that have rows. Some of many files may be empty."""
    with self._errors(file):
      stream = self.files.open_at_random(file)
      opened = columnar.parquet_file(stream)
      groups = columnar.filled_groups(opened)
      schema = opened.metadata.schema.to_arrow_schema()
    if groups:
      self._present(schema.names, str(file))
    return groups

  def _group(self, file: SourceFile, group: int) -> Iterator[tuple[int, Row]]:
    stream = self.files.open_at_random(file)
    opened = columnar.parquet_file(stream)
    columns = self._present(opened.schema_arrow.names, str(file))
    yield from columnar.parquet_rows(opened, group, columns)

  def _array(self, file: SourceFile, part: int, parts: int) -> Iterator[tuple[int, Row]]:
    first_column, *_ = self._columns
    with self.files.open_at_random(file) as stream:
      for number, values in array_rows.npy_rows(stream, str(file), part, parts):
        yield number, {first_column: values}

  def _batches(self, file: SourceFile, part: int, parts: int) -> Iterator[tuple[int, Row]]:
    with self.files.open(file) as stream:
      begin = stream.read(8)
    indexed = columnar.is_indexed(begin)
    opened = self.files.open
    if indexed:
      opened = self.files.open_at_random
    with opened(file) as stream:
      names = columnar.arrow_names(stream, indexed=indexed)
    columns = self._present(names, str(file))
    with opened(file) as stream:
      yield from columnar.arrow_rows(stream, columns, part, parts, indexed=indexed)

  def _text(self, file: SourceFile) -> Iterator[tuple[str, Row]]:
    with self.files.open(file) as stream:
      content = foreign.whole(stream, lambda piece: _check_text(piece, str(file)))
    text = content.decode('utf-8-sig').replace('\r\n', '\n')
    named = format_of(file.path) in FORMATS
    without_mark = content.removeprefix(codecs.BOM_UTF8)
    if not named and line_rows.is_json(without_mark):
      raise DataError(
        f'{file} is JSON, but its name does not say so. Rename it to end with .json or '
        '.jsonl: then its columns are read.'
      )
    yield str(file), {'text': text}

  def _lines(self, file: SourceFile, part: int, parts: int) -> Iterator[tuple[str, Row]]:
    kind = format_of(file.path)
    with self.files.open(file) as stream:
      # A compressed stream of pyarrow offers no lines.
      lines = io.BufferedReader(stream, _BLOCK)
      begin = lines.peek(_BLOCK)
      _check_text(begin, str(file))
      if kind in _SEPARATORS:
        separator = _SEPARATORS[kind]
        read = line_rows.separated(lines, separator, str(file), self._present)
      else:
        read = line_rows.json_values(lines, str(file), may_be_one=kind == '.json')
      for number, (place, row) in enumerate(read):
        if number % parts != part:
          continue
        if isinstance(row, bytes):
          if not row.strip():
            continue
          row = line_rows.parsed(row, place)  # noqa: PLW2901
        if not isinstance(row, dict):
          raise DataError(
            f'{place} is not a JSON object: it has {reprlib.repr(row)}. Expected an object such as '
            '{"text": "..."}.'
          )
        columns = self._present(list(row), place)
        yield place, {column: row[column] for column in columns}

  def _present(self, names: Sequence[str], place: str) -> list[str]:
    """The columns to read at a place that has these; raises a DataError if it lacks any."""
    return _present(self._columns, self._also, names, place)

  @contextlib.contextmanager
  def _errors(self, file: SourceFile) -> Iterator[None]:
    """Converts errors to DataErrors that name the file, or its change while it was read."""
    try:
      yield
    except UnicodeDecodeError as error:
      self.files.check_unchanged(file)
      raise self._not_text(file, error) from error
    except FileNotFoundError as error:
      raise DataError(f'{file} is missing. {REPAIR}') from error
    except MemoryError as error:
      raise DataError(
        f'A document of {file} is larger than the memory that is left. Cut or remove it.'
      ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
      self.files.check_unchanged(file)  # or the bucket's own error
      raise_outage(f'{file} cannot be read', error)
      if isinstance(error, PermissionError):
        raise DataError(f'This user may not read {file}. Give it the right to.') from error
      reason = foreign.reason(error)
      raise DataError(f'{file} is corrupt: it cannot be read ({reason}). {REPAIR}') from error
    self.files.check_unchanged(file)

  def _not_text(self, file: SourceFile, error: UnicodeDecodeError) -> DataError:
    """Why a file has bytes that are not UTF-8: it is damaged, or has another encoding."""
    byte = error.object[error.start]
    wrong = f'byte {error.start} is {byte:#04x}'
    damaged = format_of(file.path) in _OF_COLUMNS  # whose texts are always UTF-8
    try:
      with self.files.open(file) as stream:  # the checksum of a compressed file is at its end
        while stream.read(_BLOCK):
          pass
    except (pa.ArrowException, OSError):
      damaged = True
    if damaged:
      return DataError(f'{file} is corrupt: a text in it is not UTF-8 ({wrong}). {REPAIR}')
    return DataError(
      f'{file} is not UTF-8: {wrong}. Convert it, for instance with iconv, or leave it out of the '
      'source. If it was UTF-8 once, it is damaged: fetch it again.'
    )


class StreamedRecords:
  """The rows of the split 'train' of a data set that Hugging Face streams; see `Records`."""

  def __init__(
    self,
    location: str,
    columns: Sequence[str] | Mapping[str, str],
    check: Check = texts,
    also: Mapping[str, bool] | None = None,
  ):
    self._location = location
    self._columns = columns
    self._check = check
    self._also = also or {}
    failed = (OSError, ValueError), DataError, f'Streaming {location} failed'
    advice = (
      'If the network failed, run again to continue. If it has several configurations, name one: '
      'hf://OWNER/NAME/CONFIGURATION.'
    )
    self._errors = functools.partial(converted, *failed, advice)

  def rows(self, part: int, parts: int) -> Iterator[Row]:
    """The rows of one of `parts` parts. Every part streams all rows."""
    with self._errors():
      builder = _revision(self._location)
      _check_splits(self._location, builder)
      columns = list(self._columns)
      streamed = enumerate(builder.as_streaming_dataset(split='train'), 1)
      for number, row in itertools.islice(streamed, part, None, parts):
        _present(self._columns, self._also, list(row), self._location)
        yield self._check(row, columns, f'Row {number} of {self._location}')

  def describe(self) -> dict[str, Any]:
    """For store.json: the hash of the revision, since the files are not known."""
    with self._errors():
      return {'streamed': _revision(self._location).hash}


def _check_splits(location: str, builder: Any) -> None:
  """Logs which splits are not read; raises a DataError if there is none to train on."""
  splits = builder.info.splits or builder.config.data_files or ()
  names = [str(name) for name in splits]
  others = ', '.join(name for name in names if name != 'train')
  if names and 'train' not in names:
    raise DataError(
      f'{location} has no split train, only {others}. Download the files, and name those to train '
      'on by a folder or a pattern.'
    )
  if others:
    _warn_once(
      f'{location}: the split train is read, and validates by held_out. Not read: {others}.'
    )


@functools.cache
def _revision(location: str) -> Any:
  """The builder of a data set, at the revision of its first use in this process."""
  lacks = f'The source {location} needs the package datasets, which is not installed'
  advice = f'Use a directory of parquet shards, or install it: {packages.install("datasets")}'
  with converted((ImportError,), ConfigurationError, lacks, advice):
    import datasets  # noqa: PLC0415  (an optional package)  # pyright: ignore
  owner, _, rest = location.removeprefix(STREAMED).partition('/')
  name, _, configuration = rest.partition('/')
  address = f'{owner}/{name}'
  return datasets.load_dataset_builder(address, configuration or None)


def _present(
  columns: Sequence[str] | Mapping[str, str],
  also: Mapping[str, bool],
  names: Sequence[str],
  place: str,
) -> list[str]:
  """The columns to read at a place that has these names; raises a DataError if it lacks any."""
  missing = [column for column in columns if column not in names]
  has_replacement = any(also.get(name) for name in names)
  if missing and not has_replacement:
    option = 'column'
    if isinstance(columns, Mapping):
      option = columns[missing[0]]
    listed = ', '.join(missing)
    raise DataError(f'{place} has no column {listed}; it has {_named(names)}. {_NAMED_BY[option]}.')
  wanted = dict.fromkeys([*columns, *also])
  chosen = [name for name in wanted if name in names]
  repeated = [name for name in chosen if names.count(name) > 1]
  if repeated:
    raise DataError(f'{place} has columns of one name: {_named(names)}. Rename all but one.')
  return chosen


def _placed(file: SourceFile, rows: Iterator[tuple[int, Row]]) -> Iterator[tuple[str, Row]]:
  """Rows with their numbers in the file from 0 -> rows with their places for people, from 1."""
  for number, row in rows:
    yield f'Row {number + 1} of {file}', row


def _named(columns: Sequence[str], most: int = 12) -> str:
  """The names of columns for a message, at most so many."""
  shown_names = [f'{foreign.shown(name):.80}' for name in columns]
  return ', '.join(first_of(shown_names, most))


def _check_text(content: bytes, place: str) -> None:
  """Raises a DataError for a piece of a file that is not text, by its first bytes or null bytes.

  A UnicodeDecodeError is raised for UTF-16.
  """
  if content.startswith(_UTF_16):
    content.decode()
  if content.startswith(_DOCUMENTS) or b'\0' in content:
    raise DataError(
      f'{place} is not text: it begins with {content[:12]!r} and has {content.count(0)} null '
      'bytes. Extract its text to a file in UTF-8, or leave it out of the source.'
    )
