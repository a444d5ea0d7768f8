"""Seqio: our tasks in its registry, and stores of tasks that only seqio knows.

`publish` registers the tasks of documents with seqio, for `seqio.get_mixture_or_task`, mixtures and
preprocessors:

  from valkyrie.data import seqio_tasks
  seqio_tasks.publish()
  task = seqio.get_mixture_or_task('fineweb')
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import os
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from valkyrie.config.suggest import did_you_mean
from valkyrie.data import document_source, store_writer
from valkyrie.data.document_source import TASKS, DocumentSource, TaskReader
from valkyrie.data.selection import Selection
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError, DataError, ValkyrieError

tf.config.list_logical_devices()  # reports a missing GPU, where `document_source.quiet` hides it


def publish() -> None:
  """Registers all tasks of documents with seqio: `valkyrie.tasks`, and all others so far.

  A second call registers the tasks that were added since the first one. A task that seqio has under
  the same name raises a ConfigurationError.
  """
  document_source.our_modules()  # their import registers tasks
  known = seqio.TaskRegistry.names()
  for name, task in TASKS.items():
    if name in known:
      registered = seqio.TaskRegistry.get(name).source
      if getattr(registered, 'source', None) is not task.source:
        raise ConfigurationError(f'seqio has another task {name!r} already. Rename one of the two.')
      continue
    source: Any = SeqioSource(task.source)  # seqio's class breaks its own Protocol
    # Texts are bytes, with an EOS if the task has no prompts.
    feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=not task.prompts, dtype=tf.int32)
    features = ['targets']
    if task.prompts:
      features.insert(0, 'inputs')
    seqio.TaskRegistry.add(
      name,
      source=source,
      preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
      output_features=dict.fromkeys(features, feature),
    )


def rates(mixture: str) -> dict[str, float]:
  """{task, as `TaskFeed.task` names it: rate} of a seqio Mixture 'package.module:NAME'."""
  module, name = document_source.loaded(mixture)
  known = list(seqio.MixtureRegistry.names())
  if name not in known:
    raise ConfigurationError(
      f'The module {module} registers no seqio mixture {name!r}.{did_you_mean(name, known)} Call '
      f'seqio.MixtureRegistry.add({name!r}, ...) in that module, or correct the name.'
    )
  registered = seqio.MixtureRegistry.get(name)
  rates_of_tasks: dict[str, float] = {}
  for task in registered.tasks:
    rate = registered.get_rate(task)
    rates_of_tasks[f'{module}:{task.name}'] = float(rate)
  return rates_of_tasks


class SeqioSource(seqio.DataSource):
  """A source of examples {'inputs': prompt, 'targets': text, 'sequence_key', 'name'}: tf.string [].

  failure: the error that ended the latest read, or None; tf.data passes on only its message.
  """

  def __init__(self, source: DocumentSource):
    super().__init__(splits=source.splits)
    self.source = source
    self.failure: ValkyrieError | None = None

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def list_shards(self, split: str) -> Sequence[str]:
    return [split]

  def get_dataset(  # pyright: ignore[reportIncompatibleMethodOverride]
    self,
    split: str = 'train',
    shuffle: bool = False,
    seed: int | None = None,
    shard_info: seqio.ShardInfo | None = None,
    **unused,
  ) -> tf.data.Dataset:
    """The documents in a fixed order: `shuffle` is ignored, since the feed shuffles."""
    shard = shard_info or seqio.ShardInfo(0, 1)
    names = ('targets', 'sequence_key', 'name', 'inputs')  # in the order of TextDocument

    def examples():
      try:
        for document in self.source.documents(split, shard.index, shard.num_shards):
          assert isinstance(document, document_source.TextDocument)
          values = (value.encode('utf-8', errors='replace') for value in document)
          yield dict(zip(names, values, strict=True))
      except ValkyrieError as error:
        self.failure = error
        raise

    text = tf.TensorSpec((), tf.string)
    signature = {name: text for name in names}
    return tf.data.Dataset.from_generator(examples, output_signature=signature)


class SeqioVocabulary(seqio.PassThroughVocabulary):
  """Encodes by the wrapped vocabulary, inside tf.data too, so that the ids are the same."""

  def __init__(self, vocabulary: Vocabulary):
    super().__init__(vocabulary.size, vocabulary.eos_id)
    self._vocabulary = vocabulary

  def _encode(self, s: str) -> Sequence[int]:
    return self._vocabulary.encode(s)

  def _decode(self, ids: Iterable[int]) -> str:
    return self._vocabulary.decode(ids)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    def encode(text: tf.Tensor) -> np.ndarray:
      content = bytes(text.numpy())
      decoded = content.decode('utf-8', errors='replace')
      return self._vocabulary.ids(decoded)

    ids = tf.py_function(encode, [s], tf.int32)
    return tf.ensure_shape(ids, [None])

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    def decode(ids: tf.Tensor) -> str:
      numbers = ids.numpy().tolist()
      return self._vocabulary.decode(numbers)

    text = tf.py_function(decode, [ids], tf.string)
    return tf.ensure_shape(text, [])


def task_reader_of(name: str, selection: Selection) -> TaskReader:
  """The reader of a registered task, whose documents tf.data reads."""
  original: Any = seqio.TaskRegistry.get(name)
  source = original.source
  split = selection.split
  document_source.check_split(selection, original.splits)
  if 'targets' not in original.output_features:
    raise ConfigurationError(
      f"The task {name} has no feature 'targets', only {', '.join(original.output_features)}. "
      "Rename the feature of the text to 'targets'."
    )
  if isinstance(source, SeqioSource):
    documents = document_source.relocated(source.source, selection)
    source = SeqioSource(documents)
    description = documents.describe(split)
    files = documents.files(split)
  elif selection.source is None and not selection.options:
    documents = source
    description = {'kind': str(source)}
    files = _files(source, split)
  else:
    raise ConfigurationError(
      f'The source of the task {name} is not of documents (valkyrie.data.document_source) and has '
      f'neither another location nor options, but got {selection.source!r} and '
      f'{dict(selection.options)}. Remove TaskFeed.source and TaskFeed.options, or --source and '
      '--option.'
    )
  code = list(type(documents).__mro__)
  code += [getattr(step, 'func', step) for step in original.preprocessors]
  modules = [str(part.__module__) for part in code]
  adapter = SeqioVocabulary(selection.vocabulary)
  features = {}
  for feature, settings in original.output_features.items():
    features[feature] = dataclasses.replace(settings, vocabulary=adapter)
  task = original.replace(source=source, output_features=features)
  how = {'split': split, 'shuffle': False, 'try_in_mem_cache': False}

  def read(shard: int, shards: int) -> Iterator[store_writer.Document]:
    try:
      part = seqio.ShardInfo(shard, shards)
      dataset = task.get_dataset(shard_info=part, **how)
      for example in dataset.as_numpy_iterator():
        yield _document(example, 'inputs' in features, selection.vocabulary)
    except tf.errors.OpError as error:
      raise getattr(source, 'failure', None) or DataError(
        f'Reading shard {shard} of {name} failed: {error.message}. Correct the files of the task, '
        'and run the same command again: finished shards are kept.'
      ) from error

  return TaskReader(description, modules, files, read)


def _files(source: Any, split: str) -> SourceFiles | None:
  """The files of a source of seqio; None unless all are on this machine."""
  if not isinstance(source, seqio.FileDataSource):
    return None
  files = [os.path.abspath(file) for file in source.list_shards(split)]
  are_here = [os.path.isfile(file) for file in files]
  if not files or not all(are_here):
    return None
  return SourceFiles(files)


def _document(
  example: dict[str, Any],
  prompts: bool,
  vocabulary: Vocabulary,
) -> store_writer.Document:
  prompt = np.empty(0, np.int32)
  if prompts:
    prompt = example['inputs']
  answer = example['targets']
  has_eos = len(answer) and answer[-1] == vocabulary.eos_id
  if has_eos:  # the store adds it
    answer = answer[:-1]
  text_bytes = 0
  for feature, tokens in (('inputs', prompt), ('targets', answer)):
    text = example.get(f'{feature}_pretokenized')
    if text is None:
      text = vocabulary.decode(tokens).encode()
    text_bytes += len(text)
  key = example.get('sequence_key') or None
  if key is not None:
    key = key.decode('utf-8', errors='replace')
  tokens = np.concatenate([prompt, answer])
  prompt_tokens = len(prompt)
  bos = vocabulary.bos
  begin = tuple(tokens[: len(bos)])
  if begin == bos:  # the store adds it
    tokens = tokens[len(bos) :]
    prompt_tokens = max(prompt_tokens - len(bos), 0)
  return store_writer.Document(tokens, text_bytes, key, prompt_tokens)
