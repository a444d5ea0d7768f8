"""ListOps: nested operations on digits (Nangia & Bowman 2018), with Long Range Arena's lengths.

  X29N47]0]= -> 9        MAX(2, 9, MIN(4, 7), 0)

The grammar is the published one: an expression is a digit with probability 3/4, and otherwise one
of four operations on 2 to 10 expressions, with at most 10 levels. Only expressions of more than 500
and fewer than 2000 symbols are kept, 96,000 for training and 2,000 for each test (Tay et al. 2021,
Long Range Arena, section 2.2.1). A symbol is one byte: X, N, D and S open a maximum, a minimum, a
median and a sum modulo 10. The most common answer is right less than one time in five.

A long expression gives one answer to learn from, and a short one shows what the operations do: the
split 'short' has expressions of 4 to 100 symbols, 'any_length' of 4 to 2000, both log-uniformly.
"""

import math

import numpy as np

from valkyrie.data.document_source import DIGITS, Problem, register_problems

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
# both excluded
MIN_SYMBOLS = 500
MAX_SYMBOLS = 2000
_OPERATION_PROBABILITY = 0.25
_SPREAD = 1.3  # a length within this factor of the drawn one is accepted


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
  """A random expression of the published lengths, and its value."""
  # Giving up would draw fewer numbers, and so change the problems after it.
  return _problem(random, MIN_SYMBOLS, MAX_SYMBOLS, math.inf)


def log_uniform(random: np.random.RandomState, longest: int) -> Problem:
  """A random expression of 4 to `longest` symbols, log-uniformly, and its value."""
  length = np.exp(random.uniform(np.log(4), np.log(longest)))
  most = min(length * _SPREAD, longest + 1)
  return _problem(random, length / _SPREAD, most, most)


def _problem(random: np.random.RandomState, least: float, most: float, stop: float) -> Problem:
  """An expression of more than `least` and fewer than `most` symbols; gives up at `stop`."""
  expression: list[str] = []
  value = 0
  while not least < len(expression) < most:
    expression = []
    value = _expand(random, 1, expression, stop)
  return Problem(f'{"".join(expression)}=', str(value))


def _expand(random: np.random.RandomState, depth: int, expression: list[str], stop: float) -> int:
  """Appends the symbols of a random expression, and returns its value unless it gives up."""
  if len(expression) >= stop:
    return 0
  if depth == MAX_DEPTH or random.random_sample() >= _OPERATION_PROBABILITY:
    value = random.randint(len(DIGITS))
    expression.append(DIGITS[value])
    return value
  name = list(OPERATIONS)[random.randint(len(OPERATIONS))]
  expression.append(name)
  arguments = random.randint(2, MAX_ARGUMENTS + 1)
  values = [_expand(random, depth + 1, expression, stop) for _ in range(arguments)]
  expression.append(']')
  return OPERATIONS[name](values)


register_problems(
  'listops',
  {
    'train': (96000, listops),
    'validation': (2000, listops),
    'test': (2000, listops),
    'short': (2**17, lambda random: log_uniform(random, 100)),
    'any_length': (2**16, lambda random: log_uniform(random, MAX_SYMBOLS)),
  },
)
