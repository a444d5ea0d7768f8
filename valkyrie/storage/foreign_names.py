"""Checks of names from listings, indexes, manifests and JSON, before they become paths."""

import re
from typing import Any

from valkyrie.errors import StorageError, ValkyrieError

_LONGEST = 1024  # bytes of an object's name
_LONGEST_PART = 255  # bytes of a file's name
# A backslash separates folders on other systems. Surrogates are bytes that are not UTF-8.
_PART = r'(?!\.\.?(?:/|\Z))[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]+'
_NAME = re.compile(rf'{_PART}(?:/{_PART})*')


def is_below(name: Any) -> bool:
  """Whether a name, joined to any folder, is a path below that folder and the only one to its file.

  It is relative, without empty parts, `.` and `..`. Links in the folder are not examined.
  """
  if not isinstance(name, str) or not _NAME.fullmatch(name):
    return False
  if len(name.encode()) > _LONGEST:
    return False
  parts = name.split('/')
  return all(len(part.encode()) <= _LONGEST_PART for part in parts)


def checked(
  name: Any,
  named_by: Any,
  advice: str,
  error: type[ValkyrieError] = StorageError,
) -> str:
  """The name, if it `is_below` the folder to which the caller joins it; otherwise raises `error`.

  The message begins with `named_by`, the file or place of the name, and ends with `advice`.
  """
  if not is_below(name):
    raise error(f'{named_by} names {name!r:.200}, which is not a path below its folder. {advice}')
  return name
