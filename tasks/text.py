"""Text of your own: files, folders and patterns of plain text, JSON, CSV, parquet and arrow.

Every format may be compressed as .gz or .zst. A plain text is a document; elsewhere a row is one.
The folder that Hugging Face's `save_to_disk` writes is read as it is. The `source` is a path, a URI
that pyarrow supports (gs://, s3://, hdfs://), see `valkyrie.data.source_files`, or a data set of
Hugging Face to stream (hf://), see `valkyrie.data.records`. The options are

  column      the column of the text (default: text)
  held_out    the validation split: a share of the documents, such as 0.005, by the hash of their
              content, so that a document stays in its split when files are added; of a single
              text, or with `cut` of fewer than 3 / held_out texts, the end of each; or the location
              of other files, with which all documents of the source are for training. Default: the
              files of the validation split by their names, or 0.005 where there are none
  splits      'all': read files of every split as one text. Default: files that are of another
              split by their names are not trained on, see `valkyrie.data.splits`
  cut         the bytes above which a document of a split is cut into several, at line ends
              (default: never); they stay together with TaskFeed.reset_at = 'sequence'
  together    a column (default: none): documents with the same text there, or with addresses of
              the same host, are a sequence, and in the same split; empty: none
"""

from collections.abc import Iterator
import functools
import logging
import math
from typing import Any, Self
import urllib.parse

from valkyrie.config import redact
from valkyrie.data import few_documents
from valkyrie.data.document_source import DocumentSource, TextDocument, register, stable_hash
from valkyrie.data.records import STREAMED, Records, StreamedRecords, texts
from valkyrie.data.source_files import FORMATS, SourceFiles
from valkyrie.data.splits import TRAIN, VALIDATION
from valkyrie.errors import ConfigurationError, DataError

_HASHES = 2**64
_warn_once = functools.cache(logging.warning)
_FEW = 3  # documents that a share should hold out, or the ends of texts are held out instead


