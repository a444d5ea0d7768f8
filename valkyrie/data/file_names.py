"""Names of files: their formats, compressions, and the patterns that select them."""

from collections.abc import Sequence
import posixpath
import re

from valkyrie import foreign

# Suffixes of the formats that `records` reads, and of a compression around them.
# A folder with files of other formats is read without its TABLES, which may describe those.
TABLES = ('.json', '.csv', '.tsv')
ROWS = ('.jsonl', '.ndjson', '.parquet', '.arrow', *TABLES)  # several documents in a file
FORMATS = ('.txt', '.md', '.jsonl', '.ndjson', '.parquet', '.arrow', *TABLES)
COMPRESSIONS = {'.gz': 'gzip', '.zst': 'zstd'}
_MAX_NAMED = 5


def format_of(path: str) -> str:
  """The suffix of a file's format in lower case, without the suffix of a compression."""
  return suffix(without_compression(path))


def without_compression(path: str) -> str:
  return posixpath.splitext(path)[0] if suffix(path) in COMPRESSIONS else path


def without_formats(path: str) -> str:
  """A path without the suffixes of a compression and of a known format."""
  plain = without_compression(path)
  return posixpath.splitext(plain)[0] if suffix(plain) in FORMATS else plain


def suffix(path: str) -> str:
  return posixpath.splitext(path)[1].lower()


def some(names: Sequence[str]) -> str:
  """The first names for a message, and the number of the others."""
  more = f' and {len(names) - _MAX_NAMED} more' if len(names) > _MAX_NAMED else ''
  return foreign.shown(', '.join(names[:_MAX_NAMED])) + more


def regex(root: str, pattern: str) -> re.Pattern:
  """The paths below a root that a pattern matches: `**` any, `*` and `?` all but a slash."""
  parts = re.split(r'(\*\*/|\*\*|\*|\?|\[!?\]?[^]]*\])', posixpath.normpath(pattern))
  known = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
  for number, part in enumerate(parts):
    of_class = part.replace('\\', r'\\').replace('[!', '[^')
    parts[number] = known.get(part, of_class) if number % 2 else re.escape(part)
  try:
    return re.compile(re.escape(root) + ''.join(parts))
  except re.error as error:  # such as [z-a]
    raise ValueError(f'its pattern {pattern!r} is wrong: {error}') from error


def is_readme(name: str) -> bool:
  """Whether a file describes others."""
  return posixpath.basename(name).lower().startswith('readme')
