"""The arrays of one shard of a token store, written document after document."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import hashlib
import itertools
import os
import pathlib
import time
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from valkyrie.data import token_store
from valkyrie.data.selection import Selection
from valkyrie.errors import DataError

COUNTS = ('documents', 'tokens', 'text_bytes', 'skipped_empty', 'skipped_one_token')
# If most documents are empty, the source is broken. A shard is judged after so many documents.
MAX_SKIPPED = 0.5
_JUDGED_AFTER = 1000
_REPORT_SECONDS = 1.0  # between two reports
_LONG = 2**16  # tokens; each longer piece of a document is followed by a report
Report = Callable[[int, int], None]


class Document(NamedTuple):
  """A tokenized document.

  tokens: int [tokens], without BOS and EOS; or, for a long document, such pieces in order.
  text_bytes: bytes of its text in UTF-8.
  sequence_key: equal for documents that belong together; None for a document on its own.
  prompt_tokens: number of leading tokens that are the prompt; the others are the answer.
  later_prompts: where each further prompt of a conversation begins and ends: [begin, end, ...].
  bos: whether the document begins with the BOS of its vocabulary.
  """

  tokens: np.ndarray | Iterable[np.ndarray]
  text_bytes: int
  sequence_key: str | None = None
  prompt_tokens: int = 0
  later_prompts: Sequence[int] = ()
  bos: bool = True


class ShardArrays:
  """The arrays of a shard, while its documents are added.

  Attributes:
    counts: the numbers of COUNTS so far.
  """

  def __init__(
    self,
    selection: Selection,
    shard: int,
    stream: BinaryIO,
    report: Report,
  ):
    """Begins the array of tokens in `stream`; for `report`, see `StoreWriter.write_shard`."""
    self._selection = selection
    self._vocabulary = selection.vocabulary
    self._dtype = token_store.token_dtype(self._vocabulary.size)
    self._shard = shard
    self._stream = stream
    self._report = report
    self._reported_documents = 0
    self._reported_tokens = 0
    self._next_report = time.monotonic()
    self._offsets = [0]
    self._hashes = bytearray()
    self._keys = bytearray()
    self._prompts: list[int] = []
    self._later_prompts: list[int] = []
    self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
    _write_header(stream, self._dtype, 0)

  def add(self, number: int, document: Document) -> None:
    """Adds a document, or counts it as skipped; DataError names its number."""
    if time.monotonic() >= self._next_report:
      self.report()
      self._next_report = time.monotonic() + _REPORT_SECONDS
    pieces = document.tokens
    if isinstance(pieces, np.ndarray):
      if len(pieces) < 2:
        self._skip(number, len(pieces))
        return
      pieces = [pieces]
    bos = ()
    if document.bos:
      bos = self._vocabulary.bos
    begin = np.array(bos, np.int32)
    end = np.array([self._vocabulary.eos_id])
    first_token = self._offsets[-1]
    digest = hashlib.blake2b(digest_size=16)
    length = 0
    for piece in itertools.chain([begin], pieces, [end]):
      self._check(number, piece)
      content = piece.astype(self._dtype).tobytes()
      self._stream.write(content)
      digest.update(content)
      length += len(piece)
      if len(piece) > _LONG:
        self._report(0, 0)
    self._offsets.append(first_token + length)
    self._hashes += digest.digest()
    key = document.sequence_key or f'\0{self._shard}/{number}'
    key_bytes = key.encode('utf-8', errors='replace')
    self._keys += hashlib.blake2b(key_bytes, digest_size=8).digest()
    prompt = document.prompt_tokens
    if prompt:
      prompt += len(begin)
    self._prompts.append(prompt)
    first_text_token = first_token + len(begin)
    for place in document.later_prompts:
      self._later_prompts.append(first_text_token + place)
    self.counts['documents'] += 1
    self.counts['text_bytes'] += document.text_bytes
    self.counts['tokens'] = self._offsets[-1]

  def report(self) -> None:
    """Reports the documents and tokens since the last report."""
    documents = self.counts['documents']
    tokens = self.counts['tokens']
    new_documents = documents - self._reported_documents
    new_tokens = tokens - self._reported_tokens
    self._report(new_documents, new_tokens)
    self._reported_documents = documents
    self._reported_tokens = tokens

  def finish_tokens(self) -> None:
    """Writes the final length into the header of the array of tokens."""
    self.report()
    self._stream.seek(0)
    _write_header(self._stream, self._dtype, self.counts['tokens'])

  def save(self, directory: pathlib.Path) -> None:
    """Writes the other arrays."""
    offsets = np.array(self._offsets, np.int64)
    _save(directory / token_store.OFFSETS_FILE, offsets)
    hashes = np.frombuffer(self._hashes, np.uint8)
    _save(directory / token_store.HASHES_FILE, hashes.reshape(-1, 16))
    keys = np.frombuffer(self._keys, '<u8')
    _save(directory / token_store.KEYS_FILE, keys)
    if any(self._prompts):
      prompts = np.array(self._prompts, np.int64)
      _save(directory / token_store.PROMPTS_FILE, prompts)
    if self._later_prompts:
      later_prompts = np.array(self._later_prompts, np.int64)
      _save(directory / token_store.LATER_PROMPTS_FILE, later_prompts)

  def _skip(self, number: int, tokens: int) -> None:
    if tokens:
      self.counts['skipped_one_token'] += 1
    else:
      self.counts['skipped_empty'] += 1
    if number >= _JUDGED_AFTER:
      check_skipped(f'shard {self._shard}', self.counts)

  def _check(self, number: int, piece: np.ndarray) -> None:
    """Raises a DataError for tokens outside the vocabulary."""
    size = self._vocabulary.size
    largest = piece.max(initial=0)
    smallest = piece.min(initial=0)
    if largest >= size or smallest < 0:
      raise DataError(
        f'Document {number} of shard {self._shard} of {self._selection.task} has token ids from '
        f'{piece.min()} to {piece.max()}, but the vocabulary {self._vocabulary.fingerprint} has '
        f'{size} ids, from 0. Remove the preprocessor of the task that changes '
        'ids after tokenizing, or use a larger vocabulary.'
      )


def write(
  directory: pathlib.Path,
  selection: Selection,
  shard: int,
  documents: Iterable[Document],
  report: Report,
) -> dict[str, int]:
  """Writes the arrays of a shard and returns its counts."""
  with flushed(directory / token_store.TOKENS_FILE) as stream:
    arrays = ShardArrays(selection, shard, stream, report)
    for number, document in enumerate(documents):
      arrays.add(number, document)
    arrays.finish_tokens()
  arrays.save(directory)
  return arrays.counts


def check_skipped(place: str, counts: Mapping[str, Any]) -> None:
  """Raises a DataError if most documents were skipped."""
  skipped = counts['skipped_empty'] + counts['skipped_one_token']
  total = counts['documents'] + skipped
  if skipped > MAX_SKIPPED * total:
    raise DataError(
      f'{skipped} of {total} documents in {place} are empty or have one token only, but '
      f'at most {MAX_SKIPPED:.0%} may be skipped. Check the text column and the files of the '
      'source.'
    )


def _write_header(stream: BinaryIO, dtype: np.dtype, length: int) -> None:
  """Writes a .npy header; numpy pads it, so that the final length overwrites the first one."""
  header = {'descr': dtype.str, 'fortran_order': False, 'shape': (length,)}
  np.lib.format.write_array_header_1_0(stream, header)


def _save(file: pathlib.Path, array: np.ndarray) -> None:
  with flushed(file) as stream:
    np.save(stream, array)


@contextlib.contextmanager
def flushed(file: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a new file, and flushes it to disk before it is closed."""
  with file.open('wb') as stream:
    yield stream
    stream.flush()
    os.fsync(stream.fileno())
