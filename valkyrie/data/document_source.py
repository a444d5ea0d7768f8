"""Seqio sources of whole documents, with any number of shards, a description and a location."""

import abc
from collections.abc import Iterator
import hashlib
from typing import Any, NamedTuple, Self

import seqio
import tensorflow as tf

from valkyrie.data.source_files import SourceFiles
from valkyrie.errors import ConfigurationError, ValkyrieError

_PIECE = 2**22  # characters


class TextDocument(NamedTuple):
  """A document. Documents with the same `sequence_key` belong together, in the order of the source.

  A task with a feature 'inputs' puts the `prompt` before the text, which is then its answer.
  """

  text: str
  sequence_key: str
  name: str
  prompt: str = ''


class DocumentSource(seqio.DataSource, abc.ABC):
  """Source of examples {'inputs': prompt, 'targets': text, 'sequence_key', 'name'}: tf.string [].

  Attributes:
    failure: the error that ended the latest read, or None; tf.data passes on only its message.
  """

  def __init__(self, splits: tuple[str, ...]):
    super().__init__(splits=splits)
    self.failure: ValkyrieError | None = None

  @abc.abstractmethod
  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    """The documents of one of `shards` parts; each document is in exactly one part."""

  @abc.abstractmethod
  def describe(self, split: str) -> dict[str, Any]:
    """The origin of the documents, for store.json; raises DataError if the source is damaged."""

  def files(self, split: str) -> SourceFiles | None:
    """The files that the documents are read from; None if there are none to compare."""
    del split

  def at(self, location: str | None, **options: str) -> Self:
    """This source with its documents at `location`, and with options of its own."""
    given = ' and '.join(
      [f'the source {location!r}'] * (location is not None) + [f'the option {n}' for n in options]
    )
    raise ConfigurationError(
      f'{type(self).__name__} has its own documents, but got {given}. Remove TaskFeed.source and '
      'TaskFeed.options, or --source and --option.'
    )

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return True

  def list_shards(self, split: str) -> list[str]:
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
        for document in self.documents(split, shard.index, shard.num_shards):
          values = (value.encode('utf-8', errors='replace') for value in document)
          yield dict(zip(names, values, strict=True))
      except ValkyrieError as error:
        self.failure = error
        raise

    return tf.data.Dataset.from_generator(
      examples, output_signature={name: tf.TensorSpec((), tf.string) for name in names}
    )


# Of a task that `register` made: `task_reader` then reads its source without tf.data.
PREPROCESSORS = (seqio.preprocessors.tokenize, seqio.preprocessors.append_eos)


def register(name: str, source: DocumentSource, *, prompts: bool = False) -> None:
  """Registers a seqio task of bytes: text and EOS or, with `prompts`, prompts and answers."""
  feature = seqio.Feature(seqio.ByteVocabulary(), add_eos=not prompts, dtype=tf.int32)
  seqio.TaskRegistry.add(
    name,
    source=source,  # pyright: ignore[reportArgumentType]  (seqio's class breaks its own Protocol)
    preprocessors=PREPROCESSORS,
    output_features=dict.fromkeys(('inputs', 'targets') if prompts else ('targets',), feature),
  )


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
