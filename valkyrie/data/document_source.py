"""Sources of whole documents, the tasks that they are registered as, and the readers of tasks.

The store of such a task is built without TensorFlow. `seqio_tasks.publish` registers it with seqio.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import os
import pathlib
import pkgutil
import re
import sys
import types
from typing import Any, NamedTuple, Self
import zlib

import numpy as np

from valkyrie import foreign
from valkyrie.config import current_folder
from valkyrie.config.suggest import did_you_mean
from valkyrie.data import store_writer, vocabularies
from valkyrie.data.selection import Selection
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError

OURS = 'valkyrie.tasks'
_PIECE = 2**22  # characters
DISTANCES = tuple(2**power for power in range(6, 15))
NOISE = 'abcdefghijklmnopqrstuvwxyz'
DIGITS = '0123456789'
SAMPLE = 'sample'  # the entry of store.json with a hash of generated problems
MODULE = 'module'  # the entry of store.json with the hash of the module of a user's task
_SAMPLED = 32


class TextDocument(NamedTuple):
  """A document. Documents with the same `sequence_key` belong together, in the order of the source.

  A task with `prompts` puts the `prompt` before the text, which is then the answer.
  """

  text: str
  sequence_key: str
  name: str
  prompt: str = ''


class DocumentSource(abc.ABC):
  """A source of documents; `splits` names its splits, such as ('train', 'validation')."""

  other_than_text = ''  # what the documents are where they are not text, such as 'token ids'

  def __init__(self, splits: tuple[str, ...]):
    self.splits = splits

  @abc.abstractmethod
  def documents(
    self, split: str, shard: int, shards: int
  ) -> Iterator[TextDocument | store_writer.Document]:
    """The documents of one of `shards` parts; each document is in exactly one part."""

  @abc.abstractmethod
  def describe(self, split: str) -> dict[str, Any]:
    """The origin of the documents, for store.json; raises DataError if the source is damaged.

    Shards with different descriptions are never joined, so include what `files` does not name.
    """

  def files(self, split: str) -> SourceFiles | None:
    """The files that the documents are read from; None if there are none to compare."""
    return None

  def encoded_by(self, vocabulary: Vocabulary) -> Self:
    """This source, or one whose documents are tokens of the vocabulary."""
    return self

  def at(self, location: str | None, **options: str) -> Self:
    """This source with its documents at `location`, and with these options."""
    given = [f'the option {name}' for name in options]
    if location is not None:
      given.insert(0, f'the source {location!r}')
    raise ConfigurationError(
      f'{type(self).__name__} has its own documents, but got {" and ".join(given)}. Remove '
      'TaskFeed.source and TaskFeed.options, or --source and --option.'
    )


class DocumentTask(NamedTuple):
  """A registered task: the text of each document or, with `prompts`, prompts and answers."""

  source: DocumentSource
  prompts: bool


TASKS: dict[str, DocumentTask] = {}


def register(name: str, source: DocumentSource, *, prompts: bool = False) -> None:
  """Registers a task; ConfigurationError if there is one of this name."""
  if name in TASKS:
    raise ConfigurationError(f'The task {name!r} is registered twice. Rename one of the two.')
  TASKS[name] = DocumentTask(source, prompts)


def our_modules() -> list[types.ModuleType]:
  """The modules that register our tasks, imported."""
  folder = importlib.import_module(OURS).__path__
  found = pkgutil.iter_modules(folder, f'{OURS}.')
  names = sorted(module.name for module in found)
  return [importlib.import_module(name) for name in names]


def loaded(task: str) -> tuple[str, str]:
  """Imports the module of a task, NAME of ours or 'package.module:NAME' -> (module, NAME)."""
  module, colon, name = task.partition(':')
  if not colon:
    name = task
    first, *_ = re.split('[./]', task)
    module = f'{OURS}.{first}'
  else:
    current_folder.search(module)
  try:
    found = importlib.util.find_spec(module) is not None
  except (ImportError, ValueError):
    found = False
  if not found:
    known = [ours.__name__.removeprefix(f'{OURS}.') for ours in our_modules()]
    raise ConfigurationError(
      f'There is no module {module} to register the task {task!r}.{did_you_mean(task, TASKS)} '
      f"Use one of {', '.join(known)}, or 'package.module:NAME' for a task of your own."
    )
  if module not in sys.modules and not module.startswith('valkyrie.'):  # it may take seconds
    print(f'loading {module}', file=sys.stderr, flush=True)
  try:
    with quiet():
      importlib.import_module(module)
  except ValueError as error:
    if 'Provider name not registered' not in str(error):
      raise
    raise ConfigurationError(
      f'The module {module} cannot be imported ({error}). If that is a task of documents, call '
      'valkyrie.data.seqio_tasks.publish() in the module before this name is used.'
    ) from error
  return module, name


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Discards the standard error: TensorFlow reports a missing GPU there at every log level."""
  sys.stderr.flush()
  kept = os.dup(2)
  try:
    with open(os.devnull, 'w') as null:
      os.dup2(null.fileno(), 2)
    yield
  finally:
    os.dup2(kept, 2)
    os.close(kept)


