"""Selective copying: digits at random places among letters, to repeat in their order.

  wqpgzlhakudvvwzo ab4kpw1qzz...e7x ? -> 4 1 ... 7        (without the spaces)

The digits are anywhere in the last DISTANCE tokens before the question, so that a model recognizes
them by their content and not by their position. A random digit is right one time in ten. After
Arjovsky et al. 2016, in the form of Gu & Dao 2023 (Mamba, section 4.1.1).
"""

import numpy as np

from valkyrie.data.document_source import (
  DIGITS,
  NOISE,
  Problem,
  leading_noise,
  register_over_distances,
  symbols,
)

COPIED = 8  # digits


def selective_copy(random: np.random.RandomState, distance: int) -> Problem:
  """Digits at random places of `distance` tokens."""
  answer = symbols(random, DIGITS, COPIED)
  field = list(symbols(random, NOISE, distance))
  places = np.sort(random.permutation(distance)[:COPIED])
  for place, digit in zip(places, answer, strict=True):
    field[place] = digit
  return Problem(f'{leading_noise(random)}{"".join(field)}?', answer)


register_over_distances('selective_copy', COPIED, selective_copy)
