"""Writer of token stores, shard by shard, so that a killed build can continue.

A shard is written to a temporary directory under a lock and renamed when it is complete; store.json
comes last. Several builders may work on one store at once, each on other shards.

A store that replaces a finished one is written beside it, in shards of other names. It becomes the
store when store.json is replaced; then the files that the old shards record are deleted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import json
import logging
import os
import pathlib
from typing import Any

import numpy as np

from valkyrie import errors, foreign
from valkyrie.data import (
  few_documents,
  shard_arrays,
  shard_record,
  store_arrays,
  store_fields,
  token_store,
)
from valkyrie.data.selection import Selection
from valkyrie.data.shard_arrays import Document, Report
from valkyrie.data.token_store import SHARD_FILE, STORE_FILE
from valkyrie.errors import ConfigurationError, DataError, converted
from valkyrie.storage import file_lock, foreign_names, owned, whole_file


@dataclasses.dataclass(frozen=True)
class StoreWriter:
  """Writes a store into the directory `path`, in a number of shards.

  source: the origin of the documents. Shards of different selections and origins are never mixed:
    the methods raise a ConfigurationError for a shard of another one.
  renew: build such shards of an unfinished store again, and damaged ones, instead of an error.
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
    names = [f'shard-{shard:05d}-{end}' for shard in range(self.shards)]
    return [self.path / name for name in names]

  def write(self, documents: Callable[[int], Iterable[Document]]) -> dict[str, Any]:
    """Writes the documents of every missing shard, then store.json; returns its content."""
    for shard in range(self.shards):
      documents_of_shard = documents(shard)
      self.write_shard(shard, documents_of_shard)
    information = self.finish()
    assert information is not None, 'every shard was just written'
    return information

  def write_shard(
    self,
    shard: int,
    documents: Iterable[Document],
    report: Report = lambda documents, tokens: None,
  ) -> None:
    """Writes a shard, unless it is complete already.

    `report` gets the numbers of documents and tokens that were written since its last call, which
    are 0 while another process writes this shard.

    Raises:
      DataError: a token is outside the vocabulary, or most documents are empty.
      StorageError: the file system refused a write.
    """
    folder = self.folders[shard]
    lock = lock_of(folder)
    turn = file_lock.held(lock, f'build {folder}', lambda: report(0, 0))
    with write_errors(self.path), turn:
      replaces = None
      if os.path.lexists(folder):
        try:
          self._read_shard(folder)
          return
        except (ConfigurationError, DataError):
          record = shard_record.read_record(folder)
          is_like = shard_record.is_like(record, self._information())
          is_other = bool(record) and not is_like
          if is_other or not self.renew:
            raise
          logging.warning('Building %s again: it is damaged, or its source has changed', folder)
          replaces = shard_record.files(record)
      try:
        with owned.new_folder(folder, replaces=replaces) as temporary:
          counts = shard_arrays.write(temporary, self.selection, shard, documents, report)
          arrays = sorted(temporary.glob('*.npy'))
          record = self._information() | counts
          record['name'] = folder.name
          record['files'] = {file.name: _recorded(file) for file in arrays}
          record['sha256'] = token_store.content_hash(record)
          file = temporary / SHARD_FILE
          whole_file.write(file, _json(record))
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
    records = [folder / SHARD_FILE for folder in folders]
    if not all(record.exists() for record in records):
      return None
    shards = [self._read_shard(folder) for folder in folders]
    information = self._information()
    for name in shard_arrays.COUNTS:
      counts = [shard[name] for shard in shards]
      information[name] = sum(counts)
    shard_arrays.check_skipped(str(self.path), information)
    if not information['documents']:
      raise DataError(
        f'The split {self.selection.split!r} of the task {self.selection.task!r} has no documents. '
        f'Use another split or source, or {few_documents.more_documents(self.selection)}.'
      )
    superseded = {}
    if self.renew:
      superseded = shard_record.others_in(self.path, information, folders)
    superseded_file = None
    if self.generation:
      superseded_file = self._superseded_duplicates()
    information['shards'] = [_entry(shard) for shard in shards]
    information['origin'] = origin
    with write_errors(self.path):
      lengths = _lengths(folders, shards)
      content: list[Any] = [shard['files'] for shard in shards]
      if self.selection.unique:
        hashes = _hashes(folders, shards)
        stays = _first_of_equals(hashes)
        lengths = lengths[stays]
        numbers = np.flatnonzero(~stays)
        duplicates, file = self._write_duplicates(numbers)
        content.append(duplicates)
        information['duplicates'] = duplicates
        if self.generation:
          information['duplicates'] = duplicates | {'name': file.name}
      codec_and_content = [information['vocabulary'], content]
      information['fingerprint'] = token_store.content_hash(codec_and_content)
      information['lengths'] = _histogram(lengths)
      digest = token_store.content_hash(information)
      whole = information | {'sha256': digest}
      store_file = self.path / STORE_FILE
      whole_file.write(store_file, _json(whole))
      self._delete_what_is_not_needed(superseded)
      if superseded_file is not None:
        owned.delete_file(superseded_file)
    token_store.warn_of_ratio(self.path, information)
    return information

  def _write_duplicates(self, numbers: np.ndarray) -> tuple[dict[str, Any], pathlib.Path]:
    """Writes the numbers of the documents that are left out; returns its entry and the file."""
    file = self.path / f'duplicates{self.generation}.npy'
    with owned.new_file(file) as stream:
      np.save(stream, numbers)
    entry = {'documents': len(numbers)} | _recorded(file)
    return entry, file

  def _delete_what_is_not_needed(self, superseded: Mapping[pathlib.Path, list[str]]) -> None:
    """Deletes locks, the record of the source, and the files of superseded shards."""
    source = source_file(self.path, self.generation)
    for folder in self.folders:
      owned.delete_file(lock_of(folder))
    owned.delete_file(lock_of(source))
    owned.delete_file(source)
    for folder, names in superseded.items():
      remaining = owned.delete_recorded(folder, names)
      owned.tell_what_stays(folder, remaining)

  def _superseded_duplicates(self) -> pathlib.Path | None:
    """The array of the store that this one replaces, if it has one."""
    try:
      information = token_store.read_information(self.path)
    except DataError:  # there is no such store, or its record is damaged
      return None
    if not information.get('duplicates'):
      return None
    name = token_store.duplicates_name(information['duplicates'])
    return self.path / name

  def _information(self) -> dict[str, Any]:
    """The fields that all shards and store.json share."""
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

  def _read_shard(self, folder: pathlib.Path) -> dict[str, Any]:
    """Reads shard.json of a finished shard, which must be complete, and of this store."""
    file = folder / SHARD_FILE
    kinds = dict.fromkeys(shard_arrays.COUNTS, int)
    message = f'{folder} has no readable {SHARD_FILE}'
    with converted((OSError, ValueError), DataError, message, token_store.REBUILD):
      content = foreign.content(file)
      record = foreign.json_object(content, files=dict, **kinds)
      counts = {name: record[name] for name in shard_arrays.COUNTS}
      store_fields.check_counts(counts)
      store_fields.check_files(record['files'])
    # Versions before 0.3 wrote no digest.
    has_digest = 'sha256' in record
    digest = record.pop('sha256', None)
    if has_digest and digest != token_store.content_hash(record):
      raise DataError(
        f'{file} is corrupt: its content does not match its SHA-256. {token_store.REBUILD}'
      )
    for name, recorded in record['files'].items():
      foreign_names.checked(name, file, token_store.REBUILD, DataError)
      store_arrays.check_file(folder / name, recorded, content=False)
    information = self._information()
    information['name'] = folder.name
    for field, expected in information.items():
      if record.get(field) != expected:
        found, wanted = differences(record.get(field), expected)
        advice = 'Use another --output.'
        if shard_record.is_like(record, information):
          advice = 'To build such shards again, run the same command with --renew.'
        raise ConfigurationError(
          f'{folder} was built with another {field}: found {found}, expected {wanted}. {advice}'
        )
    _lengths([folder], [record])  # its counts are of its arrays
    return record


