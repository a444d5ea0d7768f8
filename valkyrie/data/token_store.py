"""The token store: a directory of tokenised documents, read at random by memory map.

  store.json                      written last: what the store holds, what it was made from, and
                                  the SHA-256 of all that
  shard-00000-of-00008/
    tokens.npy     uint16 | uint32 [tokens]      documents end to end, each closed by an EOS
    offsets.npy    int64 [documents + 1]         where each document starts in tokens.npy
    hashes.npy     uint8 [documents, 16]         BLAKE2b of each document's tokens
    keys.npy       uint64 [documents]            equal for the documents of one sequence
    prompts.npy    int64 [documents]             tokens that are given, before the answer; no file
                                                 where there are no prompts
    shard.json                                   counts, and size and SHA-256 of these files

Arrays are plain .npy files: any slice of a document of any length is one `memcpy`, and any numpy
opens them. `store_writer` makes a store, `verify` reads every byte of one again.
"""

import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError

FORMAT = 'valkyrie-token-store-2'
STORE_FILE = 'store.json'
SHARD_FILE = 'shard.json'
TOKENS_FILE = 'tokens.npy'
PROMPTS_FILE = 'prompts.npy'
REBUILD = 'Delete that directory and run again to build it anew.'
_WHOLE, _DAMAGED = 1, 2


