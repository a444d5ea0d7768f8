"""ListOps: nested operations on digits (Nangia & Bowman 2018), with Long Range Arena's lengths.

  [MAX 2 9 [MIN 4 7 ] 0 ]= -> 9

The grammar is the published one: an expression is a digit with probability 3/4, and otherwise one
of four operations on 2 to 10 expressions, with at most 10 levels. Only expressions of more than 500
and fewer than 2000 symbols are kept (Tay et al. 2021, Long Range Arena, section 2.2.1). Symbols are
separated by spaces; the tokens are bytes. The most common answer is right less than one time in
five.
"""

import numpy as np

from valkyrie.data.generated_source import DIGITS, Problem, register

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
MIN_SYMBOLS, MAX_SYMBOLS = 500, 2000  # both excluded
_OPERATION_PROBABILITY = 0.25


def _median(values: list[int]) -> int:
  """The median, rounded down."""
  ordered = sorted(values)
  return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


OPERATIONS = {
  '[MIN': min,
  '[MAX': max,
  '[MED': _median,
  '[SM': lambda values: sum(values) % 10,
}


def listops(random: np.random.RandomState) -> Problem:
  """A random expression of allowed length, and its value."""
  expression: list[str] = []
  value = 0
  while not MIN_SYMBOLS < len(expression) < MAX_SYMBOLS:
    expression = []
    value = _expand(random, 1, expression)
  return Problem(f'{" ".join(expression)}=', str(value))


def _expand(random: np.random.RandomState, depth: int, expression: list[str]) -> int:
  """Appends the symbols of a random expression, and returns its value."""
  if depth == MAX_DEPTH or random.random_sample() >= _OPERATION_PROBABILITY:
    value = random.randint(len(DIGITS))
    expression.append(DIGITS[value])
    return value
  name = list(OPERATIONS)[random.randint(len(OPERATIONS))]
  expression.append(name)
  arguments = random.randint(2, MAX_ARGUMENTS + 1)
  values = [_expand(random, depth + 1, expression) for _ in range(arguments)]
  expression.append(']')
  return OPERATIONS[name](values)


register('listops', {'train': (5000, listops), 'validation': (500, listops)})
