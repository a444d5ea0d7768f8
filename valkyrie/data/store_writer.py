"""Writer of token stores, shard by shard, so that a killed build can continue.

A shard is written to a temporary directory under a lock and renamed when it is complete; store.json
comes last. Several builders may work on one store at once, each on other shards.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import time
from typing import IO, Any, BinaryIO, NamedTuple
import uuid

import numpy as np

from valkyrie.data import token_store
from valkyrie.data.token_store import SHARD_FILE, STORE_FILE
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError, storage_errors
from valkyrie.storage import foreign_names

SOURCE_FILE = '.source.jsonl'  # of an unfinished store, see `provenance.Origin`
COUNTS = ('documents', 'tokens', 'text_bytes', 'skipped_empty', 'skipped_one_token')
# If most documents are empty, the source is broken. A shard is judged after so many documents.
MAX_SKIPPED = 0.5
_JUDGED_AFTER = 1000
_REPORTED = 100  # documents between two reports
_LONG = 2**16  # tokens; each longer piece of a document is followed by a report
_PAUSE_SECONDS = 1.0  # between two looks at a shard of another builder
Report = Callable[[int, int], None]


class Document(NamedTuple):
  """A tokenized document.

  tokens: int [tokens], without EOS; or, for a long document, such pieces one after the other.
  text_bytes: bytes of its text in UTF-8.
  sequence_key: equal for documents that belong together; None for a document on its own.
  prompt_tokens: number of leading tokens that are the prompt; the others are the answer.
  """

  tokens: np.ndarray | Iterable[np.ndarray]
  text_bytes: int
  sequence_key: str | None = None
  prompt_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The origin of a store: shards of different recipes are never mixed.

  With `unique`, only the first of several documents with equal tokens stays, in shard order.
  """

  task: str
  split: str
  vocabulary: Vocabulary
  source: dict[str, Any]
  shards: int
  unique: bool = False

  def shard_name(self, shard: int) -> str:
    return f'shard-{shard:05d}-of-{self.shards:05d}'

  def information(self) -> dict[str, Any]:
    return {
      'format': token_store.FORMAT,
      'task': self.task,
      'split': self.split,
      'source': self.source,
      'unique': self.unique,
      'vocabulary': {
        'fingerprint': self.vocabulary.fingerprint,
        'size': self.vocabulary.size,
        'eos_id': self.vocabulary.eos_id,
      },
    }


def write_store(
  path: pathlib.Path, recipe: Recipe, documents: Callable[[int], Iterable[Document]]
) -> dict[str, Any]:
  """Writes every missing shard, then store.json; returns its content."""
  for shard in range(recipe.shards):
    write_shard(path, recipe, shard, documents)
  information = finish(path, recipe)
  assert information is not None, 'every shard was just written'
  return information


def write_shard(
  path: pathlib.Path,
  recipe: Recipe,
  shard: int,
  documents: Callable[[int], Iterable[Document]],
  report: Report = lambda documents, tokens: None,
):
  """Writes the documents of shard number `shard`, unless it is complete already.

  `report` gets the numbers of documents and tokens that were written since its last call, which
  are 0 while another process writes this shard.

  Raises:
    DataError: a token is outside the vocabulary, or most documents are empty.
    ConfigurationError: the shard exists, but was built by another recipe.
    StorageError: the file system refused a write.
  """
  name = recipe.shard_name(shard)
  temporary = path / f'.{name}.tmp'
  with write_errors(path), locked(path / f'.{name}.lock', temporary, report):
    if (path / name).exists():
      _read_shard(path, recipe, shard)
      return
    if temporary.exists():  # under the lock: its builder is dead
      shutil.rmtree(temporary)
    temporary.mkdir()
    counts = _write_arrays(temporary, recipe, shard, documents(shard), report)
    files = {
      file.name: {'bytes': file.stat().st_size, 'sha256': token_store.file_sha256(file)}
      for file in sorted(temporary.glob('*.npy'))
    }
    record = recipe.information() | {'name': name, 'files': files} | counts
    _write_json(temporary / SHARD_FILE, record)
    temporary.rename(path / name)


def check_shards(path: pathlib.Path, recipe: Recipe) -> None:
  """Raises the errors of `write_shard` for the shards that are there."""
  for shard in range(recipe.shards):
    if (path / recipe.shard_name(shard)).exists():
      _read_shard(path, recipe, shard)


