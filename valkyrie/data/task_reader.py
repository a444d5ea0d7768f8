"""Tokenized documents of a seqio task, with its vocabulary replaced by a given one."""

from collections.abc import Iterator, Mapping
import dataclasses
import importlib
import itertools
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from valkyrie.config.suggest import did_you_mean
from valkyrie.data import provenance, store_writer
from valkyrie.data.document_source import PREPROCESSORS, DocumentSource, TextDocument, pieces
from valkyrie.data.seqio_vocabulary import SeqioVocabulary
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError


class TaskReader:
  """One split of a seqio task; `description` is the origin of its documents.

  Raises:
    ConfigurationError: the task is not registered, or lacks the split or the feature 'targets', or
      a source was given to a task without a location.
    DataError: the source is damaged.
  """

  def __init__(
    self,
    module: str,
    task: str,
    split: str,
    vocabulary: Vocabulary,
    source: str | None,
    options: Mapping[str, str],
  ):
    importlib.import_module(module)
    registered = seqio.TaskRegistry.names()
    if task not in registered:
      raise ConfigurationError(
        f'The module {module} registers no seqio task {task!r}.{did_you_mean(task, registered)} '
        'A mixture is endless and cannot be stored. Name its tasks one by one.'
      )
    original: Any = seqio.TaskRegistry.get(task)
    if split not in original.splits:
      raise ConfigurationError(
        f'The task {task} has no split {split!r}. Use one of {", ".join(original.splits)}.'
      )
    if 'targets' not in original.output_features:
      raise ConfigurationError(
        f"The task {task} has no feature 'targets', only {', '.join(original.output_features)}. "
        "Rename the feature of the text to 'targets'."
      )
    task_source = original.source
    self.description: dict[str, Any] = {'kind': str(task_source)}
    if isinstance(task_source, DocumentSource):
      if source is not None or options:
        task_source = task_source.at(source, **options)
      self.description = task_source.describe(split)
    elif source is not None or options:
      raise ConfigurationError(
        f'The source of the task {task} is not a DocumentSource (valkyrie.data.document_source) '
        f'and has neither another location nor options, but got {source!r} and {dict(options)}. '
        'Remove TaskFeed.source and TaskFeed.options, or --source and --option.'
      )
    self._source = task_source
    adapter = SeqioVocabulary(vocabulary)
    features = {
      name: dataclasses.replace(feature, vocabulary=adapter)
      for name, feature in original.output_features.items()
    }
    self._task = original.replace(source=task_source, output_features=features)
    self._split = split
    self._vocabulary = vocabulary

  def origin(self) -> dict[str, Any] | None:
    """The record of the source's files, see `provenance`; None if it has none."""
    source = self._source
    files = source.files(self._split) if isinstance(source, DocumentSource) else None
    return files and provenance.record(files)

  def documents(self, shard: int, shards: int) -> Iterator[store_writer.Document]:
    """The tokenized documents of one of `shards` parts; DataError if a read fails."""
    source = self._source
    if isinstance(source, DocumentSource) and tuple(self._task.preprocessors) == PREPROCESSORS:
      for document in source.documents(self._split, shard, shards):
        yield self._tokenized(document)
      return
    try:
      dataset = self._task.get_dataset(
        split=self._split,
        shuffle=False,
        shard_info=seqio.ShardInfo(shard, shards),
        try_in_mem_cache=False,
      )
      for example in dataset.as_numpy_iterator():
        yield self._document(example)
    except tf.errors.OpError as error:
      raise getattr(self._task.source, 'failure', None) or DataError(
        f'Reading shard {shard} of {self._task.name} failed: {error.message}'
      ) from error

  def _tokenized(self, document: TextDocument) -> store_writer.Document:
    """What the preprocessors would make of it; a long text is tokenized in pieces."""
    asked = [*pieces(document.prompt)] if 'inputs' in self._task.output_features else []
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

  def _document(self, example: dict[str, Any]) -> store_writer.Document:
    prompt = example['inputs'] if 'inputs' in self._task.output_features else np.empty(0, np.int32)
    answer = example['targets']
    if len(answer) and answer[-1] == self._vocabulary.eos_id:  # the store adds it
      answer = answer[:-1]
    key = example.get('sequence_key')
    return store_writer.Document(
      np.concatenate([prompt, answer]),
      self._text_bytes(example, 'inputs', prompt) + self._text_bytes(example, 'targets', answer),
      key.decode('utf-8', errors='replace') if key else None,
      len(prompt),
    )

  def _text_bytes(self, example: dict[str, Any], feature: str, tokens: np.ndarray) -> int:
    text = example.get(f'{feature}_pretokenized')
    return len(self._vocabulary.decode(tokens).encode()) if text is None else len(text)
