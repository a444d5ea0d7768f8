"""The chat template of a tokenizer: messages as the text that its model reads.

It is a stranger's code, and runs in a process of its own with little time and memory: see
`template_program`.
"""

from collections.abc import Mapping, Sequence
import functools
import logging
import re
from typing import Any, NoReturn

import numpy as np

from valkyrie import foreign, packages
from valkyrie.data import template_files, vocabularies
from valkyrie.data.messages import SAID, conversation
from valkyrie.data.template_process import TemplateProcess
from valkyrie.data.vocabularies import HuggingFaceVocabulary, Vocabulary
from valkyrie.errors import ConfigurationError, DataError, converted

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any]
DEFAULT, WITH_TOOLS = 'default', 'tool_use'  # names of templates, as transformers has them
_RENDERING = 2  # 1, which was not recorded, gave no tools to the template
_TALK = ({'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'ANSWER'})
_warn_once = functools.cache(logging.warning)
_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')


class ChatTemplate:
  """The compiled template of a vocabulary; `ids` and `specials` are the vocabulary's.

  A ConfigurationError is raised if there is no template, or a wrong one.
  """

  def __init__(self, vocabulary: Vocabulary):
    sources = sources_of(vocabulary)
    self.specials = vocabulary.specials
    assert isinstance(vocabulary, HuggingFaceVocabulary) and vocabulary.file
    self.ids, self._name = vocabulary.template_ids, f'the chat template of {vocabulary.file}'
    lacks = 'Conversations need the package jinja2, which is not installed'
    advice = f'Install it: {packages.install("jinja2")}'
    with converted((ImportError,), ConfigurationError, lacks, advice):
      import jinja2  # noqa: F401, PLC0415  (an optional package)  # pyright: ignore
    names = {number: name for name, number in self.specials.items()}
    bos, config = map(names.get, vocabulary.bos), vocabularies.configuration(vocabulary.file)
    begins = config.get('bos_token', ''.join(filter(None, bos)))
    ends = config.get('eos_token', names.get(vocabulary.eos_id, ''))
    self._templates = {name: _process(text, begins, ends) for name, text in sources.items()}
    with converted((ValueError,), ConfigurationError, f'{self._name} is wrong', 'Correct it.'):
      for template in self._templates.values():
        template.compile()

  def render(
    self, messages: Messages, place: str, *, asks: bool, tools: Tools | None = None
  ) -> str:
    """The text of messages, and what begins an answer if it `asks`; DataError names the place."""
    known = '|'.join(map(re.escape, self.specials)) or '(?!)'
    name = WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
    try:
      if found := re.search(known, str(tools)):
        _refuse(f'a tool has the special token {found[0]} of the template')
      for number, message in enumerate(messages, 1):
        role, content = message.get('role'), message.get('content')
        if role not in _ROLES or not isinstance(content, str):
          expected = f'a role of {", ".join(_ROLES)}, and a content that is a text'
          _refuse(f'the message {number} is {message!r:.80}, expected {expected}')
        if found := re.search(known, str(message)):
          _refuse(f'the message {number} has the special token {found[0]} of the template')
      text = self._templates[name].render(messages, asks=asks, tools=tools)
      vocabularies.as_utf8(text, 'a message')
    except (AttributeError, DataError, TypeError, ValueError) as error:
      reason = foreign.reason(error)
      raise DataError(f'{place}: {reason}. Correct the messages, or {self._name}.') from error
    return text

  def check_read(self, messages: Messages, tools: Tools | None, place: str) -> None:
    """Raises a DataError if the template leaves out a part of a conversation."""
    whole = self.render(messages, place, asks=False, tools=tools)
    if tools and whole == self.render(messages, place, asks=False):
      self._refuse_lost(place, 'the tools')
    for number, message in enumerate(messages):
      begin = [*messages[:number]]
      content = message['content']
      if content.strip() and content.strip() not in whole:
        other = [*begin, {**message, 'content': f'{content}.'}, *messages[number + 1 :]]
        if whole == self.render(other, place, asks=False, tools=tools):
          self._refuse_lost(place, f'the message {number + 1}, of the role {message["role"]}')
      for field in (name for name in SAID if message.get(name)):
        others = {name: value for name, value in message.items() if name != field}
        with_it = self.render([*begin, message], place, asks=False, tools=tools)
        if with_it == self.render([*begin, others], place, asks=False, tools=tools):
          self._refuse_lost(place, f'{field} of the message {number + 1}')

  def prompt(self, messages: Any, place: str, tools: Tools | None = None) -> np.ndarray:
    """The tokens int32 [T] of a conversation to answer; raises a DataError, see `render`."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get('role') not in ('user', 'tool'):
      raise DataError(
        f'{place}: nothing asks for an answer: the last message is {last!r:.80}. Expected a list '
        'such as [{"role": "user", "content": "Hello"}].'
      )
    talk, tools = conversation({'messages': messages, 'tools': tools}, 'messages', place)
    text = self.render(talk, place, asks=True, tools=tools)
    if tools and text == self.render(talk, place, asks=True):
      self._refuse_lost(place, 'the tools')
    return self.ids(text)

  def stops(self, more: str | Sequence[str]) -> list[str]:
    """The text that ends an answer, such as '<|im_end|>', if there is one, and more strings."""
    end = self._end or self._next_mark.strip()
    return [*filter(None, [end]), *([more] if isinstance(more, str) else more)]

  @property
  def next_mark(self) -> str:
    """What begins the message after an answer, for a template that does not end answers itself.

    Raises a ConfigurationError if there is nothing: such a template teaches no end.
    """
    if self._end:
      return ''
    if not self._next_mark.strip():
      raise ConfigurationError(
        f'Nothing ends an answer in {self._name}, neither a mark of its own nor one that begins '
        'the next message, so that no model learns to end. Write a template with an end, such as '
        '{{ eos_token }} after each answer, to chat_template.jinja beside the tokenizer.'
      )
    _warn_once(
      f'An answer ends with no mark of its own in {self._name}. It is learned with what begins the '
      f'next message, {self._next_mark.strip()!r}, and generation stops there.'
    )
    return self._next_mark

  @functools.cached_property
  def _end(self) -> str:
    """The text that ends an answer."""
    return self.render(_TALK, 'An example', asks=False).rpartition('ANSWER')[2].strip()

  @functools.cached_property
  def _next_mark(self) -> str:
    """The text up to the first special token after an answer, or else up to the next content."""
    answered = self.render(_TALK, 'An example', asks=False)
    talk = [*_TALK, {'role': 'user', 'content': 'NEXT'}]
    rest = self.render(talk, 'An example', asks=False).removeprefix(answered).partition('NEXT')[0]
    known = '|'.join(map(re.escape, self.specials)) or '(?!)'
    special = re.search(known, rest)
    return rest[: special.end()] if special else rest.rstrip()

  def _refuse_lost(self, place: str, what: str) -> NoReturn:
    raise DataError(
      f'{place}: {self._name} leaves out {what}, so that a model never reads it. Write a template '
      'that has it to chat_template.jinja beside the tokenizer, or remove it from the file.'
    )


def sources_of(vocabulary: Vocabulary) -> dict[str, str]:
  """The texts of the templates by name, with DEFAULT; raises a ConfigurationError without one."""
  file = vocabulary.file if isinstance(vocabulary, HuggingFaceVocabulary) else None
  found: Any = vocabularies.configuration(file).get('chat_template') if file else None
  if isinstance(found, str):
    found = {DEFAULT: found}
  elif isinstance(found, list):  # of named templates
    found = template_files.named_templates(found)
  if isinstance(found, dict) and len(found) == 1 and WITH_TOOLS not in found:
    found = {DEFAULT: next(iter(found.values()))}
  if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
    found = {}
  if DEFAULT not in found:
    listed = ', '.join(map(repr, found))
    others = f', only those named {listed:.200}' if found else ''
    raise ConfigurationError(
      f'The vocabulary {vocabulary.file or "bytes"} has no chat template{others}. Use a '
      f'tokenizer.json with "chat_template" in tokenizer_config.json, or with '
      f'{template_files.TEMPLATE} beside it.'
    )
  return {name: str(text) for name, text in found.items() if name in (DEFAULT, WITH_TOOLS)}


def described(vocabulary: Vocabulary) -> dict[str, Any]:
  """What store.json records of the templates."""
  sources = sources_of(vocabulary)
  return {
    'chat_template': sources[DEFAULT] if len(sources) == 1 else sources,
    'rendering': _RENDERING,
  }


@functools.lru_cache(4)
def _process(source: str, bos: str, eos: str) -> TemplateProcess:
  """The process of a template, which a model that answers several conversations keeps."""
  return TemplateProcess(source, {'bos_token': bos, 'eos_token': eos})


def _refuse(reason: str) -> NoReturn:
  raise ValueError(reason)
