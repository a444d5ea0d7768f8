"""Checks of a token store's records and arrays, which anyone can write with hashes that fit.

A ValueError says which part of a record is wrong, a DataError names the file of an array.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from valkyrie import foreign
from valkyrie.data.store_arrays import REBUILD
from valkyrie.errors import DataError

_MOST = 2**62  # documents, tokens or bytes


def check(information: Mapping[str, Any]) -> None:
  """Raises a ValueError if a store.json lacks a field, or has one of another type or size."""
  foreign.fields(
    information,
    documents=int,
    tokens=int,
    text_bytes=int,
    skipped_empty=int | None,
    skipped_one_token=int | None,
    task=str,
    split=str,
    fingerprint=str,
    source=dict,
    vocabulary=dict,
    shards=list,
    lengths=dict | None,
    origin=dict | None,
  )
  vocabulary = information['vocabulary']
  foreign.fields(vocabulary, fingerprint=str, size=int, eos_id=int)
  for shard in information['shards']:
    foreign.fields(shard, name=str, documents=int, tokens=int, files=dict)
    check_files(shard['files'])
  if 'duplicates' in information:
    duplicates = information['duplicates']
    foreign.fields(duplicates, bytes=int, sha256=str, documents=int, name=str | None)
  _check_sums(information)
  is_without_text = information['text_bytes'] < 1
  is_without_tokens = vocabulary['size'] < 1
  if is_without_text or is_without_tokens:
    raise ValueError('its text or its vocabulary is empty')
  for least_length, count in lengths_of(information):
    is_counted = type(count) is int
    if not least_length.isdecimal() or not is_counted:
      lengths = information['lengths']
      raise ValueError(f'its field lengths has {lengths!r:.80}')
  origin = information.get('origin')
  if origin is not None:
    _check_origin(origin)


def _check_sums(information: Mapping[str, Any]) -> None:
  """Raises a ValueError unless the documents and tokens of the shards add up to those of all."""
  for name in ('documents', 'tokens'):
    counts = [shard[name] for shard in information['shards']]
    total = information[name]
    is_sum = total == sum(counts)
    is_negative = any(count < 0 for count in counts)
    if total == 0 or not is_sum or is_negative:
      raise ValueError(f'its shards have {counts!r:.80} {name}, and it has {total}')


def check_counts(counts: Mapping[str, int]) -> None:
  """Raises a ValueError unless each count is one that an array of int64 can have."""
  for name, count in counts.items():
    if not 0 <= count <= _MOST:
      raise ValueError(f'its field {name!r} has {count!r:.40}, expected from 0 to {_MOST}')


def check_files(files: Mapping[str, Any]) -> None:
  """Raises a ValueError unless each file has its size and hash."""
  for recorded in files.values():
    foreign.fields(recorded, bytes=int, sha256=str)


def lengths_of(information: Mapping[str, Any]) -> list[tuple[str, Any]]:
  """The numbers of documents by their least length, as store.json has them."""
  lengths = information.get('lengths') or {}
  return list(lengths.items())


def _check_origin(origin: Mapping[str, Any]) -> None:
  foreign.fields(origin, location=str | list, formats=list, files=list)
  texts = list(origin['formats'])
  location = origin['location']
  if isinstance(location, list):
    texts += location or [None]
  are_texts = [isinstance(text, str) for text in texts]
  if not all(are_texts):
    raise ValueError(f'its origin has {texts!r:.80}')
  for entry in origin['files']:
    check_entry(entry, inode=False)


def check_entry(entry: Any, *, inode: bool) -> None:
  """Raises a ValueError unless an entry describes a file: [name, size, time, hash].

  With `inode`, the entry also has the time of the file's inode.
  """
  kinds: list[Any] = [str, int, int, str | None]
  if inode:
    kinds.append(int)
  is_complete = isinstance(entry, list) and len(entry) == len(kinds)
  if not is_complete or not all(map(isinstance, entry, kinds)):
    raise ValueError(f'it has {entry!r:.80} where a file was expected')


def check_offsets(file: pathlib.Path, offsets: np.ndarray, tokens: int) -> None:
  """Checks the starts of documents, int64 [documents + 1]: each document has at least one."""
  lengths = np.diff(offsets)
  is_empty = lengths < 1
  covers_all = offsets[0] == 0 and offsets[-1] == tokens
  if not covers_all or is_empty.any():
    raise _corrupt(file, f'they are not the starts of documents of {tokens} tokens')


def check_places(file: pathlib.Path, places: np.ndarray, most: np.ndarray | int) -> None:
  """Checks prompts, int64: each is from 0 to `most`."""
  is_negative = places < 0
  is_beyond = places > most
  if is_negative.any() or is_beyond.any():
    raise _corrupt(file, 'they are not within the documents')


def check_turns(file: pathlib.Path, turns: np.ndarray, tokens: int) -> None:
  """Checks begins and ends of later prompts, int64 [2 * prompts], which increase."""
  check_places(file, turns, tokens)
  descends = np.diff(turns) < 0
  is_odd = len(turns) % 2 == 1
  if is_odd or descends.any():
    raise _corrupt(file, 'they are not begins and ends in turns')


def check_duplicates(file: pathlib.Path, numbers: np.ndarray, documents: int) -> None:
  """Checks the numbers of documents that are left out, int64, which increase and are not all."""
  check_places(file, numbers, documents - 1)
  is_repeated = np.diff(numbers) < 1
  are_all = len(numbers) >= documents
  if are_all or is_repeated.any():
    raise _corrupt(file, f'they are not some of {documents} documents')


def _corrupt(file: pathlib.Path, reason: str) -> DataError:
  return DataError(f'{file} is corrupt: its numbers are wrong, since {reason}. {REBUILD}')
