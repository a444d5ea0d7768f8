"""Token store: a directory of tokenized documents with random access.

  store.json                      written last: the content and origin of the store, and the
                                  SHA-256 of both
  shard-00000-of-00008/
    tokens.npy     uint16 | uint32 [tokens]      concatenated documents, each with its BOS, if
                                                 its vocabulary has one, and a final EOS
    offsets.npy    int64 [documents + 1]         the start of each document in tokens.npy
    hashes.npy     uint8 [documents, 16]         BLAKE2b of each document's tokens
    keys.npy       uint64 [documents]            equal for the documents of one sequence
    prompts.npy    int64 [documents]             length of the prompt before each answer; absent
                                                 in a shard without prompts
    later_prompts.npy  int64 [2 * prompts]       where each further prompt of a conversation begins
                                                 and ends in tokens.npy; absent without any
    shard.json                                   counts, and size and SHA-256 of these files
  duplicates.npy                  int64, the numbers of the duplicates that are left out; only in
                                  a store that is built with `unique`

In a store that has replaced another one, the names of shards and of duplicates.npy have an end.

Arrays are plain .npy files, which any numpy opens; a slice of a document is one `pread`.
`store_writer` writes a store, `verify` reads every byte of one again.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
import logging
import pathlib
from typing import Any

import numpy as np

from valkyrie import foreign
from valkyrie.data import store_arrays, store_fields
from valkyrie.data.store_arrays import REBUILD, ArrayFile
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError, converted
from valkyrie.storage import foreign_names

FORMATS = 'valkyrie-token-store-'  # of all versions
FORMAT = f'{FORMATS}3'
STORE_FILE = 'store.json'
SHARD_FILE = 'shard.json'
TOKENS_FILE = 'tokens.npy'
OFFSETS_FILE = 'offsets.npy'
HASHES_FILE = 'hashes.npy'
KEYS_FILE = 'keys.npy'
PROMPTS_FILE = 'prompts.npy'
LATER_PROMPTS_FILE = 'later_prompts.npy'
DUPLICATES_FILE = 'duplicates.npy'
_INTACT = 1
_DAMAGED = 2
_LEAST_BYTES = 0.25  # bytes of text that a token usually has
_MOST_BYTES = 20


class TokenStore:
  """The documents of one split, numbered in the order of the shards.

  Attributes:
    information: the content of store.json.
    fingerprint: SHA-256 of the vocabulary and every shard's content.
    lengths: int64 [documents], tokens of each document with its EOS.
    sequence_keys: uint64 [documents], equal for documents that belong together.
    prompts: int64 [documents], prompt tokens of each document; 0 without a prompt.
    later_prompts: int64 [2 * prompts], the `places` where further prompts begin and end, in turns.
    tokens: number of tokens of all documents.
    tokens_per_byte: tokens per byte of their text, without BOS, which nothing predicts.
  """

  def __init__(self, path: pathlib.Path, information: dict[str, Any]):
    self.path = path
    self.information = information
    self.fingerprint: str = information['fingerprint']
    vocabulary = information['vocabulary']
    bos_of_document = vocabulary['fingerprint'].count('+')
    bos_tokens = bos_of_document * information['documents']
    predicted_tokens = information['tokens'] - bos_tokens
    self.tokens_per_byte: float = predicted_tokens / information['text_bytes']
    self._vocabulary_size: int = vocabulary['size']
    self._shards = information['shards']
    self._first_documents = self._counted_before('documents')
    self._first_tokens = self._counted_before('tokens')
    self._tokens: list[ArrayFile] = []
    self._hashes: list[ArrayFile] = []
    for shard in self._shards:
      self._tokens.append(self._open_tokens(shard))
      self._hashes.append(self._open_hashes(shard))

    starts: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    prompts: list[np.ndarray] = []
    later_prompts: list[np.ndarray] = []
    first_tokens = self._first_tokens[:-1]
    for shard, first_token in zip(self._shards, first_tokens, strict=True):
      offsets = self._read_offsets(shard)
      shard_lengths = np.diff(offsets)
      shard_prompts, turns = self._read_prompts(shard, shard_lengths)
      starts.append(offsets[:-1])
      lengths.append(shard_lengths)
      keys.append(self._read_keys(shard))
      prompts.append(shard_prompts)
      later_prompts.append(first_token + turns)

    # Numbers of the documents that are not duplicates; None if all stay.
    self._numbers = self._read_kept()
    self._starts = self._kept(starts)
    self.lengths = self._kept(lengths)
    self.sequence_keys = self._kept(keys)
    self.prompts = self._kept(prompts)
    self.later_prompts = np.concatenate(later_prompts)
    self.tokens = int(self.lengths.sum())
    self._checked = np.zeros(len(self.lengths), np.uint8)  # _INTACT or _DAMAGED once read
    self._changes = 0  # changes of the files that `_checked` takes into account

  def _kept(self, parts: Sequence[np.ndarray]) -> np.ndarray:
    """An array of all shards, without the duplicates."""
    stored = np.concatenate(parts)
    if self._numbers is None:
      return stored
    return stored[self._numbers]

  def _counted_before(self, name: str) -> np.ndarray:
    """The documents or tokens before each shard, and all of them, int [shards + 1]."""
    counts = [shard[name] for shard in self._shards]
    return np.cumsum([0, *counts])

  def _open_tokens(self, shard: Mapping[str, Any]) -> ArrayFile:
    file = self.path / shard['name'] / TOKENS_FILE
    dtype = token_dtype(self._vocabulary_size)
    return ArrayFile(file, dtype, (shard['tokens'],))

  def _open_hashes(self, shard: Mapping[str, Any]) -> ArrayFile:
    file = self.path / shard['name'] / HASHES_FILE
    dtype = np.dtype(np.uint8)
    shape = (shard['documents'], 16)
    return ArrayFile(file, dtype, shape)

  def _read_offsets(self, shard: Mapping[str, Any]) -> np.ndarray:
    """The starts of the documents of a shard, and its end."""
    file = self.path / shard['name'] / OFFSETS_FILE
    shape = (shard['documents'] + 1,)
    offsets = store_arrays.load(file, np.int64, shape)
    store_fields.check_offsets(file, offsets, shard['tokens'])
    return offsets

  def _read_keys(self, shard: Mapping[str, Any]) -> np.ndarray:
    """The sequence keys of the documents of a shard."""
    file = self.path / shard['name'] / KEYS_FILE
    return store_arrays.load(file, np.uint64, (shard['documents'],))

  def _read_kept(self) -> np.ndarray | None:
    """The numbers of the documents that are not duplicates; None if there are no duplicates."""
    if 'duplicates' not in self.information:
      return None
    documents = self.information['documents']
    file = self.path / duplicates_name(self.information['duplicates'])
    duplicates = store_arrays.load(file, np.int64, (None,))
    store_fields.check_duplicates(file, duplicates, documents)
    all_documents = np.arange(documents)
    return np.delete(all_documents, duplicates)

  def _read_prompts(self, shard: Mapping[str, Any], lengths: np.ndarray) -> tuple[np.ndarray, ...]:
    """The prompts of a shard whose documents have these lengths, and the places of later ones."""
    folder = self.path / shard['name']
    prompts = np.zeros(shard['documents'], np.int64)
    if PROMPTS_FILE in shard['files']:
      file = folder / PROMPTS_FILE
      prompts = store_arrays.load(file, np.int64, prompts.shape)
      store_fields.check_places(file, prompts, lengths)
    turns = np.zeros(0, np.int64)
    if LATER_PROMPTS_FILE in shard['files']:
      file = folder / LATER_PROMPTS_FILE
      turns = store_arrays.load(file, np.int64, (None,))
      store_fields.check_turns(file, turns, shard['tokens'])
    return prompts, turns

  @classmethod
  def open(cls, path: pathlib.Path, vocabulary: Vocabulary) -> 'TokenStore':
    """Opens a finished store and checks everything but the tokens, which `damaged` checks.

    Raises:
      DataError: the store or a shard is unfinished, missing, truncated, altered or not a store.
      ConfigurationError: it was built with another vocabulary.
    """
    information = read_information(path)
    built = information['vocabulary']
    built_codec = (built['fingerprint'], built['eos_id'])
    if built_codec != (vocabulary.fingerprint, vocabulary.eos_id):
      raise ConfigurationError(
        f'The token store {path} was built with the vocabulary {built["fingerprint"]} (EOS '
        f'{built["eos_id"]}), but the run asks for {vocabulary.fingerprint} (EOS '
        f'{vocabulary.eos_id}). Use that vocabulary or another TaskFeed.data_dir.'
      )
    for name, recorded in recorded_files(information).items():
      is_small = not name.endswith(TOKENS_FILE)
      store_arrays.check_file(path / name, recorded, content=is_small)
    try:
      warn_of_ratio(path, information)
      return cls(path, information)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
      reason = f'does not fit the arrays beside it ({error!r})'
      raise DataError(f'{path / STORE_FILE} {reason}. {REBUILD}') from error

  def read(self, documents: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Reads slices of documents, and concatenates them to int32 [sum(lengths)].

    Slice i is the tokens [begins[i], begins[i] + lengths[i]) of document documents[i].
    """
    shards = self._shards_of(documents)
    begins = self._starts[documents] + begins
    ends = begins + lengths
    slices = np.stack([shards, begins, ends], axis=1)
    pieces = [np.empty(0, np.int32)]
    for shard, begin, end in slices.tolist():
      file = self._tokens[shard]
      pieces.append(file.read(begin, end))
    return np.concatenate(pieces, dtype=np.int32, casting='unsafe')

  def places(self, documents: np.ndarray) -> np.ndarray:
    """Tokens that are stored before each document, int [documents]."""
    shards = self._shards_of(documents)
    tokens_before_shards = self._first_tokens[shards]
    return tokens_before_shards + self._starts[documents]

  def damaged(self, documents: np.ndarray) -> np.ndarray:
    """Checks documents, int [documents], by their hashes -> bool [documents], True if damaged.

    A document is read completely the first time that this method gets it; the result is kept until
    a file of the store changes.
    """
    files = [*self._tokens, *self._hashes]
    changes = sum(file.changes for file in files)
    if changes != self._changes:
      self._changes = changes
      self._checked[:] = 0
    is_unchecked = self._checked[documents] == 0
    unchecked = documents[is_unchecked]
    for document in unchecked.tolist():
      damage = self.damage(document)
      self._checked[document] = _DAMAGED
      if damage is None:
        self._checked[document] = _INTACT
    return self._checked[documents] == _DAMAGED

  def damage(self, document: int) -> str | None:
    """The damage of a document and its place in the store, or None if it is intact."""
    shard = int(self._shards_of(document))
    shard_name = self._shards[shard]['name']
    stored = self._stored(document)
    number = int(stored - self._first_documents[shard])
    begin = int(self._starts[document])
    length = int(self.lengths[document])
    tokens = self._tokens[shard].read(begin, begin + length)
    place = f'document {number} of {shard_name} in the token store {self.path}'
    largest = tokens.max()
    if largest >= self._vocabulary_size:
      return f'{place} has the token {largest}, but there are {self._vocabulary_size} ids'
    content = tokens.tobytes()
    digest = hashlib.blake2b(content, digest_size=16).digest()
    hashes = self._hashes[shard]
    recorded = hashes.read(number, number + 1)
    if digest != recorded.tobytes():
      return f'{place} does not have the hash recorded when it was written'
    return None

  def _shards_of(self, documents: np.ndarray | int) -> np.ndarray:
    stored = self._stored(documents)
    shards_begun = np.searchsorted(self._first_documents, stored, side='right')
    return shards_begun - 1

  def _stored(self, documents: np.ndarray | int) -> np.ndarray | int:
    """The numbers of documents among all that were stored."""
    if self._numbers is None:
      return documents
    return self._numbers[documents]


