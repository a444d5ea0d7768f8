"""The numbers and texts of hooks, checked before they are logged: hooks are code of others."""

from collections.abc import Mapping
import math
import re
from typing import Any

import chex

_LONGEST_NAME = 200  # characters
_LONGEST_TEXT = 100_000
_MOST_NAMES = 1000  # of one call
_NOT_OF_A_NAME = re.compile('[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
_HALVES = re.compile('[\ud800-\udfff]')


def read_values(found: Any) -> tuple[dict[str, float | str], list[str]]:
  """({name: number or text} to log, what else was returned, for a line).

  Half characters become U+FFFD, and in names control characters, too. Texts are cut at 100,000
  characters and names at 200.
  """
  if not isinstance(found, Mapping):
    return {}, [f'{_shown(found)}, expected numbers and texts by their names, or None']
  noted: dict[str, float | str] = {}
  refused = []
  for name, value in found.items():
    logged = _logged(value)
    if logged is None:
      refused.append(f'{_shown(name)} = {_shown(value)}, expected a number or a text: not logged')
    elif len(noted) == _MOST_NAMES:
      refused.append(f'more than {_MOST_NAMES:,} names: the others are not logged')
      break
    else:
      printable = _NOT_OF_A_NAME.sub('\ufffd', str(name))
      short_name = printable[:_LONGEST_NAME]
      noted[short_name] = logged
  return noted, refused


def _logged(value: Any) -> float | str | None:
  """The number or text to log; None for other values."""
  if isinstance(value, str):
    text = _HALVES.sub('\ufffd', value)
    more = len(text) - _LONGEST_TEXT
    if more > 0:
      text = f'{text[:_LONGEST_TEXT]} ... ({more:,} more characters)'
    return text
  if isinstance(value, bytes | bytearray):  # float would read digits
    return None
  try:
    chex.assert_size([value], 1)
    return float(value)
  except OverflowError:  # an integer beyond the floats
    return math.inf if value > 0 else -math.inf
  except (AssertionError, TypeError, ValueError):
    return None


def _shown(value: Any) -> str:
  text = ascii(value)
  if len(text) > 60:
    text = f'{text[:60]}...'
  return text
