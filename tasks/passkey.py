"""Passkey recall: digits among letters, and a question for them at a distance.

  fmcrxwqpgzlhakud 42 xkwivbnd...hqzo? -> 42        (without the spaces)

Each digit of the answer is exactly DISTANCE tokens after its copy in the prompt. A random digit is
right one time in ten. After Mohtashami & Jaggi 2023 (landmark attention), in bytes.
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

KEY = 2  # digits


def passkey(random: np.random.RandomState, distance: int) -> Problem:
  """A key, `distance` tokens before the answer."""
  key = symbols(random, DIGITS, KEY)
  between = symbols(random, NOISE, distance - KEY - 1)
  return Problem(f'{leading_noise(random)}{key}{between}?', key)


register_over_distances('passkey', KEY + 1, passkey)