def token_dtype(vocabulary_size: int) -> np.dtype:
  """The smallest unsigned dtype for every token id."""
  kind = np.uint32
  if vocabulary_size <= 2**16:
    kind = np.uint16
  return np.dtype(kind)


def content_hash(content: Any) -> str:
  """SHA-256 of a JSON value."""
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def read_information(path: pathlib.Path) -> dict[str, Any]:
  """Reads store.json; DataError if it is missing, corrupt or of another format."""
  file = path / STORE_FILE
  try:
    return information_of(foreign.content(file), str(file))
  except FileNotFoundError as error:
    raise DataError(
      f'{path} is not a finished token store: it has no {STORE_FILE}. Build it with '
      'python -m valkyrie.data.build_store, which continues an earlier build.'
    ) from error
  except OSError as error:
    raise store_arrays.unreadable(file, error) from error
  except ValueError as error:
    raise DataError(f'{file} cannot be read ({error}). {REBUILD}') from error


def information_of(content: bytes, file: str) -> dict[str, Any]:
  """The content of the store.json named `file`.

  A DataError is raised if it is corrupt or of another format, or a name leads out of the store.
  """
  with converted((ValueError,), DataError, f'{file} cannot be read', REBUILD):
    information = foreign.json_object(content)
  file_format = information.get('format')
  if file_format != FORMAT:
    raise DataError(f'{file} has the format {file_format!r}, expected {FORMAT!r}. {REBUILD}')
  digest = information.pop('sha256', None)
  if digest != content_hash(information):
    raise DataError(f'{file} is corrupt: its content does not match its SHA-256. {REBUILD}')
  with converted((ValueError,), DataError, f'{file} does not list its shards', REBUILD):
    store_fields.check(information)
  names = [shard['name'] for shard in information['shards']]
  names += recorded_files(information)
  for name in names:
    foreign_names.checked(name, file, f'No array was read. {REBUILD}', DataError)
  return information


