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
  """What a problem should be: at most `length` tokens, with `units` of filler.

  depth: the place of the facts, from 0 (first) to 1 (last); None for random places.
  sentences: the sentences of the text that serves as filler.
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
    make: makes a problem.
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
    raise ConfigurationError(f'A suite {name} is registered already. Choose another name.')
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
  def make(units: int) -> Problem:
    order = Order(np.random.default_rng(seed), length, units, depth, sentences)
    return suite.make(order)

  @functools.cache
  def size(units: int) -> int:
    problem = make(units)
    sizes = [tokens(question.text) for question in problem.questions]
    return tokens(problem.context) + max(sizes) + suite.max_tokens

  shortest = size(0)
  if shortest > length:
    raise TooShortError(
      f'A problem of {name} has at least {shortest:,} tokens, more than the {length:,} of '
      'long_context.lengths.'
    )
  growth = size(_SAMPLE) - shortest
  tokens_of_unit = max(1.0, growth / _SAMPLE)
  units = int((length - shortest) / tokens_of_unit)
  while size(units) > length:
    too_long = size(units) - length
    too_many = int(too_long / tokens_of_unit)
    units = max(0, units - max(1, too_many))
  return make(units)


def sentences_of(text: str) -> list[str]:
  """The sentences of a text, with single spaces inside."""
  single_spaced = re.sub(r'\s+', ' ', text).strip()
  return re.split(r'(?<=[.!?]) ', single_spaced)


def filler(order: Order) -> list[str]:
  """As many sentences as the order has units, over and over from a random one."""
  count = len(order.sentences)
  first = int(order.random.integers(count))
  numbers = range(first, first + order.units)
  return [order.sentences[number % count] for number in numbers]


def inserted(random: np.random.Generator, filler: Sequence[str], facts: Sequence[str]) -> list[str]:
  """Facts at random places of the filler, in their order."""
  places = random.integers(len(filler) + 1, size=len(facts))
  return placed(filler, facts, sorted(places))


def placed(filler: Sequence[str], facts: Sequence[str], places: Sequence[int]) -> list[str]:
  """Facts before the filler's sentences of these numbers, in ascending order."""
  sentences = []
  begin = 0
  for fact, place in zip(facts, places, strict=True):
    sentences += filler[begin:place]
    sentences.append(fact)
    begin = place
  sentences += filler[begin:]
  return sentences


def words(random: np.random.Generator, count: int, syllables: int = 3) -> list[str]:
  """Different made-up words."""
  base = len(_SYLLABLES)
  while base**syllables < 2 * count:
    syllables += 1
  numbers = random.choice(base**syllables, size=count, replace=False)
  return [_word(int(number), syllables) for number in numbers]


def _word(number: int, syllables: int) -> str:
  """The word whose syllables are the digits of a number."""
  word = ''
  for _ in range(syllables):
    number, digit = divmod(number, len(_SYLLABLES))
    word += _SYLLABLES[digit]
  return word


def share_of_answers(continuation: str, question: Question) -> float:
  """The share of the answers that the continuation contains, in any case of letters (RULER)."""
  text = continuation.lower()
  contained = [answer for answer in question.answers if answer.lower() in text]
  return len(contained) / len(question.answers)


def begins_with_answer(continuation: str, question: Question) -> float:
  """Whether the continuation begins with the only answer."""
  text = continuation.lstrip()
  return float(text.startswith(question.answers[0]))
