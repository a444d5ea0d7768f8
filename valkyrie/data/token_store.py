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

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import platform
import re
from typing import Any

import numpy as np

from valkyrie import foreign
from valkyrie.config import paths, redact
from valkyrie.data import store_arrays, store_fields
from valkyrie.data.store_arrays import REBUILD, ArrayFile
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError, converted, with_home
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
_INTACT, _DAMAGED = 1, 2
_USUAL_BYTES = (0.25, 20)  # of text a token


@dataclasses.dataclass(frozen=True)
class Selection:
  """The documents of a store: a split of a task, tokenized.

  A path in `source` becomes absolute, since a relative one names other files in another folder.
  """

  task: str
  split: str
  vocabulary: Vocabulary
  source: str | None = None
  options: Mapping[str, str] = dataclasses.field(default_factory=dict)
  unique: bool = False

  def __post_init__(self):
    if self.source is not None and not paths.is_address(self.source):
      object.__setattr__(self, 'source', os.path.abspath(with_home(self.source)))

  def __str__(self) -> str:
    return f'{self.task}/{self.split}'

  @property
  def name(self) -> str:
    """The name of the store's directory: <task>-<split>-<vocabulary>-<origin of the documents>.

    The documents of a task without a `source` may depend on the Python version (python_stdlib), so
    the version is their origin; otherwise the origin is a hash of the source and the options.
    """
    origin = f'python{platform.python_version()}'
    if self.source is not None:
      options = f' {json.dumps(self.options, sort_keys=True)}' if self.options else ''
      origin = hashlib.sha256(f'{self.source}{options}'.encode()).hexdigest()[:8]
    kind, _, digest = self.vocabulary.fingerprint.partition('-')
    digest, plus, bos = digest.partition('+')
    vocabulary = f'{digest[:8]}{plus}{bos}'
    words = [self.task, self.split, kind, vocabulary, origin, 'unique' if self.unique else '']
    return '-'.join(re.sub(r'[^\w.]+', '_', word) for word in words if word)

  @property
  def places(self) -> tuple[str | None, ...]:
    """The source and the options, which may name files."""
    return self.source, *self.options.values()

  def recorded(self) -> dict[str, Any]:
    """What store.json records of the selection, without secrets."""
    return {
      'task': self.task,
      'split': self.split,
      'unique': self.unique,
      'vocabulary': self.vocabulary.fingerprint,
      'source': self.source and redact.in_value(self.source),
      'options': {name: redact.in_value(value) for name, value in self.options.items()},
    }


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
    bos = information['vocabulary']['fingerprint'].count('+') * information['documents']
    self.tokens_per_byte: float = (information['tokens'] - bos) / information['text_bytes']
    self._vocabulary_size: int = information['vocabulary']['size']
    self._shards = information['shards']

    folders = [path / shard['name'] for shard in self._shards]
    documents = [shard['documents'] for shard in self._shards]
    dtype = token_dtype(self._vocabulary_size)

    def loaded(name: str, dtype: type, more: int = 0) -> list[np.ndarray]:
      pairs = zip(folders, documents, strict=True)
      return [store_arrays.load(folder / name, dtype, (count + more,)) for folder, count in pairs]

    self._tokens = [
      ArrayFile(folder / TOKENS_FILE, dtype, (shard['tokens'],))
      for folder, shard in zip(folders, self._shards, strict=True)
    ]
    self._hashes = [
      ArrayFile(folder / HASHES_FILE, np.dtype(np.uint8), (count, 16))
      for folder, count in zip(folders, documents, strict=True)
    ]
    offsets = loaded(OFFSETS_FILE, np.int64, 1)
    prompts: list[np.ndarray] = []
    later_prompts: list[np.ndarray] = []
    for folder, shard, bounds in zip(folders, self._shards, offsets, strict=True):
      store_fields.check_offsets(folder / OFFSETS_FILE, bounds, shard['tokens'])
      first, turns = self._read_prompts(shard, bounds)
      prompts.append(first)
      later_prompts.append(turns)
    self._first_documents = np.cumsum([0, *documents])
    kept: slice | np.ndarray = slice(None)
    self._numbers: np.ndarray | None = None  # of the documents that stay, unless all do
    if 'duplicates' in information:
      file = path / duplicates_name(information['duplicates'])
      duplicates = store_arrays.load(file, np.int64, (None,))
      store_fields.check_duplicates(file, duplicates, information['documents'])
      kept = self._numbers = np.delete(np.arange(information['documents']), duplicates)
    self._first_tokens = np.cumsum([0] + [shard['tokens'] for shard in self._shards])
    self._starts = np.concatenate([o[:-1] for o in offsets])[kept]
    self.lengths = np.concatenate([np.diff(o) for o in offsets])[kept]
    self.sequence_keys = np.concatenate(loaded(KEYS_FILE, np.uint64))[kept]
    self.prompts = np.concatenate(prompts)[kept]
    later = zip(self._first_tokens, later_prompts, strict=False)
    self.later_prompts = np.concatenate([first + places for first, places in later])
    self.tokens = int(self.lengths.sum())
    self._checked = np.zeros(len(self.lengths), np.uint8)  # _INTACT or _DAMAGED once read
    self._changes = 0  # of the files, up to which `_checked` counts

  def _read_prompts(self, shard: Mapping[str, Any], bounds: np.ndarray) -> tuple[np.ndarray, ...]:
    """The prompts of a shard whose documents have these bounds, and the places of later ones."""
    folder = self.path / shard['name']
    prompts = np.zeros(shard['documents'], np.int64)
    turns = np.zeros(0, np.int64)
    if PROMPTS_FILE in shard['files']:
      prompts = store_arrays.load(folder / PROMPTS_FILE, np.int64, prompts.shape)
      store_fields.check_places(folder / PROMPTS_FILE, prompts, np.diff(bounds))
    if LATER_PROMPTS_FILE in shard['files']:
      turns = store_arrays.load(folder / LATER_PROMPTS_FILE, np.int64, (None,))
      store_fields.check_turns(folder / LATER_PROMPTS_FILE, turns, shard['tokens'])
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
    if (built['fingerprint'], built['eos_id']) != (vocabulary.fingerprint, vocabulary.eos_id):
      raise ConfigurationError(
        f'The token store {path} was built with the vocabulary {built["fingerprint"]} (EOS '
        f'{built["eos_id"]}), but the run asks for {vocabulary.fingerprint} (EOS '
        f'{vocabulary.eos_id}). Use that vocabulary or another TaskFeed.data_dir.'
      )
    for name, recorded in recorded_files(information).items():
      store_arrays.check_file(path / name, recorded, content=not name.endswith(TOKENS_FILE))
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
    begins = self._starts[documents] + begins
    bounds = (self._shards_of(documents), begins, begins + lengths)
    pieces = [np.empty(0, np.int32)]
    for shard, begin, end in zip(*(bound.tolist() for bound in bounds), strict=True):
      pieces.append(self._tokens[shard].read(begin, end))
    return np.concatenate(pieces, dtype=np.int32, casting='unsafe')

  def places(self, documents: np.ndarray) -> np.ndarray:
    """Tokens that are stored before each document, int [documents]."""
    return self._first_tokens[self._shards_of(documents)] + self._starts[documents]

  def damaged(self, documents: np.ndarray) -> np.ndarray:
    """Checks documents, int [documents], by their hashes -> bool [documents], True if damaged.

    A document is read completely the first time that this method gets it; the result is kept until
    a file of the store changes.
    """
    changes = sum(file.changes for file in (*self._tokens, *self._hashes))
    if changes != self._changes:
      self._changes = changes
      self._checked[:] = 0
    for document in documents[self._checked[documents] == 0].tolist():
      self._checked[document] = _INTACT if self.damage(document) is None else _DAMAGED
    return self._checked[documents] == _DAMAGED

  def damage(self, document: int) -> str | None:
    """The damage of a document and its place in the store, or None if it is intact."""
    shard = int(self._shards_of(document))
    number = int(self._stored(document) - self._first_documents[shard])
    begin = int(self._starts[document])
    tokens = self._tokens[shard].read(begin, begin + int(self.lengths[document]))
    place = f'document {number} of {self._shards[shard]["name"]} in the token store {self.path}'
    if tokens.max() >= self._vocabulary_size:
      return f'{place} has the token {tokens.max()}, but there are {self._vocabulary_size} ids'
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
    if digest != self._hashes[shard].read(number, number + 1).tobytes():
      return f'{place} does not have the hash recorded when it was written'
    return None

  def _shards_of(self, documents: np.ndarray | int) -> np.ndarray:
    return np.searchsorted(self._first_documents, self._stored(documents), side='right') - 1

  def _stored(self, documents: np.ndarray | int) -> np.ndarray | int:
    """The numbers of documents among all that were stored."""
    return documents if self._numbers is None else self._numbers[documents]


