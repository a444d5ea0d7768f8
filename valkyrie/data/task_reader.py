"""Tokenized documents of a task, by the vocabulary of the run."""

from collections.abc import Iterator, Mapping
import itertools
import sys
from typing import Any, Protocol

import numpy as np

from valkyrie.config.suggest import did_you_mean
from valkyrie.data import store_writer, task_module
from valkyrie.data.document_source import TASKS, DocumentSource, DocumentTask, TextDocument, pieces
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError


class TaskReader(Protocol):
  """One split of a task.

  description: the origin of its documents; modules: names of loaded modules with its code.
  """

  description: dict[str, Any]
  modules: list[str]

  def files(self) -> SourceFiles | None:
    """The files of the source; None if it names none."""
    ...

  def documents(self, shard: int, shards: int) -> Iterator[store_writer.Document]:
    """The tokenized documents of one of `shards` parts; DataError if a read fails."""
    ...


def open_task(
  module: str,
  task: str,
  split: str,
  vocabulary: Vocabulary,
  source: str | None,
  options: Mapping[str, str],
) -> TaskReader:
  """The reader of a split of a task, which the import of `module` registers.

  It loads TensorFlow only for a task that is not one of documents (`document_source`).

  Raises:
    ConfigurationError: the task is not registered, or lacks the split or the feature 'targets', or
      a source was given to a task without a location.
    DataError: the source is damaged.
  """
  task_module.load(module)
  if task in TASKS:
    return DocumentReader(task, TASKS[task], split, vocabulary, source, options)
  known = [*TASKS]
  if 'seqio' in sys.modules:
    seqio_reader = task_module.load('valkyrie.data.seqio_reader')
    known = seqio_reader.registered()
    if task in known:
      return seqio_reader.SeqioReader(task, split, vocabulary, source, options)
  raise ConfigurationError(
    f'The module {module} registers no task {task!r}.{did_you_mean(task, known)} '
    'A mixture is endless and cannot be stored. Name its tasks one by one.'
  )


class DocumentReader(TaskReader):
  """One split of a task of documents, which it tokenizes itself."""

  def __init__(
    self,
    name: str,
    task: DocumentTask,
    split: str,
    vocabulary: Vocabulary,
    source: str | None,
    options: Mapping[str, str],
  ):
    check_split(name, split, task.source.splits)
    self._source = relocated(task.source, source, options)
    self._prompts = task.prompts
    self._split = split
    self._vocabulary = vocabulary
    self.description = self._source.describe(split)
    self.modules = [kind.__module__ for kind in type(self._source).__mro__]

  def files(self) -> SourceFiles | None:
    return self._source.files(self._split)

  def documents(self, shard: int, shards: int) -> Iterator[store_writer.Document]:
    for document in self._source.documents(self._split, shard, shards):
      yield self._tokenized(document)

  def _tokenized(self, document: TextDocument) -> store_writer.Document:
    """The tokens of a document; those of a long text come in pieces."""
    asked = [*pieces(document.prompt)] if self._prompts else []
    answer = [*pieces(document.text)]
    prompt = [self._vocabulary.ids(piece) for piece in asked]
    tokens = itertools.chain(prompt, map(self._vocabulary.ids, answer))
    if len(answer) <= 1:
      tokens = np.concatenate([np.empty(0, np.int32), *tokens])
    return store_writer.Document(
      tokens,
      sum(len(piece.encode('utf-8', errors='replace')) for piece in [*asked, *answer]),
      document.sequence_key or None,
      sum(map(len, prompt)),
    )


def check_split(task: str, split: str, splits: tuple[str, ...]) -> None:
  """Raises a ConfigurationError if a task lacks the split."""
  if split not in splits:
    raise ConfigurationError(
      f'The task {task} has no split {split!r}. Use one of {", ".join(splits)}.'
    )


def relocated(
  documents: DocumentSource, source: str | None, options: Mapping[str, str]
) -> DocumentSource:
  """The documents at another location or with options, if any were given."""
  return documents if source is None and not options else documents.at(source, **options)