def finish(
  path: pathlib.Path, recipe: Recipe, origin: dict[str, Any] | None = None
) -> dict[str, Any] | None:
  """Writes store.json and returns its content, or None while other shards are missing.

  origin: the record of the files of the source, see `provenance`.
  """
  if not all((path / recipe.shard_name(i) / SHARD_FILE).exists() for i in range(recipe.shards)):
    return None
  shards = [_read_shard(path, recipe, i) for i in range(recipe.shards)]
  information = recipe.information() | {key: sum(s[key] for s in shards) for key in COUNTS}
  _check_skipped(str(path), information)
  if not information['documents']:
    raise DataError(
      f'The split {recipe.split!r} of the task {recipe.task!r} has no documents. '
      'Use another split or source, or hold out a larger share, such as --gin.held_out=0.2 '
      '(--option=held_out=0.2 of valkyrie.data.build_store).'
    )
  kept = ('name', 'documents', 'tokens', 'files')
  information['shards'] = [{key: s[key] for key in kept} for s in shards]
  files = [s['files'] for s in shards]
  information['origin'] = origin
  with write_errors(path):
    stays = np.ones(information['documents'], bool)
    if recipe.unique:
      stays = _first_of_equals(path, information['shards'])
      information['duplicates'] = _write_duplicates(path, np.flatnonzero(~stays))
      files.append(information['duplicates'])
    information['fingerprint'] = token_store.content_hash([information['vocabulary'], files])
    information['lengths'] = _histogram(path, information['shards'], stays)
    temporary = path / f'.{STORE_FILE}.{uuid.uuid4().hex}.tmp'
    _write_json(temporary, information | {'sha256': token_store.content_hash(information)})
    temporary.replace(path / STORE_FILE)
    for left in [*path.glob('.*.lock'), path / SOURCE_FILE]:
      left.unlink(missing_ok=True)
  return information


def _first_of_equals(path: pathlib.Path, shards: Sequence[Mapping[str, Any]]) -> np.ndarray:
  """Whether each document is the first with its tokens: bool [documents]."""
  hashes = [np.load(path / shard['name'] / 'hashes.npy') for shard in shards]
  pairs = np.concatenate(hashes).view(np.uint64)
  order = np.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: equals stay in their order
  stays = np.ones(len(pairs), bool)
  stays[order[1:]] = (pairs[order[1:]] != pairs[order[:-1]]).any(axis=1)
  return stays


def _write_duplicates(path: pathlib.Path, numbers: np.ndarray) -> dict[str, Any]:
  """Writes the numbers of the dropped documents; returns their entry in store.json."""
  file = path / token_store.DUPLICATES_FILE
  with flushed(file) as stream:
    np.save(stream, numbers)
  return {
    'documents': len(numbers),
    'bytes': file.stat().st_size,
    'sha256': token_store.file_sha256(file),
  }


def _histogram(
  path: pathlib.Path, shards: Sequence[Mapping[str, Any]], stays: np.ndarray
) -> dict[str, int]:
  """{2^k: number of documents with 2^k to 2^(k+1) - 1 tokens}."""
  offsets = [np.load(path / shard['name'] / 'offsets.npy') for shard in shards]
  lengths = np.concatenate([np.diff(of_shard) for of_shard in offsets])[stays]
  powers, counts = np.unique(np.log2(lengths).astype(int), return_counts=True)
  return {str(2**power): int(count) for power, count in zip(powers.tolist(), counts, strict=True)}