class TaskReader(NamedTuple):
  """One split of a task.

  description: the origin of its documents, for store.json.
  modules: the names of loaded modules with its code.
  files: the files of the source; None if it names none.
  documents: (shard, shards) -> the tokenized documents of one of `shards` parts.
  """

  description: dict[str, Any]
  modules: list[str]
  files: SourceFiles | None
  documents: Callable[[int, int], Iterator[store_writer.Document]]


def document_reader(task: DocumentTask, selection: Selection) -> TaskReader:
  """The reader of a task of documents. It tokenizes a long text piece by piece."""
  check_split(selection, task.source.splits)
  split = selection.split
  source = relocated(task.source, selection)
  source = source.encoded_by(selection.vocabulary)

  def documents(shard: int, shards: int) -> Iterator[store_writer.Document]:
    for document in source.documents(split, shard, shards):
      if isinstance(document, store_writer.Document):
        yield document
      else:
        yield _tokenized(document, selection.vocabulary, has_prompt=task.prompts)

  modules = [kind.__module__ for kind in type(source).__mro__]
  return TaskReader(source.describe(split), modules, source.files(split), documents)


def _tokenized(
  document: TextDocument, vocabulary: Vocabulary, *, has_prompt: bool
) -> store_writer.Document:
  """The tokens of a document; a long answer is tokenized piece by piece, as it is written."""
  prompt = []
  if has_prompt:
    prompt = list(pieces(document.prompt))
  answer = list(pieces(document.text))
  texts = [*prompt, *answer]
  text_bytes = sum(len(piece.encode('utf-8', errors='replace')) for piece in texts)

  def ids() -> Iterator[np.ndarray]:
    before = ''
    for piece in texts:
      yield vocabularies.following(vocabulary.ids, before, piece)
      before = piece

  pieces_of_ids = ids()
  prompt_ids = list(itertools.islice(pieces_of_ids, len(prompt)))
  prompt_tokens = sum(len(piece) for piece in prompt_ids)
  tokens = itertools.chain(prompt_ids, pieces_of_ids)
  if len(answer) <= 1:
    tokens = np.concatenate([np.empty(0, np.int32), *tokens])
  key = document.sequence_key or None
  return store_writer.Document(tokens, text_bytes, key, prompt_tokens)


def check_split(selection: Selection, splits: Iterable[str]) -> None:
  """Raises a ConfigurationError if the task does not have the selected split."""
  if selection.split not in splits:
    raise ConfigurationError(
      f'The task {selection.task} has no split {selection.split!r}. Use one of {", ".join(splits)}.'
    )


def relocated(documents: DocumentSource, selection: Selection) -> DocumentSource:
  """The documents at another location or with options, if the selection names any."""
  if selection.source is None and not selection.options:
    return documents
  return documents.at(selection.source, **selection.options)


def stable_hash(text: str) -> int:
  """A 64-bit hash that is the same on every machine, for splits."""
  digest = hashlib.blake2b(digest_size=8)
  for piece in pieces(text):
    digest.update(piece.encode('utf-8', errors='replace'))
  return int.from_bytes(digest.digest(), 'big')


def pieces(text: str) -> Iterator[str]:
  """A text in pieces of at most 4 million characters, each to a line end if it has one."""
  begin = 0
  while begin < len(text):
    end = begin + _PIECE
    if end < len(text):
      end = text.rfind('\n', begin, end) + 1 or end
    yield text[begin:end]
    begin = end


class Problem(NamedTuple):
  """A prompt, and the answer to learn and score; both ASCII, one byte per symbol."""

  prompt: str
  answer: str


# RandomState's stream is frozen, so that every machine generates the same problems. A sequence of
# problems is one stream of documents, for `TaskFeed.reset_at = 'sequence'`.
Generate = Callable[[np.random.RandomState], Problem | Sequence[Problem]]


