"""Splits that the names of files tell, such as train-00000-of-00002.parquet beside test.jsonl.

Hugging Face's `datasets` has the same words: train, training; validation, valid, val, dev; test,
testing, eval, evaluation. The words of a name are separated by `-`, `.`, `_`, spaces and
digits; upper case does not matter. So contest.txt and latest.jsonl have no such word. `datasets`
takes such a word at any place of a name. Folders of ordinary texts have names like libfoo-dev and
testing.md, so here a word is a split

  in a file of rows (JSON, CSV, .parquet, .arrow), if it is the last word of the name, or all of it;
  in a folder that holds files of rows, if it is the whole name;
  anywhere else, if the same name with train or training in its place is in the same folder.

A README.md with `configs` at its head (Hugging Face's dataset card) takes precedence over names.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import fnmatch
import itertools
import posixpath
import re
from typing import Any, NamedTuple

TRAIN = 'train'
VALIDATION = 'validation'
TEST = 'test'
_WORDS = {
  TRAIN: ('train', 'training'),
  VALIDATION: ('validation', 'valid', 'val', 'dev'),
  TEST: ('test', 'testing', 'eval', 'evaluation'),
}
_SPLIT_OF_WORD = {word: split for split, words in _WORDS.items() for word in words}
_STRICTEST = (TEST, VALIDATION, TRAIN)  # the first one counts if a path names several
_SHARD = re.compile(r'\d+[-_]of[-_]\d+([-_][0-9a-f]{8,})?')  # with the hash of older uploads
_SEPARATORS = re.compile(r'[-._\s\d]+')
LARGEST_CARD = 2**20  # bytes
_HEAD = re.compile(r'---\s*\n(.*?\n)---\s*\n', re.DOTALL)


class Named(NamedTuple):
  """The splits that the names of some files tell.

  splits: the split of each file whose name tells one.
  doubtful: files without a split, although a name in their path has a word for validation or tests,
    and either no other word, or beside it a name without this word or with one for training.
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
  without_shard = _SHARD.sub('-', name.lower())
  words = _SEPARATORS.split(without_shard)
  return tuple(word for word in words if word)


def named(stems: Mapping[str, str], rows: Collection[str]) -> Named:
  """The splits of files.

  stems: the path of each file below the source, without the suffixes of its format.
  rows: the files that hold rows.
  """
  siblings = _words_by_folder(stems)
  with_training: set[str] = set()
  for folder, names in siblings.items():
    words_of_folder = itertools.chain.from_iterable(names)
    if _has_training(words_of_folder):
      with_training.add(folder)
  splits: dict[str, str] = {}
  doubtful: list[str] = []
  for file, stem in stems.items():
    told: set[str] = set()
    may_tell = False
    for path in _paths_of(stem):
      folder, name = posixpath.split(path)
      words = words_of(name)
      certain = _split_of(words, is_file=path == stem)
      names_rows = file in rows or certain == TRAIN
      if certain and names_rows:
        told.add(certain)
      else:
        told |= _with_counterpart(words, siblings[folder])
      is_beside_training = folder in with_training
      may_tell |= _may_tell(words, siblings[folder], is_beside_training)
    if told:
      splits[file] = _strictest(told)
    elif may_tell:
      doubtful.append(file)
  return Named(splits, doubtful)


def _words_by_folder(stems: Mapping[str, str]) -> dict[str, set[tuple[str, ...]]]:
  """The words of the names in each folder."""
  names_by_folder: dict[str, set[tuple[str, ...]]] = {}
  for stem in stems.values():
    for path in _paths_of(stem):
      folder, name = posixpath.split(path)
      names = names_by_folder.setdefault(folder, set())
      names.add(words_of(name))
  return names_by_folder


def spelled(pattern: str) -> set[str]:
  """The splits whose words a pattern spells: its author knows them."""
  literal = re.sub(r'[/*?\[\]!]', ' ', pattern)
  return _splits_in(literal)


