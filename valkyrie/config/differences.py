"""The differences between two sets of named values, a line each."""

from collections.abc import Callable, Mapping
from typing import Any

_NOTHING = object()


def differences(
  was: Mapping[str, Any],
  now: Mapping[str, Any],
  default_of: Callable[[str], Any] | None = None,
) -> list[str]:
  """A line for each name whose values differ; `default_of` gives the value where one has none.

  Values are as JSON has them: lists, not tuples.
  """
  lines = []
  for name in sorted(was.keys() | now.keys()):
    is_in_both = name in was and name in now
    default = _NOTHING
    if default_of is not None and not is_in_both:
      default = default_of(name)
    value_before = was.get(name, default)
    value_now = now.get(name, default)
    if value_before != value_now:
      text_before = _text(was, name)
      text_now = _text(now, name)
      lines.append(f'{name} was {text_before}, is {text_now}')
  return lines


def _text(values: Mapping[str, Any], name: str) -> str:
  if name not in values:
    return 'not set'
  return repr(values[name])