class TokenStore:
  """The documents of one split, numbered as they stand in the shards.

  Attributes:
    path: the store's directory.
    information: the content of store.json.
    fingerprint: SHA-256 over the vocabulary and every shard's content.
    lengths: int64 [documents], tokens of each document with its EOS.
    sequence_keys: uint64 [documents], equal for documents that belong together.
    prompts: int64 [documents], how many tokens of each are its prompt: 0 where it has none.
    tokens, text_bytes: ints, over all documents.
  """

  def __init__(self, path: pathlib.Path, information: dict[str, Any]):
    self.path = path
    self.information = information
    self.fingerprint: str = information['fingerprint']
    self.tokens: int = information['tokens']
    self.text_bytes: int = information['text_bytes']
    self._vocabulary_size: int = information['vocabulary']['size']
    names = [shard['name'] for shard in information['shards']]
    # A plain ndarray over the map: slicing np.memmap itself costs ten times as much.
    self._tokens = [np.asarray(_load(path / name / TOKENS_FILE, mapped=True)) for name in names]
    self._hashes = [_load(path / name / 'hashes.npy', mapped=True) for name in names]
    offsets = [_load(path / name / 'offsets.npy') for name in names]
    self._shard_names = names
    self._first_documents = np.cumsum([0] + [len(o) - 1 for o in offsets])
    self._starts = np.concatenate([o[:-1] for o in offsets])
    self.lengths = np.concatenate([np.diff(o) for o in offsets])
    self.sequence_keys = np.concatenate([_load(path / name / 'keys.npy') for name in names])
    self.prompts = np.concatenate(
      [
        _load(path / shard['name'] / PROMPTS_FILE)
        if PROMPTS_FILE in shard['files']
        else np.zeros(shard['documents'], np.int64)
        for shard in information['shards']
      ]
    )
    self._checked = np.zeros(len(self.lengths), np.uint8)  # _WHOLE or _DAMAGED, once it was read

  @classmethod
  def open(cls, path: pathlib.Path, vocabulary: Vocabulary) -> 'TokenStore':
    """Opens a finished store and checks everything that does not need reading the tokens.

    Raises:
      DataError: the store or a shard is unfinished, missing, empty, truncated, altered or not a
        store.
      ConfigurationError: it was built with another vocabulary.
    """
    information = read_information(path)
    built = information['vocabulary']
    if (built['fingerprint'], built['eos_id']) != (vocabulary.fingerprint, vocabulary.eos_id):
      raise ConfigurationError(
        f'The token store {path} was built with the vocabulary {built["fingerprint"]} (EOS '
        f'{built["eos_id"]}), but the run asks for {vocabulary.fingerprint} (EOS '
        f'{vocabulary.eos_id}). Name that vocabulary, or another data_dir.'
      )
    for shard in information['shards']:
      for name, recorded in shard['files'].items():
        check_size(path / shard['name'] / name, recorded['bytes'])
        if name != TOKENS_FILE:  # which `damaged` checks document by document
          check_content(path / shard['name'] / name, recorded['sha256'])
    store = cls(path, information)
    store._check_tokens()
    return store

  def read(self, documents: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Slices of documents, end to end.

    Args:
      documents, begins, lengths: int [pieces]; piece i is tokens begins[i] to begins[i] +
        lengths[i] of that document.

    Returns:
      int32 [sum(lengths)]
    """
    shards = self._shards(documents)
    begins = self._starts[documents] + begins
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.int32)
    pieces = (shards, begins, begins + lengths, ends - lengths, ends)
    for shard, begin, end, to, to_end in zip(*(piece.tolist() for piece in pieces), strict=True):
      out[to:to_end] = self._tokens[shard][begin:end]
    return out

  def damaged(self, documents: np.ndarray) -> np.ndarray:
    """Which of these documents, int [documents], are not what was written: bool [documents].

    Each is read whole, and hashed, the first time that it is asked for.
    """
    for document in documents[self._checked[documents] == 0].tolist():
      self._checked[document] = _WHOLE if self.damage(document) is None else _DAMAGED
    return self._checked[documents] == _DAMAGED

  def damage(self, document: int) -> str | None:
    """What is wrong with a document, and where it stands; None if it is what was written."""
    shard = int(self._shards(document))
    number = document - int(self._first_documents[shard])
    begin = int(self._starts[document])
    tokens = self._tokens[shard][begin : begin + int(self.lengths[document])]
    place = f'document {number} of {self._shard_names[shard]} in the token store {self.path}'
    if tokens.max() >= self._vocabulary_size:
      return f'{place} holds the token {tokens.max()}, but there are {self._vocabulary_size} ids'
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
    if digest != self._hashes[shard][number].tobytes():
      return f'{place} does not have the hash that it was written with'
    return None

  def _shards(self, documents: np.ndarray | int) -> np.ndarray:
    return np.searchsorted(self._first_documents, documents, side='right') - 1

  def _check_tokens(self):
    """Refuses files of tokens whose header says something else than was written."""
    dtype = token_dtype(self._vocabulary_size)
    for shard, tokens in zip(self.information['shards'], self._tokens, strict=True):
      if (tokens.dtype, tokens.shape) != (dtype, (shard['tokens'],)):
        raise DataError(
          f'{self.path / shard["name"] / TOKENS_FILE} is corrupt: it holds {tokens.dtype} '
          f'{list(tokens.shape)}, but {dtype} [{shard["tokens"]}] were written. {REBUILD}'
        )


def token_dtype(vocabulary_size: int) -> np.dtype:
  """The smallest integers that hold every token."""
  return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


def content_hash(content: Any) -> str:
  """SHA-256 of what JSON can hold."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_information(path: pathlib.Path) -> dict[str, Any]:
  """store.json as a dictionary; DataError where it is missing or not of this format."""
  file = path / STORE_FILE
  try:
    information = json.loads(file.read_text())
  except FileNotFoundError as error:
    raise DataError(
      f'{path} is not a finished token store: it has no {STORE_FILE}. Build it with '
      'python -m valkyrie.data.build_store, which goes on where an earlier build stopped.'
    ) from error
  except (OSError, ValueError) as error:
    raise DataError(f'{file} cannot be read ({error}). {REBUILD}') from error
  found = information.get('format') if isinstance(information, dict) else None
  if found != FORMAT:
    raise DataError(f'{file} is of the format {found!r}, expected {FORMAT!r}. {REBUILD}')
  if information.pop('sha256', None) != content_hash(information):
    raise DataError(f'{file} is corrupt: it is not what its SHA-256 says. {REBUILD}')
  return information


def check_size(file: pathlib.Path, expected: int):
  """DataError naming the file unless it has the size that was recorded when it was written."""
  try:
    found = file.stat().st_size
  except OSError as error:
    raise DataError(
      f'The token store lacks {file} ({error.strerror}), which should hold {expected} bytes. '
      + REBUILD
    ) from error
  if found != expected:
    raise DataError(
      f'{file} is {"empty" if not found else "truncated or altered"}: it holds {found} bytes, '
      f'but {expected} were written. {REBUILD}'
    )


def check_content(file: pathlib.Path, expected: str):
  """DataError naming the file unless it has the SHA-256 that it was written with."""
  found = file_sha256(file)
  if found != expected:
    raise DataError(
      f'{file} is corrupt: its SHA-256 is {found}, but {expected} was written. {REBUILD}'
    )


def verify(path: pathlib.Path) -> dict[str, Any]:
  """Reads every byte of a store again; store.json's content, or DataError naming a bad file."""
  information = read_information(path)
  for shard in information['shards']:
    for name, recorded in shard['files'].items():
      file = path / shard['name'] / name
      check_size(file, recorded['bytes'])
      check_content(file, recorded['sha256'])
  return information


def file_sha256(file: pathlib.Path) -> str:
  with file.open('rb') as stream:
    return hashlib.file_digest(stream, 'sha256').hexdigest()


def _load(file: pathlib.Path, mapped: bool = False) -> np.ndarray:
  try:
    return np.load(file, mmap_mode='r' if mapped else None, allow_pickle=False)
  except Exception as error:  # numpy parses the header as Python, and fails in as many ways
    raise DataError(f'{file} is not an array that can be read ({error}). {REBUILD}') from error