def configurations(card: str) -> list[Configuration]:
  """The configurations at the head of a dataset card; none if it has no such head."""
  begin = card[:LARGEST_CARD].removeprefix('\ufeff')
  text = begin.replace('\r\n', '\n')
  head = _HEAD.match(text)
  if head is None or 'configs' not in head[1]:
    return []
  import yaml  # noqa: PLC0415  (only for such a card)

  try:
    content = yaml.safe_load(head[1])
  except (yaml.YAMLError, ValueError, RecursionError):
    return []  # the text is not a card
  if not isinstance(content, dict):
    return []
  entries = content.get('configs')
  if not isinstance(entries, list):
    return []
  are_entries = [isinstance(entry, dict) for entry in entries]
  if not all(are_entries):
    return []
  read = []
  marked = []  # as the default of the card
  named_default = []
  for entry in entries:
    configuration = _configuration(entry)
    read.append(configuration)
    if entry.get('default') is True:
      marked.append(configuration)
    if configuration.name == 'default':
      named_default.append(configuration)
  return marked or named_default or read


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
  folders = stem.split('/')
  paths = itertools.accumulate(folders, '{}/{}'.format)
  return list(paths)


def _splits_in(name: str) -> set[str]:
  """The splits of all words of a name."""
  words = _SPLIT_OF_WORD.keys() & words_of(name)
  return {_SPLIT_OF_WORD[word] for word in words}


def _strictest(told: Collection[str]) -> str:
  """The split that counts where a path or a card tells several."""
  for split in _STRICTEST:
    if split in told:
      return split
  raise ValueError(f'no split is in {told}')


def _split_of(words: Sequence[str], *, is_file: bool) -> str | None:
  """The split of a file of rows whose last word, or of a folder whose only word, names one."""
  if not words:
    return None
  if len(words) > 1 and not is_file:
    return None
  return _SPLIT_OF_WORD.get(words[-1])


def _with_counterpart(words: tuple[str, ...], siblings: Collection[tuple[str, ...]]) -> set[str]:
  """The splits of those words of a name that a sibling replaces by a word for training."""
  splits = set()
  for place, word in enumerate(words):
    split = _SPLIT_OF_WORD.get(word)
    if split is None:
      continue
    words_before = words[:place]
    words_after = words[place + 1 :]
    for training_word in _WORDS[TRAIN]:
      counterpart = (*words_before, training_word, *words_after)
      if counterpart in siblings:
        splits.add(split)
  return splits


def _has_training(words: Iterable[str]) -> bool:
  training_words = _WORDS[TRAIN]
  return any(word in training_words for word in words)


def _may_tell(
  words: tuple[str, ...],
  siblings: Collection[tuple[str, ...]],
  is_beside_training: bool,
) -> bool:
  """Whether a name may mean a split for validation or tests, though no counterpart shows it."""
  others = tuple(word for word in words if not _is_held_out(word))
  if others == words:
    return False
  return not others or others in siblings or is_beside_training


def _is_held_out(word: str) -> bool:
  split = _SPLIT_OF_WORD.get(word)
  return split in (VALIDATION, TEST)


def _configuration(entry: Mapping[str, Any]) -> Configuration:
  name = str(entry.get('config_name', 'default'))
  base = str(entry.get('data_dir') or '')
  data_files = entry.get('data_files')
  if data_files is None and base:
    return Configuration(name, [('', posixpath.normpath(base))])
  patterns: list[tuple[str, str]] = []
  for files in _as_list(data_files):
    split = TRAIN
    paths = files
    if isinstance(files, dict):
      split = str(files.get('split', TRAIN))
      paths = files.get('path')
    for path in _as_list(paths):
      if isinstance(path, str):
        pattern = posixpath.normpath(posixpath.join(base, path))
        told = _card_split(split)
        patterns.append((told, pattern))
  return Configuration(name, patterns)


def _as_list(value: Any) -> list[Any]:
  if isinstance(value, list):
    return value
  return [value]


def _card_split(split: str) -> str:
  """The known split that a card's name of a split means; another name stays as it is.

  Only the split TRAIN is trained on.
  """
  told = _splits_in(split)
  if not told:
    return split
  return _strictest(told)


def _is_selected(name: str, pattern: str) -> bool:
  is_inside = name.startswith(f'{pattern}/')
  if is_inside or fnmatch.fnmatchcase(name, pattern):
    return True
  if not pattern.startswith('**/'):
    return False
  pattern_of_name = pattern.removeprefix('**/')
  return fnmatch.fnmatchcase(name, pattern_of_name)
