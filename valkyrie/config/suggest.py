"""Suggestions in messages: similar names, and corrected gin statements."""

from collections.abc import Callable, Iterable
import contextlib
import difflib
import io
import json
import re
import tokenize


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """' Did you mean X?' with the most similar name, ignoring case; '' if none is similar."""
  by_lower_case = {candidate.lower(): candidate for candidate in sorted(known)}
  nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
  return f' Did you mean {by_lower_case[nearest[0]]}?' if nearest else ''


def unclosed(text: str) -> tuple[int, str] | None:
  """(the line, the bracket) of a bracket that is still open at the next statement or at the end.

  A statement is known by its =, which no value has outside of strings.
  """
  opened: list[tuple[int, str]] = []
  with contextlib.suppress(tokenize.TokenError, SyntaxError):
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
      if token.string in ('(', '[', '{'):
        opened.append((token.start[0], token.string))
      elif token.string in (')', ']', '}') and opened:
        opened.pop()
      elif token.string == '=' and opened:
        break
  return opened[-1] if opened else None


def explain(error: SyntaxError, value: str | None, statement: Callable[[str], str]) -> str:
  """The error of a statement whose text after '=' is `value`; None stands for a line without '='.

  `statement` returns the text of the statement with a corrected value.
  """
  if value is not None:
    value = value.split('#')[0].strip()
    right = _CONSTANTS.get(value.lower()) or _arithmetic(value)
    if not value:
      return 'the value is missing'
    if right:
      return f'{value} is not gin syntax. Write {statement(right)}'
    if re.fullmatch(r'[\w./~:+ -]+', value) and re.search(r'[^\W\d]|/', value):
      return f'strings need quotes. Write {statement(json.dumps(value, ensure_ascii=False))}'
    if re.search(r'\d\s*[-+*/<]+\s*\d', value):
      return 'gin has no expressions. Write the resulting number.'
  if token := re.search(r"Failed to parse token '(.*)'", error.msg, re.DOTALL):
    return f'{token[1]} is not a value: strings need quotes, references @ and macros %'
  return f'this is not gin syntax: {error.msg}'


_CONSTANTS = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}


def _arithmetic(value: str) -> str:
  """'8192' for '8*1024', which Python computes while it compiles; '' for other texts."""
  try:
    code = compile(value, 'a gin value', 'eval')
  except (SyntaxError, ValueError):
    return ''
  is_one = len(code.co_consts) == 1 and not code.co_names
  return repr(code.co_consts[0]) if is_one and isinstance(code.co_consts[0], int | float) else ''
