"""Needles, variable tracking and common words of RULER, and the pairs of MQAR.

RULER: Hsieh et al. 2024, arXiv 2404.06654. The names, numbers and prompts come from the benchmark
(github.com/NVIDIA/RULER, Apache 2.0). The words are made up, and the haystack `essay` is a text of
the user's.

MQAR: Arora et al. 2023, Zoology, arXiv 2312.04927, as text: kubo=47. gira=90. ... kubo=
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import string
import uuid

import numpy as np

from valkyrie.lab.suites import problem
from valkyrie.lab.suites.problem import NOISE, Order, Problem, Question, Suite, register

_SHORT = 4096  # tokens, below which the words of a list are repeated less often


@dataclasses.dataclass(frozen=True)
class Needles:
  """Sentences with a key and a value in a haystack; the question asks for one or several.

  Attributes:
    haystack: 'noise', 'essay', or 'needle', more needles of other keys.
    keys, values, queries: keys in the haystack, values of each, and keys that are asked for.
    key, value: their kind: 'words', 'numbers' of seven digits or 'uuids'.
  """

  haystack: str = 'essay'
  keys: int = 1
  values: int = 1
  queries: int = 1
  key: str = 'words'
  value: str = 'numbers'

  def __call__(self, order: Order) -> Problem:
    random = order.random
    keys = _symbols(random, self.key, max(self.keys, self.queries))
    values = [_symbols(random, self.value, self.values) for _ in keys]
    asked = random.permutation(len(keys))[: self.queries]
    needles = [
      (number in asked, self._sentence(keys[number], value))
      for number, of_key in enumerate(values)
      for value in of_key
    ]
    needles = [needles[number] for number in random.permutation(len(needles))]
    kind = self.value
    some = 'Some'
    are = 'are'
    are_all = 'are all'
    if self.queries * self.values == 1:
      kind = self.value[:-1]
      some = 'A'
      are = 'is'
      are_all = 'is'
    *others, last = (keys[number] for number in asked)
    query = f'{", ".join(others)}, and {last}' if others else last
    joined = ' ' if self.haystack == 'essay' else '\n'
    question = (
      f'\nWhat {are_all} the special magic {kind} for {query} mentioned in the provided text? '
      f'The special magic {kind} for {query} mentioned in the provided text {are}'
    )
    return Problem(
      f'{some} special magic {kind} {are} hidden within the following text. Make sure to '
      f'memorize it. I will quiz you about the {kind} afterwards.\n'
      + joined.join(self._context(order, needles)),
      [Question(question, [value for number in asked for value in values[number]])],
    )

  def _sentence(self, key: str, value: str) -> str:
    return f'One of the special magic {self.value} for {key} is: {value}.'

  def _context(self, order: Order, needles: Sequence[tuple[bool, str]]) -> list[str]:
    """The haystack with the needles; the needles asked for lie at the depth."""
    if self.haystack == 'needle':
      keys = _symbols(order.random, self.key, order.units)
      values = _symbols(order.random, self.value, order.units)
      hay = [self._sentence(key, value) for key, value in zip(keys, values, strict=True)]
    elif self.haystack == 'noise':
      hay = [NOISE] * order.units
    else:
      hay = problem.filler(order)
    if order.depth is None:
      return problem.inserted(order.random, hay, [sentence for _, sentence in needles])
    wanted = [sentence for asked, sentence in needles if asked]
    others = [sentence for asked, sentence in needles if not asked]
    hay = problem.inserted(order.random, hay, others)
    return problem.placed(hay, wanted, [round(order.depth * len(hay))] * len(wanted))


def variable_tracking(order: Order) -> Problem:
  """A chain of five variables that have one value, among noise; a solved example precedes it."""
  random = order.random
  example, asked = _tracked(random, 3, '12345', 5)
  text, question = _tracked(random, 5, str(random.integers(10000, 99999)), order.units)
  solved = f'{example}{asked.text} {" ".join(asked.answers)}\n'
  return Problem(solved + text, [question])


def _tracked(
  random: np.random.Generator, letters: int, value: str, units: int
) -> tuple[str, Question]:
  names: list[str] = []
  while len(names) < 5:
    name = ''.join(random.choice([*string.ascii_uppercase], letters))
    names += [] if name in names else [name]
  chain = [f'VAR {names[0]} = {value}']
  chain += [f'VAR {name} = VAR {before}' for before, name in itertools.pairwise(names)]
  lines = '\n'.join(problem.inserted(random, [NOISE] * units, chain))
  return (
    'Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n'
    + lines,
    Question(
      f'\nQuestion: Find all variables that are assigned the value {value} in the text above. '
      'Answer: According to the chain(s) of variable assignment in the text above, '
      f'{len(names)} variables are assigned the value {value}, they are: ',
      names,
    ),
  )


def common_words(order: Order) -> Problem:
  """A list of words with ten more frequent ones; a solved example precedes it."""
  few = order.length < _SHORT
  example, asked = _list(order.random, 10, *((3, 1) if few else (10, 3)))
  text, question = _list(order.random, order.units, *((6, 1) if few else (30, 3)))
  answers = ' '.join(f'{number}. {word}' for number, word in enumerate(asked.answers, 1))
  return Problem(f'{example}{asked.text} {answers}\n{text}', [question])


def _list(
  random: np.random.Generator, others: int, often: int, seldom: int
) -> tuple[str, Question]:
  """Ten words as often, others as seldom, in random order."""
  every = problem.words(random, 10 + others)
  listed = every[:10] * often + every[10:] * seldom
  order = random.permutation(len(listed))
  text = ' '.join(f'{number}. {listed[place]}' for number, place in enumerate(order, 1))
  return (
    'Below is a numbered list of words. In these words, some appear more often than others. '
    f'Memorize the ones that appear most often.\n{text}',
    Question(
      '\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words '
      'that appear most often in the list are:',
      every[:10],
    ),
  )


def pairs(order: Order, count: int) -> Problem:
  """Pairs of a made-up word and a number, together at the depth of the noise, and all asked for.

  A guess is right one time in ninety.
  """
  keys = problem.words(order.random, count, syllables=2)
  values = [str(value) for value in order.random.integers(10, 100, size=count)]
  noise = [NOISE] * order.units
  facts = ' '.join(f'{key}={value}.' for key, value in zip(keys, values, strict=True))
  place = round((order.depth or 0.0) * len(noise))
  return Problem(
    '\n'.join(problem.placed(noise, [facts], [place])),
    [Question(f'\n{key}=', [value]) for key, value in zip(keys, values, strict=True)],
  )


def _symbols(random: np.random.Generator, kind: str, count: int) -> list[str]:
  if kind == 'numbers':
    return [str(number) for number in random.integers(10**6, 10**7, size=count)]
  if kind == 'uuids':
    return [str(uuid.UUID(bytes=random.bytes(16), version=4)) for _ in range(count)]
  pairs = problem.words(random, 2 * count)
  return [f'{first}-{second}' for first, second in zip(pairs[::2], pairs[1::2], strict=True)]


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
  _alone = _needles.values * _needles.queries == 1
  _needs_text = _needles.haystack == 'essay'
  register(_name, Suite(_needles, problem.share_of_answers, 128, _alone, _needs_text))
register('vt', Suite(variable_tracking, problem.share_of_answers, 30, has_depth=False))
register('cwe', Suite(common_words, problem.share_of_answers, 120, has_depth=False))
for _count in (4, 8, 16, 32, 64):
  _pairs = functools.partial(pairs, count=_count)
  register(f'mqar_{_count}', Suite(_pairs, problem.begins_with_answer, 4))
