"""Writer of token stores, shard by shard, so that a killed build can continue.

A shard is written to a temporary directory under a lock and renamed when it is complete; store.json
comes last. Several builders may work on one store at once, each on other shards.

A store that replaces a finished one is written beside it, in shards of other names. It becomes the
store when store.json is replaced, and then the files go that the old shards record.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pathlib
import time
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from valkyrie import foreign
from valkyrie.data import shard_record, store_arrays, store_fields, token_store
from valkyrie.data.token_store import SHARD_FILE, STORE_FILE, Selection
from valkyrie.errors import ConfigurationError, DataError, converted, storage_errors
from valkyrie.storage import file_lock, foreign_names, owned, whole_file

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
  later_prompts: of a conversation, where each further prompt begins and ends: [begin, end, ...].
  bos: whether the document begins with the BOS of its vocabulary.
  """

  tokens: np.ndarray | Iterable[np.ndarray]
  text_bytes: int
  sequence_key: str | None = None
  prompt_tokens: int = 0
  later_prompts: Sequence[int] = ()
  bos: bool = True


@dataclasses.dataclass(frozen=True)
class StoreWriter:
  """Writes a store into the directory `path`, in a number of shards.

  source: the origin of the documents. Shards of different selections and origins are never mixed:
    the methods raise a ConfigurationError for a shard of another one.
  renew: build such shards of an unfinished store again instead, and damaged ones.
  generation: the end of the names of the shards; not empty in a store that replaces another one.

  With `selection.unique`, only the first of several documents with equal tokens stays, in the order
  of the shards.
  """

  path: pathlib.Path
  selection: Selection
  source: Mapping[str, Any]
  shards: int
  renew: bool = False
  generation: str = ''

  @property
  def folders(self) -> list[pathlib.Path]:
    """The folders of the shards."""
    end = f'of-{self.shards:05d}{self.generation}'
    return [self.path / f'shard-{shard:05d}-{end}' for shard in range(self.shards)]

  def write(self, documents: Callable[[int], Iterable[Document]]) -> dict[str, Any]:
    """Writes the documents of every missing shard, then store.json; returns its content."""
    for shard in range(self.shards):
      self.write_shard(shard, documents(shard))
    information = self.finish()
    assert information is not None, 'every shard was just written'
    return information

  def write_shard(
    self, shard: int, documents: Iterable[Document], report: Report = lambda documents, tokens: None
  ) -> None:
    """Writes a shard, unless it is complete already.

    `report` gets the numbers of documents and tokens that were written since its last call, which
    are 0 while another process writes this shard.

    Raises:
      DataError: a token is outside the vocabulary, or most documents are empty.
      StorageError: the file system refused a write.
    """
    folder = self.folders[shard]
    turn = file_lock.held(lock_of(folder), f'build {folder}', lambda: report(0, 0))
    with write_errors(self.path), turn:
      replaces = None
      if os.path.lexists(folder):
        try:
          self._read_shard(folder)
          return
        except (ConfigurationError, DataError):
          record = shard_record.read(folder)
          is_other = bool(record) and not shard_record.is_like(record, self._information())
          if is_other or not self.renew:
            raise
          logging.warning('Building %s again: it is damaged, or its source has changed', folder)
          replaces = shard_record.files(record)
      try:
        with owned.new_folder(folder, replaces=replaces) as temporary:
          counts = self._write_arrays(temporary, shard, documents, report)
          files = {file.name: _recorded(file) for file in sorted(temporary.glob('*.npy'))}
          record = self._information() | {'name': folder.name, 'files': files} | counts
          whole_file.write(temporary / SHARD_FILE, _json(record))
      except FileExistsError:  # without locks, another process was faster
        self._read_shard(folder)

  def check_shards(self) -> None:
    """Raises the errors of `write_shard` for the shards that are there."""
    for folder in self.folders:
      if folder.exists():
        self._read_shard(folder)

  def finish(self, origin: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Writes store.json and returns its content, or None while other shards are missing.

    origin: the record of the files of the source, see `provenance`.

    Raises:
      DataError: there are no documents, or most are empty.
      StorageError: the file system refused a write.
    """
    folders = self.folders
    if not all((folder / SHARD_FILE).exists() for folder in folders):
      return None
    shards = [self._read_shard(folder) for folder in folders]
    pairs = [*zip(shards, folders, strict=True)]
    information = self._information() | {key: sum(s[key] for s in shards) for key in COUNTS}
    _check_skipped(str(self.path), information)
    if not information['documents']:
      raise DataError(
        f'The split {self.selection.split!r} of the task {self.selection.task!r} has no documents. '
        f'Use another split or source, or {token_store.more_documents(self.selection)}.'
      )
    superseded = {}
    if self.renew:
      superseded = shard_record.others_in(self.path, information, folders)
    superseded_file = self._superseded_duplicates() if self.generation else None
    kept = ('name', 'documents', 'tokens', 'files')
    information['shards'] = [{key: s[key] for key in kept} for s in shards]
    files = [s['files'] for s in shards]
    information['origin'] = origin
    with write_errors(self.path):
      stays = np.ones(information['documents'], bool)
      if self.selection.unique:
        stays = _first_of_equals([_hashes(shard, folder) for shard, folder in pairs])
        file = self.path / f'duplicates{self.generation}.npy'
        with owned.new_file(file) as stream:
          np.save(stream, np.flatnonzero(~stays))
        duplicates = {'documents': int((~stays).sum())} | _recorded(file)
        files.append(duplicates)
        name = {'name': file.name} if self.generation else {}
        information['duplicates'] = duplicates | name
      information['fingerprint'] = token_store.content_hash([information['vocabulary'], files])
      lengths = [np.diff(_offsets(shard, folder)) for shard, folder in pairs]
      information['lengths'] = _histogram(np.concatenate(lengths)[stays])
      whole = information | {'sha256': token_store.content_hash(information)}
      whole_file.write(self.path / STORE_FILE, _json(whole))
      source = source_file(self.path, self.generation)
      for left in [*map(lock_of, folders), lock_of(source), source]:
        owned.delete_file(left)
      for folder, names in superseded.items():
        owned.tell_what_stays(folder, owned.delete_recorded(folder, names))
      if superseded_file is not None:
        owned.delete_file(superseded_file)
    token_store.warn_of_ratio(self.path, information)
    return information

  def _superseded_duplicates(self) -> pathlib.Path | None:
    """The array of the store that this one replaces, if it has one."""
    with contextlib.suppress(DataError):  # there is no such store, or its record is damaged
      duplicates = token_store.read_information(self.path).get('duplicates')
      return duplicates and self.path / token_store.duplicates_name(duplicates)
    return None

  def _information(self) -> dict[str, Any]:
    """What all shards and store.json share."""
    vocabulary = self.selection.vocabulary
    return {
      'format': token_store.FORMAT,
      'task': self.selection.task,
      'split': self.selection.split,
      'source': self.source,
      'unique': self.selection.unique,
      'vocabulary': {
        'fingerprint': vocabulary.fingerprint,
        'size': vocabulary.size,
        'eos_id': vocabulary.eos_id,
      },
    }

  def _write_arrays(
    self, directory: pathlib.Path, shard: int, documents: Iterable[Document], report: Report
  ) -> dict[str, int]:
    """Writes the arrays of a shard and returns its counts."""
    vocabulary = self.selection.vocabulary
    dtype = token_store.token_dtype(vocabulary.size)
    offsets, hashes, keys, prompts, later_prompts = [0], bytearray(), bytearray(), [], []
    counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
    with flushed(directory / token_store.TOKENS_FILE) as stream:
      _write_header(stream, dtype, 0)
      told, due = (0, 0), time.monotonic()
      for number, document in enumerate(documents):
        if time.monotonic() >= due:
          report(counts['documents'] - told[0], offsets[-1] - told[1])
          told, due = (counts['documents'], offsets[-1]), time.monotonic() + _REPORT_SECONDS
        if isinstance(document.tokens, np.ndarray) and len(document.tokens) < 2:
          counts['skipped_one_token' if len(document.tokens) else 'skipped_empty'] += 1
          if number >= _JUDGED_AFTER:
            _check_skipped(f'shard {shard}', counts)
          continue
        pieces = [document.tokens] if isinstance(document.tokens, np.ndarray) else document.tokens
        digest, length = hashlib.blake2b(digest_size=16), 0
        begin = np.array(vocabulary.bos if document.bos else (), np.int32)
        for piece in itertools.chain([begin], pieces, [np.array([vocabulary.eos_id])]):
          if piece.max(initial=0) >= vocabulary.size or piece.min(initial=0) < 0:
            raise DataError(
              f'Document {number} of shard {shard} of {self.selection.task} has token ids from '
              f'{piece.min()} to {piece.max()}, but the vocabulary {vocabulary.fingerprint} has '
              f'{vocabulary.size} ids, from 0. Remove the preprocessor of the task that changes '
              'ids after tokenizing, or use a larger vocabulary.'
            )
          content = piece.astype(dtype).tobytes()
          stream.write(content)
          digest.update(content)
          length += len(piece)
          if len(piece) > _LONG:
            report(0, 0)
        offsets.append(offsets[-1] + length)
        hashes += digest.digest()
        key = (document.sequence_key or f'\0{shard}/{number}').encode('utf-8', errors='replace')
        keys += hashlib.blake2b(key, digest_size=8).digest()
        prompts.append(document.prompt_tokens and document.prompt_tokens + len(begin))
        later_prompts += [offsets[-2] + len(begin) + place for place in document.later_prompts]
        counts['documents'] += 1
        counts['text_bytes'] += document.text_bytes
      counts['tokens'] = offsets[-1]
      report(counts['documents'] - told[0], offsets[-1] - told[1])
      stream.seek(0)
      _write_header(stream, dtype, counts['tokens'])
    _save(directory / 'offsets.npy', np.array(offsets, np.int64))
    _save(directory / 'hashes.npy', np.frombuffer(hashes, np.uint8).reshape(-1, 16))
    _save(directory / 'keys.npy', np.frombuffer(keys, '<u8'))
    if any(prompts):
      _save(directory / token_store.PROMPTS_FILE, np.array(prompts, np.int64))
    if later_prompts:
      _save(directory / token_store.LATER_PROMPTS_FILE, np.array(later_prompts, np.int64))
    return counts

  def _read_shard(self, folder: pathlib.Path) -> dict[str, Any]:
    """Reads shard.json of a finished shard, which must be complete, and of this store."""
    kinds, message = dict.fromkeys(COUNTS, int), f'{folder} has no readable {SHARD_FILE}'
    with converted((OSError, ValueError), DataError, message, token_store.REBUILD):
      record = foreign.json_object(foreign.content(folder / SHARD_FILE), files=dict, **kinds)
      store_fields.check_files(record['files'])
    for file, recorded in record['files'].items():
      foreign_names.checked(file, folder / SHARD_FILE, token_store.REBUILD, DataError)
      store_arrays.check_file(folder / file, recorded, content=False)
    for key, expected in (self._information() | {'name': folder.name}).items():
      if record.get(key) != expected:
        found, wanted = differences(record.get(key), expected)
        advice = 'Use another --output.'
        if shard_record.is_like(record, self._information()):
          advice = 'To build such shards again, run the same command with --renew.'
        raise ConfigurationError(
          f'{folder} was built with another {key}: found {found}, expected {wanted}. {advice}'
        )
    return record


def source_file(store: pathlib.Path, generation: str = '') -> pathlib.Path:
  """The record of the files of the source of an unfinished store, see `provenance.Origin`."""
  return store / f'.source{generation}.jsonl'


def lock_of(place: pathlib.Path) -> pathlib.Path:
  """The file whose lock has the builder of a shard or of the record of the source."""
  return place.with_name(f'.{place.name.lstrip(".")}.lock')


def _offsets(shard: Mapping[str, Any], folder: pathlib.Path) -> np.ndarray:
  """The starts of the documents of a finished shard, int64 [documents + 1]."""
  file = folder / token_store.OFFSETS_FILE
  offsets = store_arrays.load(file, np.int64, (shard['documents'] + 1,))
  store_fields.check_offsets(file, offsets, shard['tokens'])
  return offsets


def _hashes(shard: Mapping[str, Any], folder: pathlib.Path) -> np.ndarray:
  """The hashes of the documents of a finished shard, uint8 [documents, 16]."""
  return store_arrays.load(folder / token_store.HASHES_FILE, np.uint8, (shard['documents'], 16))


def differences(found: Any, expected: Any) -> tuple[str, str]:
  """Two values as texts; of dicts only the different entries: an origin may name many files."""
  if isinstance(found, dict) and isinstance(expected, dict):
    keys = [key for key in found | expected if found.get(key) != expected.get(key)]
    found = {key: found.get(key) for key in keys}
    expected = {key: expected.get(key) for key in keys}
  return foreign.shown(found), foreign.shown(expected)


def _check_skipped(place: str, counts: Mapping[str, int]) -> None:
  skipped = counts['skipped_empty'] + counts['skipped_one_token']
  total = counts['documents'] + skipped
  if skipped > MAX_SKIPPED * total:
    raise DataError(
      f'{skipped} of {total} documents in {place} are empty or have one token only, but '
      f'at most {MAX_SKIPPED:.0%} may be skipped. Check the text column and the files of the '
      'source.'
    )


def _first_of_equals(hashes: list[np.ndarray]) -> np.ndarray:
  """Whether each document is the first with its hash: bool [documents]."""
  pairs = np.concatenate(hashes).view(np.uint64)
  order = np.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: equals stay in their order
  stays = np.ones(len(pairs), bool)
  stays[order[1:]] = (pairs[order[1:]] != pairs[order[:-1]]).any(axis=1)
  return stays


def _histogram(lengths: np.ndarray) -> dict[str, int]:
  """{2^k: number of documents with 2^k to 2^(k+1) - 1 tokens}."""
  powers, counts = np.unique(np.log2(lengths).astype(int), return_counts=True)
  return {str(2**power): int(count) for power, count in zip(powers.tolist(), counts, strict=True)}


def _write_header(stream: BinaryIO, dtype: np.dtype, length: int) -> None:
  """Writes a .npy header; numpy pads it, so that the final length overwrites the first one."""
  np.lib.format.write_array_header_1_0(
    stream, {'descr': dtype.str, 'fortran_order': False, 'shape': (length,)}
  )


def _save(file: pathlib.Path, array: np.ndarray) -> None:
  with flushed(file) as stream:
    np.save(stream, array)


def _json(content: dict[str, Any]) -> str:
  return json.dumps(content, indent=1, sort_keys=True)


def _recorded(file: pathlib.Path) -> dict[str, Any]:
  """The entry of an array in shard.json or store.json."""
  return {'bytes': file.stat().st_size, 'sha256': store_arrays.file_sha256(file)}


@contextlib.contextmanager
def flushed(file: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a new file, and flushes it to disk before it is closed."""
  with file.open('wb') as stream:
    yield stream
    stream.flush()
    os.fsync(stream.fileno())


def write_errors(path: pathlib.Path):
  """Converts an OSError inside the block to a StorageError."""
  return storage_errors(
    f'The token store {path} cannot be written',
    'Free space there, or use another directory. Finished shards are kept.',
  )
