"""A task by its name: the module that registers it, and a reader of its tokenized documents."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import os
import pathlib
import pkgutil
import sys
from typing import Any, NamedTuple

import numpy as np

from valkyrie.config.suggest import did_you_mean
from valkyrie.data import store_writer
from valkyrie.data.document_source import DocumentSource, DocumentTask, TextDocument, pieces
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.token_store import Selection
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError

OURS = 'valkyrie.tasks'


def our_modules() -> list[str]:
  """The names of the modules that register our tasks."""
  folder = importlib.import_module(OURS).__path__
  return sorted(module.name for module in pkgutil.iter_modules(folder, f'{OURS}.'))


def of_task(task: str) -> tuple[str, str]:
  """(the module, the name there) of a task: NAME of ours, or 'package.module:NAME'.

  Raises:
    ConfigurationError: there is no such module.
  """
  module, colon, name = task.partition(':')
  if not colon:
    name = task
    module = f'{OURS}.{task.replace("/", ".").split(".")[0]}'
  try:
    found = importlib.util.find_spec(module) is not None
  except (ImportError, ValueError):
    found = False
  if not found:
    known = [ours.removeprefix(f'{OURS}.') for ours in our_modules()]
    raise ConfigurationError(
      f'There is no module {module} to register the task {task!r}.{did_you_mean(task, known)} '
      f"Use one of {', '.join(known)}, or 'package.module:NAME' for a task of your own."
    )
  return module, name


def load(module: str) -> None:
  """Imports the module of a task, and logs that where it may take seconds.

  Raises:
    ConfigurationError: the module names a task in seqio that was not published.
  """
  if module in sys.modules:
    return
  if not module.startswith('valkyrie.'):
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


def code_hash(modules: Iterable[str]) -> str:
  """SHA-256 of the code that produces tokens: of these loaded modules and of all in this folder.

  Modules of the standard library are left out.
  """
  files = [
    getattr(sys.modules.get(name), '__file__', None)
    for name in sorted({*modules})
    if name.split('.')[0] not in sys.stdlib_module_names
  ]
  digest = hashlib.sha256()
  for file in [*filter(None, files), *sorted(pathlib.Path(__file__).parent.glob('*.py'))]:
    digest.update(hashlib.sha256(pathlib.Path(file).read_bytes()).digest())
  return digest.hexdigest()


class TaskReader(NamedTuple):
  """One split of a task.

  description: the origin of its documents, for store.json.
  modules: the names of loaded modules with its code.
  files: the files of the source; None if it names none.
  documents: (shard, shards) -> the tokenized documents of one of `shards` parts; DataError if a
    read fails.
  """

  description: dict[str, Any]
  modules: list[str]
  files: SourceFiles | None
  documents: Callable[[int, int], Iterator[store_writer.Document]]


def document_reader(task: DocumentTask, selection: Selection) -> TaskReader:
  """The reader of a task of documents, which it tokenizes itself."""
  check_split(selection, task.source.splits)
  source, split = relocated(task.source, selection), selection.split

  def documents(shard: int, shards: int) -> Iterator[store_writer.Document]:
    for document in source.documents(split, shard, shards):
      yield _tokenized(document, task.prompts, selection.vocabulary)

  modules = [kind.__module__ for kind in type(source).__mro__]
  return TaskReader(source.describe(split), modules, source.files(split), documents)


def _tokenized(
  document: TextDocument, prompts: bool, vocabulary: Vocabulary
) -> store_writer.Document:
  """Tokenizes a document; a long text piece by piece."""
  asked = [*pieces(document.prompt)] if prompts else []
  answer = [*pieces(document.text)]
  prompt = [vocabulary.ids(piece) for piece in asked]
  tokens = itertools.chain(prompt, map(vocabulary.ids, answer))
  if len(answer) <= 1:
    tokens = np.concatenate([np.empty(0, np.int32), *tokens])
  return store_writer.Document(
    tokens,
    sum(len(piece.encode('utf-8', errors='replace')) for piece in [*asked, *answer]),
    document.sequence_key or None,
    sum(map(len, prompt)),
  )


def check_split(selection: Selection, splits: Iterable[str]) -> None:
  """Raises a ConfigurationError if the selected split is not among those of the task."""
  if selection.split not in splits:
    raise ConfigurationError(
      f'The task {selection.task} has no split {selection.split!r}. Use one of {", ".join(splits)}.'
    )


def relocated(documents: DocumentSource, selection: Selection) -> DocumentSource:
  """The documents at another location or with options, if the selection names any."""
  if selection.source is None and not selection.options:
    return documents
  return documents.at(selection.source, **selection.options)
