"""The nearest known name, for messages about an unknown one."""

from collections.abc import Iterable
import difflib


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """' Did you mean X?' with the nearest of `known`, whatever its case; '' where none is near."""
  by_lower_case = {candidate.lower(): candidate for candidate in sorted(known)}
  nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
  return f' Did you mean {by_lower_case[nearest[0]]}?' if nearest else ''
