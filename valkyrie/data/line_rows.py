"""Rows of JSON, CSV and TSV. What names a value twice is refused: only the last would be read."""

from collections.abc import Callable, Iterator, Sequence
import csv
import io
import itertools
import re
from typing import Any

from valkyrie import foreign
from valkyrie.errors import DataError

REPAIR = 'Mend the file, fetch it again, or leave it out of the source.'
_JSON = re.compile(rb'\s*(\[\s*)?\{')
_LONGEST_VALUE = 2**31  # bytes of a file that is one JSON value


def separated(
  lines: Any,
  separator: str,
  path: str,
  check: Callable[[Sequence[str], str], Any],
) -> Iterator[tuple[str, dict[str, str]]]:
  """(place, row) of each row; `check` gets the names of the columns, and their place."""
  csv.field_size_limit(foreign.LONGEST_LINE)
  text = io.TextIOWrapper(lines, 'utf-8-sig', newline='')
  bounded_lines = foreign.lines(text, foreign.LONGEST_LINE)
  rows = csv.reader(bounded_lines, delimiter=separator, strict=True)
  try:
    names = next(rows, [])
    if names:
      check(names, f'The first line of {path}')
    for row in filter(None, rows):
      place = f'The row that ends on line {rows.line_num} of {path}'
      if len(row) != len(names):
        raise DataError(
          f'{place} has {len(row)} fields, but the first line names {len(names)} columns. {REPAIR}'
        )
      fields = zip(names, row, strict=True)
      yield place, dict(fields)
  except csv.Error as error:
    raise DataError(
      f'Line {rows.line_num} of {path} is wrong ({foreign.reason(error)}). {REPAIR}'
    ) from error


def json_values(lines: Any, path: str, *, may_be_one: bool) -> Iterator[tuple[str, Any]]:
  """(place, bytes) of each line, or (place, value) of each member of a file that is one value."""
  longest = foreign.LONGEST_LINE
  if may_be_one:
    longest = _LONGEST_VALUE
  each = foreign.lines(lines, longest)
  begin = [next(each, b'')]
  while may_be_one and begin[-1].isspace():
    blank_or_first = next(each, b'')
    begin.append(blank_or_first)
  first = begin[-1]
  if may_be_one and not _is_value(first, dict):
    content = b''.join([*begin, *each])
    members = parsed(content, path)
    if not isinstance(members, list):
      members = [members]
    for number, member in enumerate(members, 1):
      yield f'Member {number} of {path}', member
    return
  all_lines = itertools.chain(begin, each)
  for number, line in enumerate(all_lines, 1):
    yield f'Line {number} of {path}', line


def is_json(content: bytes) -> bool:
  """Whether a text is JSON: an object, a list of objects, or an object a line."""
  if not _JSON.match(content):
    return False
  first, _, _ = content.partition(b'\n')
  return _is_value(first) or _is_value(content)


def _is_value(content: bytes, kind: Any = object) -> bool:
  """Whether a text is a JSON value of a kind, if only with a field twice."""
  try:
    return isinstance(foreign.json_value(content), kind)
  except foreign.RepeatedField:
    return True
  except ValueError:
    return False


def parsed(content: bytes, place: str) -> Any:
  """The value of a JSON text; raises a DataError that names the place."""
  try:
    return foreign.json_value(content)
  except foreign.RepeatedField as error:
    raise DataError(f'{place} says two things: {error}. Remove or rename one of them.') from error
  except ValueError as error:
    begin = content.rstrip()[:40]
    raise DataError(f'{place} is not JSON ({error}): it begins with {begin!r}. {REPAIR}') from error
