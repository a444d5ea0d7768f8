"""Sources of whole documents, and the tasks that they are registered as.

The store of such a task is built without TensorFlow. `seqio_tasks.publish` registers it with seqio.
"""

import abc
from collections.abc import Iterator
import hashlib
from typing import Any, NamedTuple, Self

from valkyrie.data.source_files import SourceFiles
from valkyrie.errors import ConfigurationError

_PIECE = 2**22  # characters


class TextDocument(NamedTuple):
  """A document. Documents with the same `sequence_key` belong together, in the order of the source.

  A task with `prompts` puts the `prompt` before the text, which is then the answer.
  """

  text: str
  sequence_key: str
  name: str
  prompt: str = ''


class DocumentSource(abc.ABC):
  """A source of documents.

  Attributes:
    splits: the names of its splits, such as ('train', 'validation').
  """

  def __init__(self, splits: tuple[str, ...]):
    self.splits = splits

  @abc.abstractmethod
  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    """The documents of one of `shards` parts; each document is in exactly one part."""

  @abc.abstractmethod
  def describe(self, split: str) -> dict[str, Any]:
    """The origin of the documents, for store.json; raises DataError if the source is damaged.

    Shards with different descriptions are never joined, so include what `files` does not name.
    """

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


class DocumentTask(NamedTuple):
  """A registered task: the text of each document or, with `prompts`, prompts and answers."""

  source: DocumentSource
  prompts: bool


TASKS: dict[str, DocumentTask] = {}


def register(name: str, source: DocumentSource, *, prompts: bool = False) -> None:
  """Registers a task.

  Raises:
    ConfigurationError: there is a task of this name.
  """
  if name in TASKS:
    raise ConfigurationError(f'The task {name!r} is registered twice. Rename one of the two.')
  TASKS[name] = DocumentTask(source, prompts)


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
