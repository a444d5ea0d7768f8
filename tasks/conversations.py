"""Conversations of your own, as the chat template of the tokenizer renders them.

A row of JSON, .parquet or .arrow has a list of messages in OpenAI's form (role, content) or
ShareGPT's (from, value). A conversation is a document up to the assistant's last message, and only
what the assistant says is learned, with what ends it, such as <|im_end|>: neither a first message,
nor one with "weight": 0. The options are

  column      the column of the messages (default: messages)
  held_out    the validation split, as in the task text (default: validation files, or 0.01)
  splits      as in the task text
"""

from collections.abc import Iterator, Sequence
import copy
import itertools
import json
from typing import Any, Self

import numpy as np

from valkyrie.data import chat_template, store_writer
from valkyrie.data.chat_template import ChatTemplate
from valkyrie.data.document_source import register
from valkyrie.data.records import Row
from valkyrie.data.vocabularies import Vocabulary, following
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.tasks.text import TextSource

_OF_SHAREGPT = {'human': 'user', 'gpt': 'assistant'}


class ConversationSource(TextSource):
  """The conversations in the files at `location`."""

  FORMATS = ('.jsonl', '.ndjson', '.json', '.parquet', '.arrow')
  SHARE = '0.01'
  OPTIONS = ('column', 'held_out', 'splits')

  def __init__(
    self,
    location: str | None = None,
    column: str = 'messages',
    held_out: str | None = None,
    splits: str | None = None,
  ):
    super().__init__(location, column, held_out, splits=splits)
    self._template: ChatTemplate | None = None
    self._described: dict[str, Any] = {}

  def encoded_by(self, vocabulary: Vocabulary) -> Self:
    bound = copy.copy(self)
    bound._template = ChatTemplate(vocabulary)
    bound._described = {'chat_template': chat_template.source_of(vocabulary)}
    return bound

  def describe(self, split: str) -> dict[str, Any]:
    return super().describe(split) | self._described

  def documents(self, split: str, shard: int, shards: int) -> Iterator[store_writer.Document]:
    if self._template is None:
      raise ConfigurationError('Conversations are read by TaskFeed: only a tokenizer renders them.')
    for row in self._records(split).rows(shard, shards):
      if self._is_in(split, json.dumps(row['messages'], default=str)):
        yield document(self._template, row['messages'], row['place'])

  @staticmethod
  def _check(row: Row, columns: Sequence[str], place: str) -> Row:
    """The row at a place as {'messages': with role and content, 'place': place}."""
    messages = row[columns[0]]
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
      raise DataError(
        f'{place} has {messages!r:.80} in the column {columns[0]}, expected a list such as '
        '[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}].'
      )
    found = []
    for message in messages:
      given = {name: value for name, value in message.items() if value is not None}
      if 'from' in given and 'role' not in given:
        role, given['content'] = given.pop('from'), given.pop('value', None)
        given['role'] = _OF_SHAREGPT.get(str(role), role)
      found.append(given)
    return {'messages': found, 'place': place}


def document(
  template: ChatTemplate, messages: chat_template.Messages, place: str
) -> store_writer.Document:
  """The tokens of a conversation; raises a DataError that names its place.

  An answer is what its message adds to the text of those before it, which ends with what begins an
  answer. It is encoded apart from that text, as it is when the model generates it.
  """
  template.render(messages, place, asks=False)  # so that what follows the last answer is right, too
  text, bounds = '', [0]
  for number, message in enumerate(messages):
    if number and message.get('role') == 'assistant' and message.get('weight') != 0:
      asked = template.render(messages[:number], place, asks=True)
      answered = template.render(messages[: number + 1], place, asks=False)
      if not asked.startswith(text) or not answered.startswith(asked):
        raise DataError(
          f'{place}: with the message {number + 1} the chat template changes the text of those '
          'before it. Write a template that only adds to it to chat_template.jinja beside the '
          'tokenizer, or end each conversation with its first answer.'
        )
      closed = answered.rstrip()
      named = closed.endswith(tuple(template.specials))
      bounds += [len(asked), len(closed if named else answered)]
      text = answered
  if len(bounds) == 1:
    raise DataError(
      f'{place}: no message after the first has the role assistant, so there is nothing to learn. '
      'Correct or remove the conversation.'
    )
  spans = [(text[:begin], text[begin:end]) for begin, end in itertools.pairwise(bounds)]
  tokens = [following(template.ids, before, span) for before, span in spans]
  first, *later = np.cumsum([len(ids) for ids in tokens]).tolist()
  size = len(text[: bounds[-1]].encode())
  return store_writer.Document(np.concatenate(tokens), size, None, first, later[:-1], bos=False)


register('conversations', ConversationSource(), prompts=True)
