"""Problems of a length and a depth, the suites that make them, and the sizes that fit.

A problem is a context and what is asked after it. Its length grows with its units of filler: noise,
sentences of a text, or what the suite repeats.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import re
from typing import NamedTuple

import numpy as np

from valkyrie.errors import ConfigurationError

# A unit of the haystack of noise of RULER (Hsieh et al. 2024).
NOISE = 'The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.'
_SAMPLE = 64  # units, to measure the tokens of one
_CONSONANTS = 'bdfgklmnprstvz'
_VOWELS = 'aeiou'
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]


class Question(NamedTuple):
  """What is asked after the context, up to the answer, and the strings that answer it."""

  text: str
  answers: list[str]


class Problem(NamedTuple):
  """A context, and questions that are asked each for itself."""

  context: str
  questions: list[Question]


class Order(NamedTuple):
  """The order for a problem of `length` tokens at most, with `units` of filler.

  depth: the place of the facts, from 0 (first) to 1 (last); None for random places.
  sentences: of the text that serves as filler.
  """

  random: np.random.Generator
  length: int
  units: int
  depth: float | None
  sentences: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Suite:
  """A kind of problems.

  Attributes:
    score: (continuation, question) -> from 0 to 1.
    max_tokens: the most tokens of an answer.
    has_depth: whether the facts lie at a depth; otherwise their places are random.
    needs_text: whether the filler is a text.
  """

  make: Callable[[Order], Problem]
  score: Callable[[str, Question], float]
  max_tokens: int
  has_depth: bool = True
  needs_text: bool = False


SUITES: dict[str, Suite] = {}


class TooShortError(ConfigurationError):
  """A suite has no problem that is so short."""


def register(name: str, suite: Suite) -> None:
  """Adds a suite; raises a ConfigurationError if another one has its name."""
  if name in SUITES:
    raise ConfigurationError(f'There is a suite {name} already. Choose another name.')
  SUITES[name] = suite


def fitted(
  name: str,
  length: int,
  depth: float | None,
  sentences: Sequence[str],
  tokens: Callable[[str], int],
  seed: Sequence[int],
) -> Problem:
  """The problem of a suite with about `length` tokens, and never more.

  The tokens of the context, its longest question and the answer count, by `tokens`.
  Raises a TooShortError if every problem of the suite is longer.
  """
  suite = SUITES[name]

  @functools.cache
  def make(units: int) -> tuple[Problem, int]:
    order = Order(np.random.default_rng(seed), length, units, depth, sentences)
    problem = suite.make(order)
    asked = max(tokens(question.text) for question in problem.questions)
    return problem, tokens(problem.context) + asked + suite.max_tokens

  (_, shortest), (_, longer) = make(0), make(_SAMPLE)
  if shortest > length:
    raise TooShortError(
      f'A problem of {name} has at least {shortest:,} tokens, more than the {length:,} of '
      'long_context.lengths.'
    )
  of_unit = max(1.0, (longer - shortest) / _SAMPLE)
  units = int((length - shortest) / of_unit)
  while make(units)[1] > length:
    units -= max(1, int((make(units)[1] - length) / of_unit))
    units = max(units, 0)
  return make(units)[0]


def sentences_of(text: str) -> list[str]:
  """The sentences of a text, with single spaces inside."""
  return re.split(r'(?<=[.!?]) ', re.sub(r'\s+', ' ', text).strip())


def filler(order: Order) -> list[str]:
  """As many sentences as the order has units, over and over from a random one."""
  size = len(order.sentences)
  begin = int(order.random.integers(size))
  return [order.sentences[(begin + number) % size] for number in range(order.units)]


def inserted(random: np.random.Generator, filler: Sequence[str], facts: Sequence[str]) -> list[str]:
  """Facts at random places of the filler, in their order."""
  return placed(filler, facts, sorted(random.integers(len(filler) + 1, size=len(facts))))


def placed(filler: Sequence[str], facts: Sequence[str], places: Sequence[int]) -> list[str]:
  """Facts before the filler's sentences of these numbers, in ascending order."""
  found = []
  before = 0
  for fact, place in zip(facts, places, strict=True):
    found += [*filler[before:place], fact]
    before = place
  return [*found, *filler[before:]]


def words(random: np.random.Generator, count: int, syllables: int = 3) -> list[str]:
  """Different made-up words."""
  base = len(_SYLLABLES)
  while base**syllables < 2 * count:
    syllables += 1
  numbers = random.choice(base**syllables, size=count, replace=False)
  return [
    ''.join(_SYLLABLES[int(number) // base**place % base] for place in range(syllables))
    for number in numbers
  ]


def share_of_answers(continuation: str, question: Question) -> float:
  """The share of the answers that the continuation contains, in any case of letters (RULER)."""
  found = [answer.lower() in continuation.lower() for answer in question.answers]
  return sum(found) / len(found)


def begins_with_answer(continuation: str, question: Question) -> float:
  """Whether the continuation begins with the only answer."""
  return float(continuation.lstrip().startswith(question.answers[0]))