class TextSource(DocumentSource):
  """The documents of the files at `location`."""

  FORMATS = FORMATS
  _check = staticmethod(texts)  # of a row
  SHARE = '0.005'  # held out by default
  COLUMNS: tuple[str, ...] = ('column', 'together')  # the options that name columns
  OPTIONS: tuple[str, ...] = ('column', 'cut', 'held_out', 'splits', 'together')

  def __init__(
    self,
    location: str | None = None,
    column: str = 'text',
    held_out: str | None = None,
    cut: str | None = None,
    together: str | None = None,
    splits: str | None = None,
  ):
    super().__init__(splits=('train', 'validation'))
    if splits not in (None, 'all'):
      raise ConfigurationError(
        f"splits={splits} is unknown. Use 'all' to read files of every split as one text, or leave "
        'it out.'
      )
    self._location = location
    self._columns = [column, together] if together else [column]
    self._is_by_name = splits is None
    self._is_default = held_out is None
    self._share = _share_of(self.SHARE if held_out is None else held_out)
    self._elsewhere = held_out if self._share is None else None
    self._cut = _size_of(cut) if cut else None
    self._also: dict[str, bool] = {}  # columns, see `Records`

  def at(self, location: str | None, **options: str) -> Self:
    if unknown := [name for name in options if name not in self.OPTIONS]:
      raise ConfigurationError(
        f'This source has no option {", ".join(unknown)}. It has {", ".join(self.OPTIONS)}.'
      )
    return type(self)(location, **options)

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    for whole, *others in self._rows(split, shard, shards):
      group = _host(others[0]) if others else ''
      if self._ends is not None:
        text = _divided(whole, self._ends)[split == 'validation']
        if split == 'validation' and not text:
          continue
      elif self._is_in(split, group or whole):
        text = whole
      else:
        continue
      pieces = _pieces(text, self._cut) if self._cut else [text]
      key = group or ('' if len(pieces) == 1 else f'{stable_hash(text)}')
      for piece in pieces:
        yield TextDocument(piece, key, name='')

  @functools.cached_property
  def _ends(self) -> float | None:
    """The share of each text to hold out at its end; None if whole documents are held out."""
    if self._share is None or self._has_validation_files or len(self._columns) > 1:
      return None
    few = math.ceil(_FEW / self._share) if self._cut else 2
    records = self._records('train')
    return self._share if isinstance(records, Records) and records.has_fewer_rows(few) else None

  def describe(self, split: str) -> dict[str, Any]:
    self._check_held_out()
    return {'kind': 'text', 'columns': self._columns} | self._records(split).describe()

  def files(self, split: str) -> SourceFiles | None:
    location = self._location_of(split)
    if location.startswith(STREAMED):
      return None
    return SourceFiles(location, self.FORMATS, self._split_of_files(split))

  def _rows(self, split: str, shard: int, shards: int) -> Iterator[list[str]]:
    """The texts of the columns, of every row of a shard."""
    for row in self._records(split).rows(shard, shards):
      yield [row[column] or '' for column in self._columns]

  def _records(self, split: str) -> Records | StreamedRecords:
    location = self._location_of(split)
    columns = dict(zip(self._columns, self.COLUMNS, strict=False))
    if location.startswith(STREAMED):
      return StreamedRecords(location, columns, self._check, self._also)
    which = self._split_of_files(split)
    records = Records(location, columns, self.FORMATS, self._check, which, self._also)
    if which == TRAIN and VALIDATION in records.files.splits and not self._is_default:
      _warn_once(
        f'The source {records.files} has files of the split validation, but held_out has a value, '
        'which says what validates.'
      )
    return records

  @functools.cached_property
  def _has_validation_files(self) -> bool:
    """Whether the validation split is the files that are named so."""
    location = self._location_of('train')
    if not self._is_default or not self._is_by_name or location.startswith(STREAMED):
      return False
    return VALIDATION in SourceFiles(location, self.FORMATS, TRAIN).splits

  def _split_of_files(self, split: str) -> str | None:
    """The files at the location of a split that are read for it, as in `SourceFiles`."""
    if not self._is_by_name:
      return None
    if split == VALIDATION and (self._elsewhere is not None or self._has_validation_files):
      return VALIDATION
    return TRAIN

  def _check_held_out(self) -> None:
    """Raises a DataError if text of the validation split is in the training split."""
    if self._elsewhere is None:
      return
    both = [self._elsewhere] * (self._elsewhere == self._location)
    listed = self.files('validation')
    if listed and (training := self.files('train')):
      both += training.shared_with(listed)
    if both:
      raise DataError(
        f'held_out={redact.in_value(self._elsewhere)} has {redact.in_value(both[0])}, which is in '
        f'the training text {redact.in_value(str(self._location))}, too. Move held-out files '
        'out of there, or name the training files by a pattern without them.'
      )

  def _location_of(self, split: str) -> str:
    location = self._location
    if location is None:
      raise ConfigurationError(
        'This task needs the location of its files: --gin.text=\'"/data/my_text"\', '
        'TaskFeed.source, or --source of build_store.'
      )
    if split == 'validation' and self._elsewhere is not None:
      return self._elsewhere
    return location

  def _is_in(self, split: str, text: str) -> bool:
    if self._share is None or self._has_validation_files:
      return True
    return (stable_hash(text) < self._share * _HASHES) == (split == 'validation')


def _divided(text: str, share: float) -> tuple[str, str]:
  """A text without its end, and its end of at most about twice the share, from a line on."""
  size = int(len(text) * share)
  begin = len(text) - size
  begin = text.rfind('\n', max(0, begin - size), begin) + 1 or begin
  if text[begin:].isspace():
    begin = len(text)
  return text[:begin], text[begin:]


def _pieces(text: str, size: int) -> list[str]:
  """A text in pieces of at most `size` bytes, cut at line ends where a line fits in."""
  pieces: list[list[str]] = [[]]
  used = 0
  for line in text.splitlines(keepends=True):
    length = len(line.encode())
    if used + length > size:
      pieces.append([])
      used = 0
    if length > size:
      step = max(1, size // 4)  # characters, of at most 4 bytes
      pieces += [[line[at : at + step]] for at in range(0, len(line), step)]
      length = size
    else:
      pieces[-1].append(line)
    used += length
  return [''.join(lines) for lines in pieces if lines] or ['']


def _host(text: str) -> str:
  """The host of an address; another text as it is."""
  try:
    return urllib.parse.urlsplit(text).hostname or text
  except ValueError:  # crawls have invalid hosts, such as an unclosed bracket
    return text


def _size_of(cut: str) -> int:
  if not cut.isdecimal() or int(cut) < 1:
    raise ConfigurationError(f'cut={cut} must be a number of bytes, 1 or more.')
  return int(cut)


def _share_of(held_out: str) -> float | None:
  """The share of documents to hold out; None if it is a location."""
  try:
    share = float(held_out)
  except ValueError:
    return None
  if not 0 < share < 1:
    raise ConfigurationError(
      f'held_out={held_out} must be a share above 0 and below 1, such as 0.005, or the location of '
      f'other files. Every run validates: to train on all documents, {few_documents.ELSEWHERE}.'
    )
  return share


register('text', TextSource())