def source_file(store: pathlib.Path, generation: str = '') -> pathlib.Path:
  """The record of the files of the source of an unfinished store, see `provenance.Origin`."""
  return store / f'.source{generation}.jsonl'


def lock_of(place: pathlib.Path) -> pathlib.Path:
  """The file that the builder of a shard, or of the record of the source, locks."""
  name = place.name.lstrip('.')
  return place.with_name(f'.{name}.lock')


def _entry(shard: Mapping[str, Any]) -> dict[str, Any]:
  """The entry of a shard in store.json."""
  return {name: shard[name] for name in ('name', 'documents', 'tokens', 'files')}


def _lengths(folders: Sequence[pathlib.Path], shards: Sequence[Mapping[str, Any]]) -> np.ndarray:
  """The tokens of each document of finished shards, int64 [documents]."""
  lengths = []
  for folder, shard in zip(folders, shards, strict=True):
    file = folder / token_store.OFFSETS_FILE
    shape = (shard['documents'] + 1,)
    offsets = store_arrays.load(file, np.int64, shape)
    store_fields.check_offsets(file, offsets, shard['tokens'])
    lengths.append(np.diff(offsets))
  return np.concatenate(lengths)


def _hashes(folders: Sequence[pathlib.Path], shards: Sequence[Mapping[str, Any]]) -> np.ndarray:
  """The hashes of the documents of finished shards, uint8 [documents, 16]."""
  hashes = []
  for folder, shard in zip(folders, shards, strict=True):
    file = folder / token_store.HASHES_FILE
    shape = (shard['documents'], 16)
    hashes.append(store_arrays.load(file, np.uint8, shape))
  return np.concatenate(hashes)


