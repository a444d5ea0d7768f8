"""Tasks of generated problems that need memory: a prompt, then its answer.

Problem n of a split is a pure function of the task's name, the split and n. A task over distances
is registered as NAME.64, NAME.128, ... up to NAME.16384. Its validation split asks for content at
exactly this distance. Its training split asks at every distance up to it, log-uniformly, because a
model that never sees short distances hardly learns the task. The split 'near_and_far' has the
distances of the training split, for the evaluation of a trained model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
import zlib

import numpy as np

from valkyrie.data import document_source
from valkyrie.data.document_source import DocumentSource, TextDocument

DISTANCES = tuple(2**power for power in range(6, 15))
NOISE = 'abcdefghijklmnopqrstuvwxyz'
DIGITS = '0123456789'


class Problem(NamedTuple):
  """A prompt, and the answer to learn and score; both ASCII, one byte per symbol."""

  prompt: str
  answer: str


# RandomState's stream is frozen, so that every machine generates the same problems. A sequence of
# problems is one stream of documents, for `TaskFeed.reset_at = 'sequence'`.
Generate = Callable[[np.random.RandomState], Problem | Sequence[Problem]]


class GeneratedSource(DocumentSource):
  """Generated problems: {split: (number of problems or streams, function that generates one)}."""

  def __init__(self, name: str, problems: Mapping[str, tuple[int, Generate]]):
    super().__init__(splits=tuple(problems))
    self._name = name
    self._problems = problems

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    count, generate = self._problems[split]
    seed = zlib.crc32(f'{self._name}/{split}'.encode())
    for number in range(count * shard // shards, count * (shard + 1) // shards):
      problems = generate(np.random.RandomState([seed, number]))
      for problem in [problems] if isinstance(problems, Problem) else problems:
        yield TextDocument(problem.answer, str(number), str(number), prompt=problem.prompt)

  def describe(self, split: str) -> dict[str, Any]:
    return {'kind': self._name, 'problems': self._problems[split][0]}


def register(name: str, problems: Mapping[str, tuple[int, Generate]]) -> None:
  """Registers the task of {split: (number of problems, function that generates one)}."""
  document_source.register(name, GeneratedSource(name, problems), prompts=True)


def register_over_distances(
  name: str, nearest: int, generate: Callable[[np.random.RandomState, int], Problem]
) -> None:
  """Registers NAME.D for every D of DISTANCES; `generate` takes a distance from `nearest` to D."""

  def splits(distance: int) -> dict[str, tuple[int, Generate]]:
    def near_or_far(random):
      drawn = np.exp(random.uniform(np.log(nearest), np.log(distance + 1)))
      return generate(random, int(drawn))

    most, few = max(1024, 2**21 // distance), max(128, 2**17 // distance)
    return {
      'train': (most, near_or_far),
      'validation': (few, lambda random: generate(random, distance)),
      'near_and_far': (few, near_or_far),
    }

  for distance in DISTANCES:
    register(f'{name}.{distance}', splits(distance))


def symbols(random: np.random.RandomState, alphabet: str, count: int) -> str:
  """`count` random symbols of the alphabet."""
  return ''.join(alphabet[i] for i in random.randint(len(alphabet), size=count))


def leading_noise(random: np.random.RandomState) -> str:
  """16 to 31 letters that begin a problem, so that its content follows the first 16 tokens."""
  return symbols(random, NOISE, random.randint(16, 32))