def token_dtype(vocabulary_size: int) -> np.dtype:
  """The smallest unsigned dtype for every token id."""
  return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


def content_hash(content: Any) -> str:
  """SHA-256 of a JSON value."""
  return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
  if (found := information.get('format')) != FORMAT:
    raise DataError(f'{file} has the format {found!r}, expected {FORMAT!r}. {REBUILD}')
  if information.pop('sha256', None) != content_hash(information):
    raise DataError(f'{file} is corrupt: its content does not match its SHA-256. {REBUILD}')
  with converted((ValueError,), DataError, f'{file} does not list its shards', REBUILD):
    store_fields.check(information)
  named = [*(shard['name'] for shard in information['shards']), *recorded_files(information)]
  for name in named:
    foreign_names.checked(name, file, f'No array was read. {REBUILD}', DataError)
  return information


def more_documents(selection: Selection, cut: int = 2048) -> str:
  """Advice for a split with few documents; a `cut` of so many bytes leaves enough."""
  if selection.source is None:
    return 'use another task'
  given = selection.options
  changed: dict[str, float | int] = {}
  share = _larger_share(given.get('held_out'))
  if selection.split == 'validation' and share is not None:
    changed['held_out'] = share
  if selection.task == 'text' or selection.task.startswith('fineweb'):
    before = given.get('cut', '')
    changed['cut'] = min(cut, int(before) // 2 or 1) if before.isdecimal() else cut
  elsewhere = 'name other files that validate: --gin.held_out=\'"/data/validation"\''
  if not changed:
    return elsewhere
  macros = {'held_out': 'held_out', 'cut': 'text_cut'}
  flags = ' '.join(f'--gin.{macros[name]}={value}' for name, value in changed.items())
  built = ' '.join(f'--option={name}={value}' for name, value in changed.items())
  done = {'held_out': 'hold out a larger share', 'cut': 'cut documents that are texts'}
  return (
    f'{" and ".join(done[name] for name in changed)}: {flags}, with gin/data/mixture.gin '
    f"'options': {changed} of a source, or {built} of build_store; or {elsewhere}"
  )


def _larger_share(held_out: str | None) -> float | None:
  """A larger share to hold out than the one that is set; None for files, or from a half on."""
  try:
    share = float(held_out or 0)
  except ValueError:
    return None
  return max(0.2, round(min(0.5, 2 * share), 3)) if share < 0.5 else None


def warn_of_ratio(path: pathlib.Path, information: Mapping[str, Any]) -> None:
  """Warns of a store whose tokens can hardly be all of its text, or hold much else."""
  ratio, (least, most) = information['text_bytes'] / information['tokens'], _USUAL_BYTES
  if not least <= ratio <= most:
    logging.warning(
      'The token store %s has %.3g bytes of text a token, expected %s to %s. Decode a few '
      'documents, and check the vocabulary: it may drop or add text. Build again after a change.',
      *(path, ratio, least, most),
    )


def recorded_files(information: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """{path in the store: its entry in store.json} of all arrays."""
  files = {
    f'{shard["name"]}/{name}': recorded
    for shard in information['shards']
    for name, recorded in shard['files'].items()
  }
  if 'duplicates' in information:
    files[duplicates_name(information['duplicates'])] = information['duplicates']
  return files


def duplicates_name(recorded: Mapping[str, Any]) -> str:
  """The name of the array of duplicates, of its entry in store.json."""
  return recorded.get('name', DUPLICATES_FILE)


def verify(path: pathlib.Path) -> dict[str, Any]:
  """Reads every byte of a store and returns store.json; DataError names a bad file."""
  information = read_information(path)
  for name, recorded in recorded_files(information).items():
    store_arrays.check_file(path / name, recorded)
  return information