def differences(found: Any, expected: Any) -> tuple[str, str]:
  """Two values as texts; of dicts only the different entries: an origin may name many files."""
  if isinstance(found, dict) and isinstance(expected, dict):
    different_found = {}
    different_expected = {}
    for name in found | expected:
      value = found.get(name)
      expected_value = expected.get(name)
      if value != expected_value:
        different_found[name] = value
        different_expected[name] = expected_value
    found = different_found
    expected = different_expected
  return foreign.shown(found), foreign.shown(expected)


def _first_of_equals(hashes: np.ndarray) -> np.ndarray:
  """Whether each document is the first with its hash: uint8 [documents, 16] -> bool [documents]."""
  pairs = hashes.view(np.uint64)
  first_halves = pairs[:, 0]
  second_halves = pairs[:, 1]
  order = np.lexsort((second_halves, first_halves))  # stable: equals stay in their order
  ordered = pairs[order]
  later = ordered[1:]
  earlier = ordered[:-1]
  differs = later != earlier
  is_first = np.ones(len(pairs), bool)
  later_places = order[1:]
  is_first[later_places] = differs.any(axis=1)
  return is_first


def _histogram(lengths: np.ndarray) -> dict[str, int]:
  """{2^k: number of documents with 2^k to 2^(k+1) - 1 tokens}."""
  powers_of_lengths = np.log2(lengths).astype(int)
  powers, counts = np.unique(powers_of_lengths, return_counts=True)
  histogram = {}
  for power, count in zip(powers.tolist(), counts.tolist(), strict=True):
    histogram[str(2**power)] = count
  return histogram


def _json(content: dict[str, Any]) -> str:
  return json.dumps(content, indent=1, sort_keys=True)


def _recorded(file: pathlib.Path) -> dict[str, Any]:
  """The entry of an array in shard.json or store.json."""
  size = file.stat().st_size
  return {'bytes': size, 'sha256': store_arrays.file_sha256(file)}


def write_errors(path: pathlib.Path):
  """Converts an OSError inside the block to a StorageError."""
  return errors.write_errors(
    f'The token store {path} cannot be written',
    'use another directory',
    'Finished shards are kept.',
  )
