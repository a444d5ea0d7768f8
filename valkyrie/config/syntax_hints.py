"""Hints for gin values with a syntax error."""

import ast
from collections.abc import Callable
import json
import operator
import re


def explain(error: SyntaxError, value: str | None, statement: Callable[[str], str]) -> str:
  """The error of a statement, with a corrected statement if the right value is known.

  Args:
    error: the error of gin's parser.
    value: the text after '='; None for a line without one.
    statement: makes the text of the statement from the right value.
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
  """The value of an arithmetic expression: '8192' for '8*1024'; '' for any other text."""

  def number(node) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
      return node.value
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
      raise ValueError
    left, right = number(node.left), number(node.right)
    grows = isinstance(node.op, ast.Pow | ast.LShift)
    if max(abs(left), abs(right)) > 2**64 or (grows and abs(right) > 64):
      raise ValueError
    return _OPERATORS[type(node.op)](left, right)

  try:
    tree = ast.parse(value, mode='eval').body
    return repr(number(tree)) if isinstance(tree, ast.BinOp) else ''
  except (SyntaxError, ValueError, ArithmeticError, TypeError):
    return ''
