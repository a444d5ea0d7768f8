"""State tracking: the parity of bits, and the place of an item after swaps of five.

  0110100= -> 1            the bits have an odd number of ones
  bagjc?3 -> 0             after the swaps b, a, g, j, c of five places, item 3 is at place 0

Each of the letters a to j swaps two places, and every permutation of five items is a product of
such swaps. No intermediate result is in the text: an answer that the model reads would give it the
state. A guess is right one time in two, or in five. A linear recurrence whose decays do not depend
on the input, or are all positive, cannot track parity at any length (Merrill et al. 2024, arXiv
2404.08819; Grazzi et al. 2024, arXiv 2411.12537).

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


def permutations(random: np.random.RandomState, length: int) -> Problem:
  """Swaps of five places, and the place of one item after them; item i begins at place i."""
  swaps, items = symbols(random, ''.join(SWAPS), length), [*range(5)]
  for swap in swaps:
    one, other = SWAPS[swap]
    items[one], items[other] = items[other], items[one]
  asked = random.randint(5)
  return Problem(f'{swaps}?{asked}', str(items.index(asked)))


for _name, _generate in (('parity', parity), ('permutations', permutations)):

  def _short(random, generate=_generate):
    return generate(random, random.randint(1, LONGEST + 1))

  def _exactly(length, generate=_generate):
    return lambda random: generate(random, length)

  register_problems(
    f'state_tracking.{_name}',
    {'train': (2**16, _short), 'validation': (2**10, _short)}
    | {str(length): (2**9, _exactly(length)) for length in LENGTHS},
  )
