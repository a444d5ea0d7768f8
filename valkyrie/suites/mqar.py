"""Recall of many pairs, after MQAR (Arora et al. 2023, Zoology, arXiv 2312.04927), as text.

    kubo=47. gira=90. ... kubo=

Pairs of a made-up word and a number lie together among noise, and every word is asked for. A guess
is right one time in ninety.
"""

import functools

from valkyrie.suites.problem import (
  NOISE,
  Order,
  Problem,
  Question,
  Suite,
  begins_with_answer,
  placed,
  register,
  words,
)

PAIRS = (4, 8, 16, 32, 64)


def pairs(order: Order, count: int) -> Problem:
  """`count` pairs at the depth of the noise, and a question for each."""
  keys = words(order.random, count, syllables=2)
  values = [str(value) for value in order.random.integers(10, 100, size=count)]
  noise = [*NOISE] * order.units
  facts = ' '.join(f'{key}={value}.' for key, value in zip(keys, values, strict=True))
  place = round((order.depth or 0.0) * len(noise))
  return Problem(
    '\n'.join(placed(noise, [facts], [place])),
    [Question(f'\n{key}=', [value]) for key, value in zip(keys, values, strict=True)],
  )


for _count in PAIRS:
  register(f'mqar_{_count}', Suite(functools.partial(pairs, count=_count), begins_with_answer, 4))
