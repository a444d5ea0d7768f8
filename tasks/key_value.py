"""Key-value recall: pairs, and a question for the value of one key at a distance.

  wqpgzlhakudvvwzo Q3 A7 X0 F1 xkwivbnd...hqzo ?A -> 7        (without the spaces)

The answer is exactly DISTANCE tokens after the value. A random digit is right one time in ten, a
random value of the prompt about one time in four. After Ba et al. 2016 (fast weights, section 4.1),
in bytes.
"""

import string

import numpy as np

from valkyrie.data.document_source import (
  DIGITS,
  NOISE,
  Problem,
  leading_noise,
  register_over_distances,
  symbols,
)

PAIRS = 4


def key_value(random: np.random.RandomState, distance: int) -> Problem:
  """Pairs with different keys; the answer is `distance` tokens after one of the values."""
  keys = random.permutation(list(string.ascii_uppercase))[:PAIRS]
  values = symbols(random, DIGITS, PAIRS)
  asked = random.randint(PAIRS)
  pairs = ''.join(key + value for key, value in zip(keys, values, strict=True))
  later = 2 * (PAIRS - 1 - asked)  # tokens of the pairs after this one
  between = symbols(random, NOISE, distance - later - len('?K') - 1)
  return Problem(f'{leading_noise(random)}{pairs}{between}?{keys[asked]}', values[asked])


register_over_distances('key_value', 2 * PAIRS + 1, key_value)
