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
  if not nearest:
    return ''
  return f' Did you mean {by_lower_case[nearest[0]]}?'


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
  if not opened:
    return None
  return opened[-1]


def explain(error: SyntaxError, value: str | None, statement: Callable[[str], str]) -> str:
  """The error of a statement whose text after '=' is `value`; None for a line without '='.

  `statement` returns the text of the statement with a corrected value.
  """
  if value is not None:
    text, _, _ = value.partition('#')
    explanation = _explain_value(text.strip(), statement)
    if explanation is not None:
      return explanation
  token = re.search(r"Failed to parse token '(.*)'", error.msg, re.DOTALL)
  if token:
    return f'{token[1]} is not a value: strings need quotes, references @ and macros %'
  return f'this is not gin syntax: {error.msg}'


def _explain_value(value: str, statement: Callable[[str], str]) -> str | None:
  """As `explain`, for a value without a comment; None for an unknown error."""
  if not value:
    return 'the value is missing'
  right = _CONSTANTS.get(value.lower()) or _arithmetic(value)
  if right == value:
    return (
      'what stands before = is not gin syntax. Write the name of a macro, or of a parameter, such '
      'as S5.state_size'
    )
  if right:
    return f'{value} is not gin syntax. Write {statement(right)}'
  has_words = re.search(r'[^\W\d]|/', value)
  if has_words and re.fullmatch(r'[\w./~:+ -]+', value):
    quoted = json.dumps(value, ensure_ascii=False)
    advice = f'strings need quotes. Write {statement(quoted)}'
    if value.lower().lstrip('+-') in ('nan', 'inf', 'infinity'):
      advice = f'gin has no number {value}. Write a finite one'
    return advice
  if re.search(r'\d\s*[-+*/<]+\s*\d', value):
    return 'gin has no expressions. Write the resulting number.'
  return None


_CONSTANTS = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}


def _arithmetic(value: str) -> str:
  """'8192' for '8*1024', which Python computes while it compiles; '' for other texts."""
  try:
    code = compile(value, 'a gin value', 'eval')
  except (SyntaxError, ValueError):
    return ''
  if len(code.co_consts) != 1 or code.co_names:
    return ''
  (constant,) = code.co_consts
  if not isinstance(constant, int | float):
    return ''
  return repr(constant)
