"""State tracking: the parity of bits, and the order of five items after swaps.

  0110100= -> 1            the bits have an odd number of ones
  01234bagjc= -> 2401      the first four items after the swaps b, a, g, j, c; the fifth follows

Each of the letters a to j swaps two places, and every permutation of five items is a product of
such swaps. No intermediate result is in the text: an answer that the model reads would give it the
state. A guess is right one time in two, and for swaps in 32% of the digits, since each digit of an
answer leaves fewer items. A linear recurrence whose decays do not depend on the input, or are all
positive, cannot track parity at any length (Merrill et al. 2024, arXiv 2404.08819; Grazzi et al.
2024, arXiv 2411.12537).

Training and validation have 1 to 32 bits or swaps. The splits '64', '256', '1024' and '4096' have
that number.
"""

import itertools

import numpy as np

from valkyrie.data.document_source import Problem, register_problems, symbols

LONGEST = 32  # bits or swaps of training
LENGTHS = (64, 256, 1024, 4096)
SWAPS = dict(zip('abcdefghij', itertools.combinations(range(5), 2), strict=True))


def parity(random: np.random.RandomState, length: int) -> Problem:
  """Bits, and whether they have an odd number of ones."""
  bits = symbols(random, '01', length)
  return Problem(f'{bits}=', str(bits.count('1') % 2))


def swaps(random: np.random.RandomState, length: int) -> Problem:
  """Five items in order, swaps of two places, and the items at the first four places."""
  letters = symbols(random, ''.join(SWAPS), length)
  items = [*'01234']
  prompt = f'{"".join(items)}{letters}='
  for letter in letters:
    one, other = SWAPS[letter]
    items[one], items[other] = items[other], items[one]
  return Problem(prompt, ''.join(items[:4]))


def _uniform(random: np.random.RandomState) -> int:
  return random.randint(1, LONGEST + 1)


def _few(random: np.random.RandomState) -> int:
  """Log-uniform: one or two swaps teach what a letter does, and then products can be learned."""
  return int(np.exp(random.uniform(0, np.log(LONGEST + 1))))


for _name, _generate, _draw in (('parity', parity, _uniform), ('swaps', swaps, _few)):

  def _short(random, generate=_generate, draw=_draw):
    return generate(random, draw(random))

  def _exactly(length, generate=_generate):
    return lambda random: generate(random, length)

  register_problems(
    f'state_tracking.{_name}',
    {'train': (2**16, _short), 'validation': (2**10, _short)}
    | {str(length): (2**9, _exactly(length)) for length in LENGTHS},
  )
