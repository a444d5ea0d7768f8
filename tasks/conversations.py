"""Conversations of your own, as the chat template of the tokenizer renders them.

A row of JSON, .parquet or .arrow has a list of messages in OpenAI's form (role, content) or
ShareGPT's (from, value), and it may have tools, see `valkyrie.data.messages`. A conversation is a
document up to the assistant's last message, and only what the assistant says is learned, with what
ends it, such as <|im_end|>: neither a first message, nor one with "weight": 0 or "train": false.
What the chat template leaves out of a conversation is an error. The options are

  column      the column of the messages (default: messages, or conversations where that is missing)
  held_out    the validation split, as in the task text (default: validation files, or 0.01)
  splits      as in the task text
"""

from collections.abc import Iterator, Sequence
import copy
import itertools
from typing import Any, Self

import numpy as np

from valkyrie.data import chat_template, messages, store_writer
from valkyrie.data.chat_template import ChatTemplate
from valkyrie.data.document_source import register
from valkyrie.data.messages import Conversation
from valkyrie.data.records import Row
from valkyrie.data.vocabularies import Vocabulary, following
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.tasks.text import TextSource


class ConversationSource(TextSource):
  """The conversations in the files at `location`."""

  FORMATS = ('.jsonl', '.ndjson', '.json', '.parquet', '.arrow')
  SHARE = '0.01'
  OPTIONS = ('column', 'held_out', 'splits')
  other_than_text = 'conversations'  # which a chat template turns into text

  def __init__(
    self,
    location: str | None = None,
    column: str = messages.COLUMNS[0],
    held_out: str | None = None,
    splits: str | None = None,
  ):
    super().__init__(location, column, held_out, splits=splits)
    self._also = messages.also(column)
    self._template: ChatTemplate | None = None
    self._described: dict[str, Any] = {}

  def encoded_by(self, vocabulary: Vocabulary) -> Self:
    bound = copy.copy(self)
    bound._template = ChatTemplate(vocabulary)
    bound._described = chat_template.described(vocabulary)
    return bound

  def describe(self, split: str) -> dict[str, Any]:
    return super().describe(split) | self._described

  def documents(self, split: str, shard: int, shards: int) -> Iterator[store_writer.Document]:
    if self._template is None:
      raise ConfigurationError('Conversations are read by TaskFeed: only a tokenizer renders them.')
    for row in self._records(split).rows(shard, shards):
      if self._is_in(split, messages.hashed(row['conversation'].messages)):
        yield document(self._template, row['conversation'], row['place'])

  @staticmethod
  def _check(row: Row, columns: Sequence[str], place: str) -> Row:
    """The row at a place as {'conversation': see `valkyrie.data.messages`, 'place': place}."""
    return {'conversation': messages.conversation(row, columns[0], place), 'place': place}


def document(
  template: ChatTemplate, conversation: Conversation, place: str
) -> store_writer.Document:
  """The tokens of a conversation; raises a DataError that names its place.

  An answer is what its message adds to the text of those before it, which ends with what begins an
  answer. It is encoded apart from that text, as it is when the model generates it. What ends it is
  learned, too: a special token of its own, or `ChatTemplate.next_mark`.
  """
  talk, tools = conversation
  template.check_read(talk, tools, place)
  text = ''
  mark = ''  # that has to follow the text
  bounds = [0]
  for number, message in enumerate(talk):
    if not number or not messages.is_learned(message):
      continue
    asked = template.render(talk[:number], place, asks=True, tools=tools)
    answered = template.render(talk[: number + 1], place, asks=False, tools=tools)
    if not asked.startswith(text) or not answered.startswith(asked):
      raise DataError(
        f'{place}: with the message {number + 1} the chat template changes the text of those '
        'before it. Write a template that only adds to it to chat_template.jinja beside the '
        'tokenizer, or end each conversation with its first answer.'
      )
    if asked.startswith(text + mark):
      bounds[-1] += len(mark)
    closed = answered.rstrip()
    is_closed = closed.endswith(tuple(template.specials))
    bounds += [len(asked), len(closed if is_closed else answered)]
    text = answered
    mark = '' if is_closed else template.next_mark
  if len(bounds) == 1:
    raise DataError(
      f'{place}: no message after the first has the role assistant, so there is nothing to learn. '
      'Correct or remove the conversation.'
    )
  text += mark
  bounds[-1] += len(mark)
  spans = [(text[:begin], text[begin:end]) for begin, end in itertools.pairwise(bounds)]
  tokens = [following(template.ids, before, span) for before, span in spans]
  first, *later = np.cumsum([len(ids) for ids in tokens]).tolist()
  size = len(text[: bounds[-1]].encode())
  return store_writer.Document(np.concatenate(tokens), size, None, first, later[:-1], bos=False)


register('conversations', ConversationSource(), prompts=True)
