"""Recall of keyed values over long distances: marked pairs, look-alikes, and questions.

  !Q3!A7 kxQ9wivbnd...hqA4zo ?A -> 7 ?Q -> 3        (without the spaces)

A stream marks 1, 4 or 16 pairs of a key and a value, passes over a distance of letters, and asks
for the value of every key, in random order. One token in eight of the distance belongs to a pair
that lacks the mark: of any key, asked for or not, and any value. A question and its answer are a
document of their own, so the streams stay together with `TaskFeed.reset_at = 'sequence'`. A random
digit is right one time in ten. After Arora et al. 2023 (Zoology, multi-query associative recall),
in bytes, and Mohtashami & Jaggi 2023 (landmark attention, passkeys).
"""

import string

import numpy as np

from valkyrie.data.document_source import DIGITS, NOISE, Problem, register_problems, symbols

KEYS = string.ascii_uppercase
PAIRS = (1, 4, 16)  # marked pairs of a stream
_SHARES = (4 / 7, 2 / 7, 1 / 7)  # of the streams in training: one pair is the first to be learned
SHARE = 1 / 8  # of the tokens of a distance belong to pairs without a mark
# distances in the splits
NEAREST = 8
FARTHEST = 8000
_LETTERS, _KEYS, _DIGITS = (np.frombuffer(s.encode(), np.uint8) for s in (NOISE, KEYS, DIGITS))


def filler(random: np.random.RandomState, length: int, share: float = SHARE) -> str:
  """`length` letters, and this share belongs to pairs without a mark."""
  text = _LETTERS[random.randint(len(_LETTERS), size=length)]
  # Pairs begin at even places, so that they do not overlap, and a letter or a pair precedes each.
  keys = 2 * np.flatnonzero(random.uniform(size=length // 2) < share)
  text[keys] = _KEYS[random.randint(len(_KEYS), size=len(keys))]
  text[keys + 1] = _DIGITS[random.randint(len(_DIGITS), size=len(keys))]
  return text.tobytes().decode()


def recall(
  random: np.random.RandomState, pairs: int, distance: int, share: float = SHARE
) -> list[Problem]:
  """A stream: the first prompt holds the pairs and all tokens between them and the questions."""
  keys = random.permutation(list(KEYS))[:pairs]
  values = symbols(random, DIGITS, pairs)
  marked = ''.join(f'!{key}{value}' for key, value in zip(keys, values, strict=True))
  context = marked + filler(random, distance, share)
  asked = random.permutation(pairs)
  return [
    Problem(f'{context if first else ""}?{keys[i]}', values[i])
    for first, i in zip([True, *[False] * pairs], asked, strict=False)
  ]


def _most_near(random: np.random.RandomState) -> list[Problem]:
  """One over the distance is uniform, so that every octave of distances has as many tokens."""
  distance = 1 / random.uniform(1 / FARTHEST, 1 / NEAREST)
  return recall(random, random.choice(PAIRS, p=_SHARES), int(distance))


def _near_and_far(random: np.random.RandomState) -> list[Problem]:
  """Every octave of distances has as many streams."""
  distance = np.exp(random.uniform(np.log(NEAREST), np.log(FARTHEST)))
  return recall(random, random.choice(PAIRS), int(distance))


def _crowded(random: np.random.RandomState) -> list[Problem]:
  """As `_near_and_far`, with up to eight times as many pairs without a mark."""
  distance = np.exp(random.uniform(np.log(NEAREST), np.log(FARTHEST)))
  share = np.exp(random.uniform(np.log(SHARE), 0))
  return recall(random, random.choice(PAIRS), int(distance), share)


register_problems(
  'recall',
  {
    'train': (2**15, _most_near),
    'train_far': (2**14, _crowded),
    'validation': (2**7, _near_and_far),
  },
)
