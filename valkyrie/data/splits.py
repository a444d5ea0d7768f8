"""Splits that the names of files tell, such as train-00000-of-00002.parquet beside test.jsonl.

The words are those of Hugging Face's `datasets`: train, training; validation, valid, val, dev;
test, testing, eval, evaluation. Words of a name are what stands between `-`, `.`, `_`, spaces and
digits, in any case, so that contest.txt and latest.jsonl have none. `datasets` takes such a word at
any place of a name. Folders of ordinary texts have names like libfoo-dev and testing.md, so here a
word is a split

  in a file of rows (JSON, CSV, .parquet, .arrow), if it is the last word of the name, or all of it;
  in a folder that holds files of rows, if it is the whole name;
  anywhere else, if the same name with train or training in its place is in the same folder.

A README.md with `configs` at its head (Hugging Face's dataset card) goes before names.
"""

from collections.abc import Collection, Mapping, Sequence
import fnmatch
import posixpath
import re
from typing import Any, NamedTuple

TRAIN, VALIDATION, TEST = 'train', 'validation', 'test'
_WORDS = {
  TRAIN: ('train', 'training'),
  VALIDATION: ('validation', 'valid', 'val', 'dev'),
  TEST: ('test', 'testing', 'eval', 'evaluation'),
}
_SPLIT_OF_WORD = {word: split for split, words in _WORDS.items() for word in words}
_STRICTEST = (TEST, VALIDATION, TRAIN)  # of several splits in one path
_SHARD = re.compile(r'\d+[-_]of[-_]\d+([-_][0-9a-f]{8,})?')  # with the hash of older uploads
_SEPARATORS = re.compile(r'[-._\s\d]+')
LARGEST_CARD = 2**20  # bytes
_HEAD = re.compile(r'---\s*\n(.*?\n)---\s*\n', re.DOTALL)


class Named(NamedTuple):
  """What the names of some files tell.

  splits: the split of each file whose name tells one.
  doubtful: files below or of a name that is nothing but a word of the validation or test split,
    but without a counterpart for training beside it, so that it counts as no split.
  """

  splits: dict[str, str]
  doubtful: list[str]


class Configuration(NamedTuple):
  """A configuration of a dataset card: its name, and (split, pattern of files) in their order.

  The split is empty where the card leaves it to the names of the files.
  """

  name: str
  patterns: list[tuple[str, str]]


def words_of(name: str) -> tuple[str, ...]:
  """The words of a name in lower case, without numbers of shards."""
  return tuple(filter(None, _SEPARATORS.split(_SHARD.sub('-', name.lower()))))


def named(stems: Mapping[str, str], rows: Collection[str]) -> Named:
  """The splits of files.

  stems: the path of each file below the source, without the suffixes of its format.
  rows: those of them that are files of rows.
  """
  siblings: dict[str, set[tuple[str, ...]]] = {}  # words of the names in each folder
  for stem in stems.values():
    *folders, _ = _paths_of(stem)
    for path in (*folders, stem):
      folder, name = posixpath.split(path)
      siblings.setdefault(folder, set()).add(words_of(name))
  splits: dict[str, str] = {}
  doubtful: list[str] = []
  for file, stem in stems.items():
    *folders, whole = _paths_of(stem)
    told: set[str] = set()
    may_tell = False
    for path in (*folders, whole):
      folder, name = posixpath.split(path)
      words = words_of(name)
      certain = _split_of(words, is_file=path == whole)
      if certain and (file in rows or certain == TRAIN):
        told.add(certain)
      else:
        told |= _beside_training(words, siblings[folder])
      may_tell |= len(words) == 1 and certain in (VALIDATION, TEST)
    if told:
      splits[file] = next(split for split in _STRICTEST if split in told)
    elif may_tell:
      doubtful.append(file)
  return Named(splits, doubtful)


def spelled(pattern: str) -> set[str]:
  """The splits whose words a pattern spells: its author knows them."""
  words = words_of(re.sub(r'[/*?\[\]!]', ' ', pattern))
  return {_SPLIT_OF_WORD[word] for word in words if word in _SPLIT_OF_WORD}


def configurations(card: str) -> list[Configuration]:
  """The configurations at the head of a dataset card; none if it has no such head."""
  head = _HEAD.match(card[:LARGEST_CARD].removeprefix('\ufeff').replace('\r\n', '\n'))
  if head is None or 'configs' not in head[1]:
    return []
  import yaml  # noqa: PLC0415  (only for such a card)

  try:
    found = yaml.safe_load(head[1])
  except (yaml.YAMLError, ValueError, RecursionError):
    return []  # a text that is no card
  entries = found.get('configs') if isinstance(found, dict) else None
  if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
    return []
  read = [_configuration(entry) for entry in entries]
  standard = [one for one, entry in zip(read, entries, strict=True) if entry.get('default') is True]
  return standard or [one for one in read if one.name == 'default'] or read


def of_configuration(configuration: Configuration, names: Collection[str]) -> dict[str, str]:
  """The split of each file that the patterns of a configuration name."""
  splits: dict[str, str] = {}
  for split, pattern in configuration.patterns:
    for name in names:
      if name not in splits and _is_selected(name, pattern):
        splits[name] = split
  return splits


def _paths_of(stem: str) -> list[str]:
  """The folders above a path, from the first on, and the path: a/b/c -> [a, a/b, a/b/c]."""
  parts = stem.split('/')
  return ['/'.join(parts[: count + 1]) for count in range(len(parts))]


def _split_of(words: Sequence[str], *, is_file: bool) -> str | None:
  """The split of a file of rows whose last word, or of a folder whose only word, names one."""
  if not words or (len(words) > 1 and not is_file):
    return None
  return _SPLIT_OF_WORD.get(words[-1])


def _beside_training(words: tuple[str, ...], siblings: Collection[tuple[str, ...]]) -> set[str]:
  """The splits of a name that a sibling has with a word for training in the place of theirs."""
  found = set()
  for place, word in enumerate(words):
    split = _SPLIT_OF_WORD.get(word)
    for other in _WORDS[TRAIN]:
      if split is not None and (*words[:place], other, *words[place + 1 :]) in siblings:
        found.add(split)
  return found


def _configuration(entry: Mapping[str, Any]) -> Configuration:
  base = str(entry.get('data_dir') or '')
  files = entry.get('data_files')
  patterns: list[tuple[str, str]] = []
  for one in files if isinstance(files, list) else [files]:
    split, paths = TRAIN, one
    if isinstance(one, dict):
      split, paths = str(one.get('split', TRAIN)), one.get('path')
    for path in paths if isinstance(paths, list) else [paths]:
      if isinstance(path, str):
        patterns.append((_card_split(split), posixpath.normpath(posixpath.join(base, path))))
  if files is None and base:
    patterns.append(('', posixpath.normpath(base)))
  return Configuration(str(entry.get('config_name', 'default')), patterns)


def _card_split(split: str) -> str:
  """The split to which one of a card belongs: any other than for training is not trained on."""
  told = {_SPLIT_OF_WORD[word] for word in words_of(split) if word in _SPLIT_OF_WORD}
  return next((known for known in _STRICTEST if known in told), split)


def _is_selected(name: str, pattern: str) -> bool:
  if fnmatch.fnmatchcase(name, pattern) or name.startswith(f'{pattern}/'):
    return True
  return pattern.startswith('**/') and fnmatch.fnmatchcase(name, pattern.removeprefix('**/'))
