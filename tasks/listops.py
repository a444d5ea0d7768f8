"""ListOps: nested operations on digits (Nangia & Bowman 2018), with Long Range Arena's lengths.

  X29N47]0]= -> 9        MAX(2, 9, MIN(4, 7), 0)

The grammar is the published one: an expression is a digit with probability 3/4, and otherwise one
of four operations on 2 to 10 expressions, with at most 10 levels. Only expressions of more than 500
and fewer than 2000 symbols are kept, 96,000 for training and 2,000 for each test (Tay et al. 2021,
Long Range Arena, section 2.2.1). A symbol is one byte: X, N, D and S open a maximum, a minimum, a
median and a sum modulo 10. The most common answer is right less than one time in five.
"""

import numpy as np

from valkyrie.data.document_source import DIGITS, Problem, register_problems

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
MIN_SYMBOLS, MAX_SYMBOLS = 500, 2000  # both excluded
_OPERATION_PROBABILITY = 0.25


def _median(values: list[int]) -> int:
  """The median, rounded down."""
  ordered = sorted(values)
  return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2


OPERATIONS = {
  'N': min,
  'X': max,
  'D': _median,
  'S': lambda values: sum(values) % 10,
}


def listops(random: np.random.RandomState) -> Problem:
  """A random expression of allowed length, and its value."""
  expression: list[str] = []
  value = 0
  while not MIN_SYMBOLS < len(expression) < MAX_SYMBOLS:
    expression = []
    value = _expand(random, 1, expression)
  return Problem(f'{"".join(expression)}=', str(value))


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


register_problems(
  'listops', {'train': (96000, listops), 'validation': (2000, listops), 'test': (2000, listops)}
)
