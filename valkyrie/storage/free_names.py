"""Names beside those that are taken."""

from collections.abc import Callable
import itertools
from typing import Any


def free_name(name: str, is_taken: Callable[[str], Any], *, numbered: bool = False) -> str:
  """The first of NAME, NAME.1, NAME.2, ... that is not taken; with `numbered`, NAME.1 first."""
  if not numbered and not is_taken(name):
    return name
  names = (f'{name}.{number}' for number in itertools.count(1))
  return next(each for each in names if not is_taken(each))
