"""JSON and lines that people, other programs or networks wrote, read within limits.

A ValueError, or an OSError of a file, says why one is refused; the reader names the file.
"""

from collections.abc import Iterator
import errno
import json
import os
import pathlib
import re
import stat
from typing import Any

LARGEST_FILE = 2**30  # bytes
LONGEST_LINE = 2**29  # bytes: several copies of a line are in memory at once
DEEPEST = 100  # brackets inside one another
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}]', re.DOTALL)


def content(file: pathlib.Path) -> bytes:
  """The bytes of a regular file of at most LARGEST_FILE; others could be endless."""
  found = os.stat(file)
  if not stat.S_ISREG(found.st_mode):
    raise OSError(errno.EINVAL, 'it is not a regular file', str(file))
  if found.st_size > LARGEST_FILE:
    raise ValueError(f'it has {found.st_size:,} bytes, expected at most {LARGEST_FILE:,}')
  return file.read_bytes()


def lines(stream: Any, longest: int = LONGEST_LINE) -> Iterator[Any]:
  """The lines of a stream, with their ends, each of at most so many bytes (or characters)."""
  while line := stream.readline(longest + 1):
    if len(line) > longest:
      raise ValueError(f'a line begins with {line[:40]!r} and has more than {longest:,} bytes')
    yield line


def json_value(text: bytes) -> Any:
  """The value of a JSON text in which at most DEEPEST brackets are inside one another."""
  depth, some = 0, text.count(b'[') + text.count(b'{') > DEEPEST
  for mark in _STRING_OR_BRACKET.finditer(text) if some else ():
    depth += (mark[0] in b'[{') - (mark[0] in b']}')
    if depth > DEEPEST:
      raise ValueError(f'it has more than {DEEPEST} brackets inside one another')
  try:
    return json.loads(text)
  except (RecursionError, MemoryError) as error:
    raise ValueError(f'it is too large ({type(error).__name__})') from None


def json_object(text: bytes, **kinds: Any) -> dict[str, Any]:
  """The JSON object in a text, whose fields of these names have these types."""
  found = json_value(text)
  if not isinstance(found, dict):
    raise ValueError(f'it has {found!r:.40}, but a JSON object was expected')
  for name, kind in kinds.items():
    if not isinstance(found.get(name), kind):
      raise ValueError(f'its field {name!r} has {found.get(name)!r:.40}')
  return found
