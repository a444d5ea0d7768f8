"""Rows of token ids that another program has written: each row is a document, as it is.

An .npy file has an integer array [rows, tokens]; .parquet, .arrow and JSON have a column of lists,
and so has a data set of Hugging Face to stream. All rows of a split have as many ids, such as the
seq_len or seq_len + 1 of another trainer. The ids must be in the vocabulary of the run. Nothing is
put before a row; the EOS that a store puts after it is not learned. The options are

  column      the column of the ids (default: input_ids); an .npy file has none
  held_out    the validation split, as in the task text, by the hash of a row's ids
  splits      as in the task text
"""

from collections.abc import Iterator, Sequence
import copy
import hashlib
import reprlib
from typing import Any, Self

import numpy as np

from valkyrie.config import redact
from valkyrie.data import store_writer
from valkyrie.data.document_source import register
from valkyrie.data.records import Records, Row, StreamedRecords
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.tasks.text import TextSource

_FEWEST = 2  # ids of a row: one to read and one to learn


class TokenSource(TextSource):
  """The rows of token ids in the files at `location`."""

  FORMATS = ('.npy', '.parquet', '.arrow', '.jsonl', '.ndjson', '.json')
  OPTIONS = ('column', 'held_out', 'splits')
  other_than_text = 'token ids'

  def __init__(
    self,
    location: str | None = None,
    column: str = 'input_ids',
    held_out: str | None = None,
    splits: str | None = None,
  ):
    super().__init__(location, column, held_out, splits=splits)
    self._vocabulary: Vocabulary | None = None

  def encoded_by(self, vocabulary: Vocabulary) -> Self:
    bound = copy.copy(self)
    bound._vocabulary = vocabulary
    return bound

  def describe(self, split: str) -> dict[str, Any]:
    described = super().describe(split)
    row_tokens = _row_tokens(self._records(split), str(self._location))
    return described | {'kind': 'token_ids', 'row_tokens': row_tokens}

  def documents(self, split: str, shard: int, shards: int) -> Iterator[store_writer.Document]:
    vocabulary = self._vocabulary
    if vocabulary is None:
      raise ConfigurationError('Token ids are read by TaskFeed, whose vocabulary they belong to.')
    records = self._records(split)
    row_tokens = _row_tokens(records, str(self._location))
    for row in records.rows(shard, shards):
      ids = row['ids']
      place = row['place']
      if len(ids) != row_tokens:
        raise DataError(
          f'{place} has {len(ids):,} token ids, and the first row of the source has {row_tokens:,}.'
          ' Write all rows with one length, or leave this row out.'
        )
      _check_range(ids, vocabulary, place)
      if self._is_in(split, _content(ids)):
        yield _document(ids, vocabulary)

  @staticmethod
  def _check(row: Row, columns: Sequence[str], place: str) -> Row:
    """The row at a place as {'ids': int [tokens], 'place': place}."""
    found = row[columns[0]]
    try:
      ids = np.asarray(found)
    except (ValueError, OverflowError):  # lists of several lengths, or numbers beyond 64 bits
      ids = np.asarray(None)
    has_truths = isinstance(found, list) and bool in map(
      type, found
    )  # numpy counts them as 0 and 1
    is_list = ids.ndim == 1 and ids.dtype.kind in 'iu' and not has_truths
    if not is_list and isinstance(found, np.ndarray):
      raise DataError(
        f'{place} has values of {found.dtype}, expected integers. Save the array again: '
        "numpy.save(FILE, IDS.astype('int32'))."
      )
    if not is_list:
      raise DataError(
        f'{place} has {reprlib.repr(found)} in the column {columns[0]}, expected a list of '
        "integers. Name the column of the ids (TaskFeed.options = {'column': 'NAME'}), or correct "
        'the row.'
      )
    if len(ids) < _FEWEST:
      raise DataError(
        f'{place} has {len(ids)} token ids, expected {_FEWEST} or more. Write longer rows.'
      )
    return {'ids': ids, 'place': place}


def _row_tokens(records: Records | StreamedRecords, location: str) -> int:
  """The number of ids of the first row."""
  first = next(records.rows(0, 1), None)
  if first is None:
    raise DataError(f'The source {redact.in_value(location)} has no rows. Name another one.')
  return len(first['ids'])


def _check_range(ids: np.ndarray, vocabulary: Vocabulary, place: str) -> None:
  """Raises a DataError for an id that the vocabulary does not have."""
  is_outside = (ids < 0) | (ids >= vocabulary.size)
  if is_outside.any():
    at = int(is_outside.argmax())
    raise DataError(
      f'{place} has the token id {ids[at]} at its place {at}, but the vocabulary '
      f'{vocabulary.file or vocabulary.fingerprint} has the ids 0 to {vocabulary.size - 1}. Use '
      'the tokenizer that wrote the ids (--gin.vocabulary=\'"FILE"\', or --vocabulary=FILE of '
      'build_store), or leave the row out.'
    )


def _content(ids: np.ndarray) -> str:
  """Text that is equal for rows of equal ids, for the choice of their split."""
  content = ids.astype('<i4').tobytes()
  return hashlib.blake2b(content, digest_size=16).hexdigest()


def _document(ids: np.ndarray, vocabulary: Vocabulary) -> store_writer.Document:
  """A row as a document whose first id is its prompt: then its EOS is not learned."""
  text = vocabulary.decode(ids.tolist())
  text_bytes = max(1, len(text.encode(errors='replace')))  # special ids have no text
  return store_writer.Document(ids, text_bytes, prompt_tokens=1, bos=False)


register('token_ids', TokenSource())