def _write_arrays(
  directory: pathlib.Path,
  recipe: Recipe,
  shard: int,
  documents: Iterable[Document],
  report: Report,
) -> dict[str, int]:
  """Writes the arrays of a shard and returns its counts."""
  size, eos_id = recipe.vocabulary.size, recipe.vocabulary.eos_id
  dtype = token_store.token_dtype(size)
  offsets, hashes, keys, prompts = [0], bytearray(), bytearray(), []
  counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
  with flushed(directory / token_store.TOKENS_FILE) as stream:
    _write_header(stream, dtype, 0)
    for number, document in enumerate(documents):
      if isinstance(document.tokens, np.ndarray) and len(document.tokens) < 2:
        counts['skipped_one_token' if len(document.tokens) else 'skipped_empty'] += 1
        if number >= _JUDGED_AFTER:
          _check_skipped(f'shard {shard}', counts)
        continue
      pieces = [document.tokens] if isinstance(document.tokens, np.ndarray) else document.tokens
      digest, length = hashlib.blake2b(digest_size=16), 0
      for piece in itertools.chain(pieces, [np.array([eos_id])]):
        if piece.max(initial=0) >= size or piece.min(initial=0) < 0:
          raise DataError(
            f'Document {number} of shard {shard} of {recipe.task} has token ids from '
            f'{piece.min()} to {piece.max()}, but the vocabulary {recipe.vocabulary.fingerprint} '
            f'has {size} ids, from 0. Remove the preprocessor of the task that changes ids after '
            'tokenizing, or use a larger vocabulary.'
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
      prompts.append(document.prompt_tokens)
      counts['documents'] += 1
      counts['text_bytes'] += document.text_bytes
      if counts['documents'] % _REPORTED == 0:
        report(_REPORTED, offsets[-1] - offsets[-1 - _REPORTED])
    counts['tokens'] = offsets[-1]
    rest = counts['documents'] % _REPORTED
    report(rest, offsets[-1] - offsets[-1 - rest])
    stream.seek(0)
    _write_header(stream, dtype, counts['tokens'])
  arrays = {
    'offsets.npy': np.array(offsets, np.int64),
    'hashes.npy': np.frombuffer(hashes, np.uint8).reshape(-1, 16),
    'keys.npy': np.frombuffer(keys, '<u8'),
  }
  if any(prompts):
    arrays[token_store.PROMPTS_FILE] = np.array(prompts, np.int64)
  for name, array in arrays.items():
    with flushed(directory / name) as stream:
      np.save(stream, array)
  return counts


def _write_header(stream: BinaryIO, dtype: np.dtype, length: int):
  """Writes a .npy header; numpy pads it, so that the final length overwrites the first one."""
  np.lib.format.write_array_header_1_0(
    stream, {'descr': dtype.str, 'fortran_order': False, 'shape': (length,)}
  )


def _check_skipped(place: str, counts: Mapping[str, int]):
  skipped = counts['skipped_empty'] + counts['skipped_one_token']
  total = counts['documents'] + skipped
  if skipped > MAX_SKIPPED * total:
    raise DataError(
      f'{skipped} of {total} documents in {place} are empty or have one token only, but '
      f'at most {MAX_SKIPPED:.0%} may be skipped. Check the text column and the files of the '
      'source.'
    )


def _read_shard(path: pathlib.Path, recipe: Recipe, shard: int) -> dict[str, Any]:
  """Reads shard.json of a finished shard, which must be complete and built by this recipe."""
  name = recipe.shard_name(shard)
  try:
    record = json.loads((path / name / SHARD_FILE).read_text())
    files = record['files']
  except (OSError, ValueError, KeyError) as error:
    raise DataError(
      f'{path / name} has no readable {SHARD_FILE} ({error}). {token_store.REBUILD}'
    ) from error
  for file, recorded in files.items():
    foreign_names.checked(file, path / name / SHARD_FILE, token_store.REBUILD, DataError)
    token_store.check_file(path / name / file, recorded, content=False)
  for key, expected in (recipe.information() | {'name': name}).items():
    if record.get(key) != expected:
      found, wanted = differences(record.get(key), expected)
      raise ConfigurationError(
        f'{path / name} was built with another {key}: found {found}, expected {wanted}. '
        'Use another output directory, or delete this store.'
      )
  return record


def differences(found: Any, expected: Any) -> tuple[Any, Any]:
  """Two values; of dicts only the different entries, since an origin may name many files."""
  if not isinstance(found, dict):
    return found, expected
  keys = [key for key in found | expected if found.get(key) != expected.get(key)]
  return {key: found.get(key) for key in keys}, {key: expected.get(key) for key in keys}


def _write_json(file: pathlib.Path, content: dict[str, Any]):
  with flushed(file) as stream:
    stream.write(json.dumps(content, indent=1, sort_keys=True).encode())


@contextlib.contextmanager
def flushed(file: pathlib.Path) -> Iterator[BinaryIO]:
  """Opens a new file, and flushes it to disk before it is closed."""
  with file.open('wb') as stream:
    yield stream
    stream.flush()
    os.fsync(stream.fileno())


@contextlib.contextmanager
def locked(file: pathlib.Path, written: pathlib.Path, report: Report) -> Iterator[None]:
  """Waits for other writers of `written`; the lock is released when its process dies.

  `report` is called while the folder `written` of another writer grows.
  """
  file.parent.mkdir(parents=True, exist_ok=True)
  before = 0
  with file.open('w') as stream:
    while not _has_locked(stream):
      time.sleep(_PAUSE_SECONDS)
      if (now := _size(written)) != before:
        before = now
        report(0, 0)
    yield


def _has_locked(stream: IO) -> bool:
  try:
    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def _size(folder: pathlib.Path) -> int:
  """The bytes of the files of a folder, which may vanish meanwhile."""
  with contextlib.suppress(FileNotFoundError):
    return sum(file.stat().st_size for file in folder.iterdir())
  return 0


def write_errors(path: pathlib.Path):
  """Converts an OSError inside the block to a StorageError."""
  return storage_errors(
    f'The token store {path} cannot be written',
    'Free space there, or use another directory. Finished shards are kept.',
  )
