"""Suggestions of similar names, for messages about unknown names."""

from collections.abc import Iterable
import difflib


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """' Did you mean X?' with the most similar name, ignoring case; '' if none is similar."""
  by_lower_case = {candidate.lower(): candidate for candidate in sorted(known)}
  nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
  return f' Did you mean {by_lower_case[nearest[0]]}?' if nearest else ''
