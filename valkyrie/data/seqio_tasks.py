"""Tasks of documents as seqio tasks, for mixtures and preprocessors of seqio.

The import registers the tasks that `document_source.register` has made. Tasks that it makes later
are registered at once.
"""

from collections.abc import Sequence
from typing import Any

import seqio
import tensorflow as tf

from valkyrie.config.suggest import did_you_mean
from valkyrie.data.document_source import TASKS, DocumentSource, DocumentTask
from valkyrie.errors import ConfigurationError, ValkyrieError


class SeqioSource(seqio.DataSource):
  """A source of examples {'inputs': prompt, 'targets': text, 'sequence_key', 'name'}: tf.string [].

  Attributes:
    source: the source of the documents.
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
    shard = shard_info or seqio.ShardInfo(index=0, num_shards=1)
    names = ('targets', 'sequence_key', 'name', 'inputs')  # in the order of TextDocument

    def examples():
      try:
        for document in self.source.documents(split, shard.index, shard.num_shards):
          values = (value.encode('utf-8', errors='replace') for value in document)
          yield dict(zip(names, values, strict=True))
      except ValkyrieError as error:
        self.failure = error
        raise

    return tf.data.Dataset.from_generator(
      examples, output_signature={name: tf.TensorSpec((), tf.string) for name in names}
    )


def publish(name: str, task: DocumentTask) -> None:
  """Registers a task of documents with seqio: bytes, with EOS or prompts."""
  source: Any = SeqioSource(task.source)  # seqio's class breaks its own Protocol
  feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=not task.prompts, dtype=tf.int32)
  features = ('inputs', 'targets') if task.prompts else ('targets',)
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features=dict.fromkeys(features, feature),
  )


def rates(module: str, mixture: str) -> dict[str, float]:
  """{'module:TASK': rate} of a seqio Mixture that a module, which is loaded, has registered.

  Raises:
    ConfigurationError: there is no such mixture.
  """
  registered = list(seqio.MixtureRegistry.names())
  if mixture not in registered:
    raise ConfigurationError(
      f'The module {module} registers no seqio mixture {mixture!r}.'
      f'{did_you_mean(mixture, registered)}'
    )
  found = seqio.MixtureRegistry.get(mixture)
  return {f'{module}:{task.name}': float(found.get_rate(task)) for task in found.tasks}


for _name, _task in TASKS.items():
  publish(_name, _task)
