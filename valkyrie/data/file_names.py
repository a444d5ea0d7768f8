"""Names of files: their formats, compressions, and the patterns that select them."""

from collections.abc import Sequence
import os
import posixpath
import re

from valkyrie import foreign
from valkyrie.errors import ConfigurationError, with_home

# Suffixes of the formats that `records` reads, and of a compression around them.
# Tables beside texts are usually metadata, so a folder with both is read without its tables.
TABLES = ('.json', '.csv', '.tsv')
ARRAY = '.npy'  # of token ids
ROWS = ('.jsonl', '.ndjson', '.parquet', '.arrow', ARRAY, *TABLES)  # several documents in a file
FORMATS = ('.txt', '.md', '.jsonl', '.ndjson', '.parquet', '.arrow', *TABLES)
COMPRESSIONS = {'.gz': 'gzip', '.zst': 'zstd'}
_MAX_NAMED = 5


def absolute(location: str) -> str:
  """The absolute path of texts on a disk.

  Raises a ConfigurationError if it is empty, as a variable of a shell without a value is: it would
  be the current folder.
  """
  if not location:
    raise ConfigurationError(
      'The location of a text is empty. Name a file, a folder or a pattern: --gin.text=\'"PATH"\', '
      'TaskFeed.source, or --source of build_store.'
    )
  return os.path.abspath(with_home(location))


def format_of(path: str) -> str:
  """The suffix of a file's format in lower case, without the suffix of a compression."""
  return suffix(without_compression(path))


def without_compression(path: str) -> str:
  if suffix(path) not in COMPRESSIONS:
    return path
  stem, _ = posixpath.splitext(path)
  return stem


def without_formats(path: str) -> str:
  """A path without the suffixes of a compression and of a known format."""
  plain = without_compression(path)
  if suffix(plain) not in (*FORMATS, ARRAY):
    return plain
  stem, _ = posixpath.splitext(plain)
  return stem


def suffix(path: str) -> str:
  _, end = posixpath.splitext(path)
  return end.lower()


def some(names: Sequence[str]) -> str:
  """The first names for a message, and the number of the others."""
  first = ', '.join(names[:_MAX_NAMED])
  text = foreign.shown(first)
  if len(names) > _MAX_NAMED:
    more = len(names) - _MAX_NAMED
    text += f' and {more} more'
  return text


def regex(root: str, pattern: str) -> re.Pattern:
  """The paths below a root that a pattern matches: `**` any, `*` and `?` all but a slash."""
  parts = re.split(r'(\*\*/|\*\*|\*|\?|\[!?\]?[^]]*\])', posixpath.normpath(pattern))
  wildcards = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
  expressions = [re.escape(root)]
  for number, part in enumerate(parts):
    is_literal = number % 2 == 0
    if is_literal:
      expressions.append(re.escape(part))
    elif part in wildcards:
      expressions.append(wildcards[part])
    else:  # a class of characters, such as [a-z] or [!a-z]
      escaped = part.replace('\\', r'\\')
      expressions.append(escaped.replace('[!', '[^'))
  try:
    return re.compile(''.join(expressions))
  except re.error as error:  # such as [z-a]
    raise ValueError(f'its pattern {pattern!r} is wrong: {error}') from error


def is_readme(name: str) -> bool:
  """Whether a file describes others."""
  base = posixpath.basename(name)
  return base.lower().startswith('readme')