def warn_of_ratio(path: pathlib.Path, information: Mapping[str, Any]) -> None:
  """Warns of a store whose tokens can hardly be all of its text, or hold much else."""
  ratio = information['text_bytes'] / information['tokens']
  if not _LEAST_BYTES <= ratio <= _MOST_BYTES:
    logging.warning(
      'The token store %s has %.3g bytes of text a token, expected %s to %s. Decode a few '
      'documents, and check the vocabulary: it may drop or add text. Build again after a change.',
      path,
      ratio,
      _LEAST_BYTES,
      _MOST_BYTES,
    )


def recorded_files(information: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """{path in the store: its entry in store.json} of all arrays."""
  files = {}
  for shard in information['shards']:
    for name, recorded in shard['files'].items():
      files[f'{shard["name"]}/{name}'] = recorded
  if 'duplicates' in information:
    recorded = information['duplicates']
    name = duplicates_name(recorded)
    files[name] = recorded
  return files


def duplicates_name(recorded: Mapping[str, Any]) -> str:
  """The name of the array of duplicates, from its entry in store.json."""
  return recorded.get('name', DUPLICATES_FILE)


def verify(path: pathlib.Path) -> dict[str, Any]:
  """Reads every byte of a store and returns store.json; DataError names a bad file."""
  information = read_information(path)
  for name, recorded in recorded_files(information).items():
    store_arrays.check_file(path / name, recorded)
  return information
