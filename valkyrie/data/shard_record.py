"""The records of shards, by which a folder is known as a shard that this program has made.

    store/shard-00000-of-00008/shard.json      {"format": ..., "name": "shard-00000-of-00008",
                                                "task": ..., "files": {"tokens.npy": ...}, ...}

A copy or a renamed folder has another name than its record, and is somebody else's.
"""

from collections.abc import Collection, Mapping
import pathlib
from typing import Any

from valkyrie import foreign
from valkyrie.data import token_store
from valkyrie.data.token_store import SHARD_FILE

_SELECTION = ('task', 'split', 'unique', 'vocabulary')


def read_record(folder: pathlib.Path) -> dict[str, Any]:
  """The record in the folder of a shard; {} if the folder is something else."""
  if folder.is_symlink():
    return {}
  try:
    text = foreign.content(folder / SHARD_FILE)
    record = foreign.json_object(text, format=str, name=str, files=dict)
  except (OSError, ValueError):
    return {}
  is_store = record['format'].startswith(token_store.FORMATS)
  if not is_store or record['name'] != folder.name:
    return {}
  return record


def files(record: Mapping[str, Any]) -> list[str]:
  """The files of a shard, the record last; [] if the record is {}."""
  if not record:
    return []
  return [*record['files'], SHARD_FILE]


def is_like(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
  """Whether two shards are of one task, split and vocabulary, perhaps of different sources."""
  if not record:
    return False
  return all(record.get(key) == other[key] for key in _SELECTION)


def all_in(store: pathlib.Path) -> dict[pathlib.Path, dict[str, Any]]:
  """{folder: record} of the shards in the folder of a store."""
  records = {}
  for folder in store.iterdir():
    record = read_record(folder)
    if record:
      records[folder] = record
  return records


def others_in(
  store: pathlib.Path,
  like: Mapping[str, Any],
  kept: Collection[pathlib.Path],
) -> dict[pathlib.Path, list[str]]:
  """{folder: files} of the shards in the folder of a store that are `like` one, but not `kept`."""
  others = {}
  for folder, record in all_in(store).items():
    if is_like(record, like) and folder not in kept:
      others[folder] = files(record)
  return others
