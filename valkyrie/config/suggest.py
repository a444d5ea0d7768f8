"""Suggestions in messages: similar names, and corrected gin statements."""

import ast
from collections.abc import Callable, Iterable
import difflib
import json
import operator
import re


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """' Did you mean X?' with the most similar name, ignoring case; '' if none is similar."""
  by_lower_case = {candidate.lower(): candidate for candidate in sorted(known)}
  nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
  return f' Did you mean {by_lower_case[nearest[0]]}?' if nearest else ''


def explain(error: SyntaxError, value: str | None, statement: Callable[[str], str]) -> str:
  """The error of a statement, with a corrected statement if the right value is known.

  Args:
    error: the error of gin's parser.
    value: the text after '='; None for a line without '='.
    statement: returns the text of the statement with the corrected value.
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
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Pow: operator.pow,
  ast.LShift: operator.lshift,
}


def _arithmetic(value: str) -> str:
  """'8192' for '8*1024'; '' for a text that is not an arithmetic expression."""

  def number(node: ast.expr) -> int | float:
    if not isinstance(node, ast.BinOp):
      return ast.literal_eval(node)
    left, right = number(node.left), number(node.right)
    grows = isinstance(node.op, ast.Pow | ast.LShift)
    if max(abs(left), abs(right)) > 2**64 or (grows and abs(right) > 64):
      raise ValueError
    return _OPERATORS[type(node.op)](left, right)

  try:
    tree = ast.parse(value, mode='eval').body
    return repr(number(tree)) if isinstance(tree, ast.BinOp) else ''
  except (SyntaxError, ValueError, ArithmeticError, TypeError, KeyError):
    return ''