class GeneratedSource(DocumentSource):
  """Generated problems that need memory: a prompt, then its answer.

  Problem n of a split is a pure function of the task's name, the split and n.
  """

  def __init__(self, name: str, problems: Mapping[str, tuple[int, Generate]]):
    super().__init__(splits=tuple(problems))
    self._name = name
    self._problems = problems

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    count, _ = self._problems[split]
    begin = count * shard // shards
    end = count * (shard + 1) // shards
    for number in range(begin, end):
      key = str(number)
      for problem in self._problem(split, number):
        yield TextDocument(problem.answer, key, key, prompt=problem.prompt)

  def describe(self, split: str) -> dict[str, Any]:
    count, _ = self._problems[split]
    return {'kind': self._name, 'problems': count, SAMPLE: self._sample(split)}

  def _problem(self, split: str, number: int) -> Sequence[Problem]:
    _, generate = self._problems[split]
    seed = zlib.crc32(f'{self._name}/{split}'.encode())
    problems = generate(np.random.RandomState([seed, number]))
    if isinstance(problems, Problem):
      return [problems]
    return problems

  def _sample(self, split: str) -> str:
    """A hash of some problems, which tells whether the code generates the problems of a store."""
    count, _ = self._problems[split]
    digest = hashlib.blake2b(digest_size=16)
    numbers = np.linspace(0, count - 1, _SAMPLED).astype(int)
    for number in np.unique(numbers).tolist():
      for problem in self._problem(split, number):
        digest.update(f'{len(problem.prompt)} {problem.prompt}{problem.answer}\n'.encode())
    return digest.hexdigest()


def module_hash(task: str) -> str | None:
  """BLAKE2b of the file of a task's module, which is not run; None if it is not found."""
  module, _, _ = task.partition(':')
  places: Sequence[str] | None = None
  spec = None
  names = module.split('.')
  for count in range(1, len(names) + 1):
    spec = importlib.machinery.PathFinder.find_spec('.'.join(names[:count]), places)
    if spec is None:
      return None
    places = spec.submodule_search_locations
  try:
    content = foreign.content(str(spec and spec.origin))
  except (OSError, ValueError):
    return None
  return hashlib.blake2b(content, digest_size=16).hexdigest()


def check_generated(
  path: pathlib.Path, recorded: Mapping[str, Any], selection: Selection, rebuild: str
) -> None:
  """Raises a DataError if a task no longer generates the problems of a store.

  A user's module, which may take seconds to load, is run only if its file has changed.
  """
  if SAMPLE not in recorded:
    return
  if ':' in selection.task and module_hash(selection.task) in (None, recorded.get(MODULE)):
    return
  _, name = loaded(selection.task)
  task = TASKS.get(name)
  sample = None
  if task is not None and selection.split in task.source.splits:
    description = task.source.describe(selection.split)
    sample = description.get(SAMPLE)
  if sample != recorded[SAMPLE]:
    raise DataError(
      f'The token store {path} has other problems than the task {selection.task} generates now: '
      f'its code has changed. To build it again, {rebuild}'
    )


def register_problems(name: str, problems: Mapping[str, tuple[int, Generate]]) -> None:
  """Registers a task of {split: (number of problems or streams, function that generates one)}."""
  register(name, GeneratedSource(name, problems), prompts=True)


def register_over_distances(
  name: str, nearest: int, generate: Callable[[np.random.RandomState, int], Problem]
) -> None:
  """Registers NAME.64, NAME.128, ... up to NAME.16384: one task for each distance.

  The validation split asks for content at exactly this distance. The training split asks at every
  distance from `nearest` up to it, log-uniformly, because a model that never sees short distances
  hardly learns the task. The split 'near_and_far' has the distances of the training split, for the
  evaluation of a trained model.
  """

  def splits(distance: int) -> dict[str, tuple[int, Generate]]:
    def near_or_far(random):
      drawn = np.exp(random.uniform(np.log(nearest), np.log(distance + 1)))
      return generate(random, int(drawn))

    training = max(1024, 2**21 // distance)
    validation = max(128, 2**17 // distance)
    return {
      'train': (training, near_or_far),
      'validation': (validation, lambda random: generate(random, distance)),
      'near_and_far': (validation, near_or_far),
    }

  for distance in DISTANCES:
    register_problems(f'{name}.{distance}', splits(distance))


def symbols(random: np.random.RandomState, alphabet: str, count: int) -> str:
  """`count` random symbols of the alphabet."""
  return ''.join(alphabet[i] for i in random.randint(len(alphabet), size=count))


def leading_noise(random: np.random.RandomState) -> str:
  """16 to 31 letters that begin a problem, so that its content follows the first 16 tokens."""
  return symbols(random, NOISE, random.randint(16, 32))
