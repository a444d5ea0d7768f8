"""Needles, variable tracking and common words of RULER, and the pairs of MQAR.

RULER: Hsieh et al. 2024, arXiv 2404.06654. The names, numbers and prompts come from the benchmark
(github.com/NVIDIA/RULER, Apache 2.0). The words are made up, and the haystack `essay` is a text
that the user names.

MQAR: Arora et al. 2023, Zoology, arXiv 2312.04927, as text: kubo=47. gira=90. ... kubo=
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import string
from typing import NamedTuple
import uuid

import numpy as np

from valkyrie.lab.suites import problem
from valkyrie.lab.suites.problem import NOISE, Order, Problem, Question, Suite, register

_SHORT = 4096  # tokens: in shorter problems, the words of a list are repeated less often
_TRACKED = 5  # variables
_COMMON = 10  # words


@dataclasses.dataclass(frozen=True)
class Needles:
  """Sentences with a key and a value in a haystack; the question asks for one or several.

  Attributes:
    haystack: 'noise', 'essay', or 'needle': more needles, with other keys.
    keys: how many keys are in the haystack.
    values: how many values each key has.
    queries: how many keys are asked for.
    key, value: the kind of keys and of values: 'words', 'numbers' of seven digits or 'uuids'.
  """

  haystack: str = 'essay'
  keys: int = 1
  values: int = 1
  queries: int = 1
  key: str = 'words'
  value: str = 'numbers'

  def __call__(self, order: Order) -> Problem:
    random = order.random
    key_count = max(self.keys, self.queries)
    keys = _symbols(random, self.key, key_count)
    values = [_symbols(random, self.value, self.values) for _ in keys]
    asked = random.permutation(key_count)[: self.queries]
    needles = []
    for number, key in enumerate(keys):
      is_asked = number in asked
      for value in values[number]:
        sentence = self._sentence(key, value)
        needles.append(_Needle(sentence, is_asked))
    asked_keys = []
    answers = []
    for number in asked:
      asked_keys.append(keys[number])
      answers += values[number]
    order_of_needles = random.permutation(len(needles))
    shuffled = [needles[number] for number in order_of_needles]
    separator = '\n'
    if self.haystack == 'essay':
      separator = ' '
    context = separator.join(self._context(order, shuffled))
    question = Question(self._question(asked_keys), answers)
    text = f'{self._instructions()}\n{context}'
    return Problem(text, [question])

  @property
  def has_one_answer(self) -> bool:
    return self.queries * self.values == 1

  def _instructions(self) -> str:
    if self.has_one_answer:
      kind = self.value.removesuffix('s')
      subject = f'A special magic {kind} is'
    else:
      kind = self.value
      subject = f'Some special magic {kind} are'
    return (
      f'{subject} hidden within the following text. Make sure to memorize it. I will quiz you '
      f'about the {kind} afterwards.'
    )

  def _question(self, keys: Sequence[str]) -> str:
    *others, last = keys
    query = last
    if others:
      listed = ', '.join(others)
      query = f'{listed}, and {last}'
    if self.has_one_answer:
      kind = self.value.removesuffix('s')
      what_are = 'What is'
      verb = 'is'
    else:
      kind = self.value
      what_are = 'What are all'
      verb = 'are'
    subject = f'special magic {kind} for {query} mentioned in the provided text'
    return f'\n{what_are} the {subject}? The {subject} {verb}'

  def _sentence(self, key: str, value: str) -> str:
    return f'One of the special magic {self.value} for {key} is: {value}.'

  def _context(self, order: Order, needles: Sequence['_Needle']) -> list[str]:
    """The haystack with the needles; the needles asked for lie at the depth."""
    hay = self._hay(order)
    if order.depth is None:
      sentences = [needle.sentence for needle in needles]
      return problem.inserted(order.random, hay, sentences)
    asked = []
    others = []
    for needle in needles:
      group = asked if needle.is_asked else others
      group.append(needle.sentence)
    hay = problem.inserted(order.random, hay, others)
    place = round(order.depth * len(hay))
    places = [place] * len(asked)
    return problem.placed(hay, asked, places)

  def _hay(self, order: Order) -> list[str]:
    if self.haystack == 'noise':
      return [NOISE] * order.units
    if self.haystack == 'essay':
      return problem.filler(order)
    keys = _symbols(order.random, self.key, order.units)
    values = _symbols(order.random, self.value, order.units)
    sentences = []
    for key, value in zip(keys, values, strict=True):
      sentences.append(self._sentence(key, value))
    return sentences


class _Needle(NamedTuple):
  """A sentence in the haystack, and whether the question asks for its value."""

  sentence: str
  is_asked: bool


def variable_tracking(order: Order) -> Problem:
  """A chain of five variables that have one value, among noise; a solved example precedes it."""
  random = order.random
  example, example_question = _tracking(random, 3, '12345', 5)
  value = str(random.integers(10000, 99999))
  text, question = _tracking(random, 5, value, order.units)
  answers = ' '.join(example_question.answers)
  solved = f'{example}{example_question.text} {answers}\n'
  return Problem(solved + text, [question])


def _tracking(
  random: np.random.Generator,
  letters: int,
  value: str,
  units: int,
) -> tuple[str, Question]:
  """(A text with a chain of variables in so many units of noise, the question about it)."""
  names: list[str] = []
  while len(names) < _TRACKED:
    drawn = random.choice([*string.ascii_uppercase], letters)
    name = ''.join(drawn)
    if name not in names:
      names.append(name)
  chain = [f'VAR {names[0]} = {value}']
  for before, name in itertools.pairwise(names):
    chain.append(f'VAR {name} = VAR {before}')
  noise = [NOISE] * units
  lines = '\n'.join(problem.inserted(random, noise, chain))
  text = (
    'Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n'
    f'{lines}'
  )
  question = (
    f'\nQuestion: Find all variables that are assigned the value {value} in the text above. '
    'Answer: According to the chain(s) of variable assignment in the text above, '
    f'{len(names)} variables are assigned the value {value}, they are: '
  )
  return text, Question(question, names)


def common_words(order: Order) -> Problem:
  """A list of words with ten more frequent ones; a solved example precedes it."""
  random = order.random
  if order.length < _SHORT:
    example, example_question = _word_list(random, 10, often=3, seldom=1)
    text, question = _word_list(random, order.units, often=6, seldom=1)
  else:
    example, example_question = _word_list(random, 10, often=10, seldom=3)
    text, question = _word_list(random, order.units, often=30, seldom=3)
  answers = _numbered(example_question.answers)
  solved = f'{example}{example_question.text} {answers}\n'
  return Problem(solved + text, [question])


def _word_list(
  random: np.random.Generator,
  others: int,
  often: int,
  seldom: int,
) -> tuple[str, Question]:
  """(Ten words `often` times and others `seldom` times, in random order; the question)."""
  words = problem.words(random, _COMMON + others)
  common = words[:_COMMON]
  rare = words[_COMMON:]
  listed = common * often + rare * seldom
  order = random.permutation(len(listed))
  shuffled = [listed[place] for place in order]
  lines = _numbered(shuffled)
  text = (
    'Below is a numbered list of words. In these words, some appear more often than others. '
    f'Memorize the ones that appear most often.\n{lines}'
  )
  question = (
    '\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words '
    'that appear most often in the list are:'
  )
  return text, Question(question, common)


def _numbered(words: Sequence[str]) -> str:
  """'1. WORD 2. WORD'."""
  numbered = [f'{number}. {word}' for number, word in enumerate(words, 1)]
  return ' '.join(numbered)


def pairs(order: Order, count: int) -> Problem:
  """Pairs of a made-up word and a number, together at the depth of the noise, and all asked for.

  A guess is right one time in ninety.
  """
  keys = problem.words(order.random, count, syllables=2)
  numbers = order.random.integers(10, 100, size=count)
  values = [str(number) for number in numbers]
  facts = []
  questions = []
  for key, value in zip(keys, values, strict=True):
    facts.append(f'{key}={value}.')
    question = Question(f'\n{key}=', [value])
    questions.append(question)
  noise = [NOISE] * order.units
  depth = order.depth or 0.0
  place = round(depth * order.units)
  sentence = ' '.join(facts)
  lines = problem.placed(noise, [sentence], [place])
  return Problem('\n'.join(lines), questions)


def _symbols(random: np.random.Generator, kind: str, count: int) -> list[str]:
  """Keys or values of a kind, at random."""
  if kind == 'numbers':
    numbers = random.integers(10**6, 10**7, size=count)
    return [str(number) for number in numbers]
  if kind == 'uuids':
    uuids = []
    for _ in range(count):
      drawn = random.bytes(16)
      drawn_uuid = uuid.UUID(bytes=drawn, version=4)
      uuids.append(str(drawn_uuid))
    return uuids
  words = problem.words(random, 2 * count)
  first_words = words[::2]
  second_words = words[1::2]
  pairs = zip(first_words, second_words, strict=True)
  return [f'{first}-{second}' for first, second in pairs]


for _name, _needles in {
  'niah_single_1': Needles('noise'),
  'niah_single_2': Needles(),
  'niah_single_3': Needles(value='uuids'),
  'niah_multikey_1': Needles(keys=4),
  'niah_multikey_2': Needles('needle'),
  'niah_multikey_3': Needles('needle', key='uuids', value='uuids'),
  'niah_multivalue': Needles(values=4),
  'niah_multiquery': Needles(queries=4),
}.items():
  register(
    _name,
    Suite(
      _needles,
      problem.share_of_answers,
      max_tokens=128,
      has_depth=_needles.has_one_answer,
      needs_text=_needles.haystack == 'essay',
    ),
  )
register('vt', Suite(variable_tracking, problem.share_of_answers, 30, has_depth=False))
register('cwe', Suite(common_words, problem.share_of_answers, 120, has_depth=False))
for _count in (4, 8, 16, 32, 64):
  _pairs = functools.partial(pairs, count=_count)
  register(f'mqar_{_count}', Suite(_pairs, problem.begins_with_answer, 4))
