"""Tokenized documents of a seqio task, with its vocabulary replaced by that of the run."""

from collections.abc import Iterator, Mapping
import dataclasses
import os
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from valkyrie.data import store_writer
from valkyrie.data.seqio_tasks import SeqioSource
from valkyrie.data.seqio_vocabulary import SeqioVocabulary
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.task_reader import TaskReader, check_split, relocated
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError

tf.config.list_logical_devices()  # reports a missing GPU, where `task_module.load` is silent


def registered() -> list[str]:
  """The names of all tasks of seqio."""
  return [*seqio.TaskRegistry.names()]


class SeqioReader(TaskReader):
  """One split of a registered task, read by tf.data.

  Raises:
    ConfigurationError: the task lacks the split or the feature 'targets', or a source was given to
      a task without a location.
    DataError: the source is damaged.
  """

  def __init__(
    self,
    task: str,
    split: str,
    vocabulary: Vocabulary,
    source: str | None,
    options: Mapping[str, str],
  ):
    original: Any = seqio.TaskRegistry.get(task)
    check_split(task, split, tuple(original.splits))
    if 'targets' not in original.output_features:
      raise ConfigurationError(
        f"The task {task} has no feature 'targets', only {', '.join(original.output_features)}. "
        "Rename the feature of the text to 'targets'."
      )
    self._source = original.source
    self.description = {'kind': str(original.source)}
    if isinstance(original.source, SeqioSource):
      self._source = SeqioSource(relocated(original.source.source, source, options))
      self.description = self._source.source.describe(split)
    elif source is not None or options:
      raise ConfigurationError(
        f'The source of the task {task} is not of documents (valkyrie.data.document_source) and '
        f'has neither another location nor options, but got {source!r} and {dict(options)}. '
        'Remove TaskFeed.source and TaskFeed.options, or --source and --option.'
      )
    documents = getattr(self._source, 'source', self._source)
    steps = [getattr(step, 'func', step) for step in original.preprocessors]
    self.modules = [str(code.__module__) for code in [*type(documents).__mro__, *steps]]
    adapter = SeqioVocabulary(vocabulary)
    features = {
      name: dataclasses.replace(feature, vocabulary=adapter)
      for name, feature in original.output_features.items()
    }
    self._task = original.replace(source=self._source, output_features=features)
    self._split = split
    self._vocabulary = vocabulary

  def files(self) -> SourceFiles | None:
    if isinstance(self._source, SeqioSource):
      return self._source.source.files(self._split)
    if not isinstance(self._source, seqio.FileDataSource):
      return None
    found = [os.path.abspath(file) for file in self._source.list_shards(self._split)]
    return SourceFiles(found) if found and all(map(os.path.isfile, found)) else None

  def documents(self, shard: int, shards: int) -> Iterator[store_writer.Document]:
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
      raise getattr(self._source, 'failure', None) or DataError(
        f'Reading shard {shard} of {self._task.name} failed: {error.message}'
      ) from error

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
