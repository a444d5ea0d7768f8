"""Writer of token stores, shard by shard, so that a killed build can continue.

A shard is written to a temporary directory under a lock and renamed when it is complete; store.json
comes last. Several builders may work on one store at once: each shard is built by one of them.
"""

from collections.abc import Callable, Iterable
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any, NamedTuple
import uuid

import numpy as np

from valkyrie.data import token_store
from valkyrie.data.token_store import SHARD_FILE, STORE_FILE
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError, storage_errors

# A source of mostly empty documents is broken. A shard is judged after so many documents.
MAX_SKIPPED = 0.5
_JUDGED_AFTER = 1000


class Document(NamedTuple):
  """A tokenized document.

  tokens: int [tokens], without EOS.
  text_bytes: bytes of its text in UTF-8.
  sequence_key: equal for documents that belong together; None for a document on its own.
  prompt_tokens: number of leading tokens that are the prompt; the others are the answer.
  """

  tokens: np.ndarray
  text_bytes: int
  sequence_key: str | None = None
  prompt_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The origin of a store: shards of different recipes are never mixed."""

  task: str
  split: str
  vocabulary: Vocabulary
  source: dict[str, Any]
  shards: int

  def shard_name(self, shard: int) -> str:
    return f'shard-{shard:05d}-of-{self.shards:05d}'

  def information(self) -> dict[str, Any]:
    return {
      'format': token_store.FORMAT,
      'task': self.task,
      'split': self.split,
      'source': self.source,
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
  path: pathlib.Path, recipe: Recipe, shard: int, documents: Callable[[int], Iterable[Document]]
):
  """Writes the documents of shard number `shard`, unless it is complete already.

  Raises:
    DataError: a token is outside the vocabulary, or most documents are empty.
    ConfigurationError: the shard exists, but was built by another recipe.
    StorageError: the file system refused a write.
  """
  name = recipe.shard_name(shard)
  with _write_errors(path), _locked(path / f'.{name}.lock'):
    if (path / name).exists():
      _read_shard(path, recipe, shard)
      return
    temporary = path / f'.{name}.tmp'
    if temporary.exists():  # under the lock: its builder is dead
      shutil.rmtree(temporary)
    temporary.mkdir()
    counts = _write_arrays(temporary, recipe, shard, documents(shard))
    files = {
      file.name: {'bytes': file.stat().st_size, 'sha256': token_store.file_sha256(file)}
      for file in sorted(temporary.glob('*.npy'))
    }
    record = recipe.information() | {'name': name, 'files': files} | counts
    _write_json(temporary / SHARD_FILE, record)
    temporary.rename(path / name)


def finish(path: pathlib.Path, recipe: Recipe) -> dict[str, Any] | None:
  """Writes store.json and returns its content, or None while other shards are missing."""
  if not all((path / recipe.shard_name(i) / SHARD_FILE).exists() for i in range(recipe.shards)):
    return None
  shards = [_read_shard(path, recipe, i) for i in range(recipe.shards)]
  totals = ('documents', 'tokens', 'text_bytes', 'skipped_empty', 'skipped_one_token')
  information = recipe.information() | {key: sum(s[key] for s in shards) for key in totals}
  skipped = information['skipped_empty'] + information['skipped_one_token']
  _check_skipped(str(path), information['documents'], skipped)
  if not information['documents']:
    raise DataError(
      f'The split {recipe.split!r} of the task {recipe.task!r} has no documents. '
      'Use another split or source.'
    )
  kept = ('name', 'documents', 'tokens', 'files')
  information['shards'] = [{key: s[key] for key in kept} for s in shards]
  files = [s['files'] for s in shards]
  information['fingerprint'] = token_store.content_hash([information['vocabulary'], files])
  sealed = {**information, 'sha256': token_store.content_hash(information)}
  with _write_errors(path):
    temporary = path / f'.{STORE_FILE}.{uuid.uuid4().hex}.tmp'
    _write_json(temporary, sealed)
    temporary.replace(path / STORE_FILE)
    for lock in path.glob('.shard-*.lock'):
      lock.unlink(missing_ok=True)
  return information


def _write_arrays(
  directory: pathlib.Path, recipe: Recipe, shard: int, documents: Iterable[Document]
) -> dict[str, int]:
  """Writes the arrays of a shard and returns its counts."""
  size, eos_id = recipe.vocabulary.size, recipe.vocabulary.eos_id
  dtype = token_store.token_dtype(size)
  offsets, hashes, keys, prompts = [0], [], [], []
  text_bytes = skipped_empty = skipped_one_token = 0
  with (directory / token_store.TOKENS_FILE).open('wb') as stream:
    _write_header(stream, dtype, 0)
    for number, document in enumerate(documents):
      if len(document.tokens) < 2:
        skipped_empty += len(document.tokens) == 0
        skipped_one_token += len(document.tokens) == 1
        skipped = skipped_empty + skipped_one_token
        if number >= _JUDGED_AFTER:
          _check_skipped(f'shard {shard}', len(keys), skipped)
        continue
      if document.tokens.max() >= size or document.tokens.min() < 0:
        raise DataError(
          f'Document {number} of shard {shard} of {recipe.task} has token ids from '
          f'{document.tokens.min()} to {document.tokens.max()}, but the vocabulary '
          f'{recipe.vocabulary.fingerprint} has {size} ids, from 0. Remove the preprocessor of the '
          'task that changes ids after tokenizing, or use a larger vocabulary.'
        )
      content = np.append(document.tokens, eos_id).astype(dtype).tobytes()
      stream.write(content)
      offsets.append(offsets[-1] + len(document.tokens) + 1)
      hashes.append(hashlib.blake2b(content, digest_size=16).digest())
      keys.append(_key(document.sequence_key or f'\0{shard}/{number}'))
      prompts.append(document.prompt_tokens)
      text_bytes += document.text_bytes
    stream.seek(0)
    _write_header(stream, dtype, offsets[-1])
    _flush(stream)
  _save(directory / 'offsets.npy', np.array(offsets, np.int64))
  _save(directory / 'hashes.npy', np.frombuffer(b''.join(hashes), np.uint8).reshape(-1, 16))
  _save(directory / 'keys.npy', np.array(keys, np.uint64))
  if any(prompts):
    _save(directory / token_store.PROMPTS_FILE, np.array(prompts, np.int64))
  return {
    'documents': len(keys),
    'tokens': offsets[-1],
    'text_bytes': text_bytes,
    'skipped_empty': skipped_empty,
    'skipped_one_token': skipped_one_token,
  }


def _write_header(stream, dtype: np.dtype, length: int):
  """Writes a .npy header; numpy pads it, so that the final length overwrites the first one."""
  np.lib.format.write_array_header_1_0(
    stream, {'descr': dtype.str, 'fortran_order': False, 'shape': (length,)}
  )


def _save(file: pathlib.Path, array: np.ndarray):
  with file.open('wb') as stream:
    np.lib.format.write_array(stream, array, allow_pickle=False)
    _flush(stream)


def _key(sequence_key: str) -> int:
  digest = hashlib.blake2b(sequence_key.encode('utf-8', errors='replace'), digest_size=8).digest()
  return int.from_bytes(digest, 'little')


def _check_skipped(place: str, kept: int, skipped: int):
  if skipped > MAX_SKIPPED * (kept + skipped):
    raise DataError(
      f'{skipped} of {kept + skipped} documents in {place} are empty or have one token only, but '
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
    token_store.check_file(path / name / file, recorded, content=False)
  for key, expected in recipe.information().items():
    if record.get(key) != expected:
      raise ConfigurationError(
        f'{path / name} was built with another {key}: found {record.get(key)}, expected '
        f'{expected}. Use another output directory, or delete this store.'
      )
  return record


def _write_json(file: pathlib.Path, content: dict[str, Any]):
  with file.open('w') as stream:
    json.dump(content, stream, indent=1, sort_keys=True)
    _flush(stream)


def _flush(stream):
  stream.flush()
  os.fsync(stream.fileno())


@contextlib.contextmanager
def _locked(file: pathlib.Path):
  """Waits for other builders of this shard; the lock is released when its process dies."""
  file.parent.mkdir(parents=True, exist_ok=True)
  with file.open('w') as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    yield


def _write_errors(path: pathlib.Path):
  return storage_errors(
    f'The token store {path} cannot be written',
    'Free space there, or use another directory. Finished shards are kept.',
  )
