"""The chat template of a tokenizer: messages as the text that its model reads.

It is a stranger's code, and runs in a separate process with little time and memory: see
`template_program`.
"""

from collections.abc import Mapping, Sequence
import functools
import logging
import re
from typing import Any, NoReturn

import numpy as np

from valkyrie import foreign, packages
from valkyrie.data import template_files, tokenizer_config, vocabularies
from valkyrie.data.messages import SAID, conversation
from valkyrie.data.template_process import TemplateProcess
from valkyrie.data.vocabularies import HuggingFaceVocabulary, Vocabulary
from valkyrie.errors import ConfigurationError, DataError, converted

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any]
# Names of templates, as transformers has them.
DEFAULT = 'default'
WITH_TOOLS = 'tool_use'
_RENDERING = 2  # 1, which was not recorded, did not give the tools to the template
_TALK = ({'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'ANSWER'})
_NEXT = {'role': 'user', 'content': 'NEXT'}
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
    self.ids = vocabulary.template_ids
    self._name = f'the chat template of {vocabulary.file}'
    lacks = 'Conversations need the package jinja2, which is not installed'
    advice = f'Install it: {packages.install("jinja2")}'
    with converted((ImportError,), ConfigurationError, lacks, advice):
      import jinja2  # noqa: F401, PLC0415  (an optional package)  # pyright: ignore
    names = {number: name for name, number in self.specials.items()}
    bos_names: list[str] = []
    for number in vocabulary.bos:
      if number in names:
        bos_names.append(names[number])
    usual_bos = ''.join(bos_names)
    usual_eos = names.get(vocabulary.eos_id, '')
    config = tokenizer_config.read_config(vocabulary.file)
    bos = config.get('bos_token', usual_bos)
    eos = config.get('eos_token', usual_eos)
    self._templates: dict[str, TemplateProcess] = {}
    for name, text in sources.items():
      self._templates[name] = _process(text, bos, eos)
    with converted((ValueError,), ConfigurationError, f'{self._name} is wrong', 'Correct it.'):
      for template in self._templates.values():
        template.compile()

  def render(
    self,
    messages: Messages,
    place: str,
    *,
    asks: bool,
    tools: Tools | None = None,
  ) -> str:
    """The text of messages; if it `asks`, also the beginning of an answer.

    Raises a DataError that names the place.
    """
    name = DEFAULT
    if tools and WITH_TOOLS in self._templates:
      name = WITH_TOOLS
    try:
      self._check_special('a tool', tools)
      for number, message in enumerate(messages, 1):
        has_role = message.get('role') in _ROLES
        has_text = isinstance(message.get('content'), str)
        if not has_role or not has_text:
          expected = f'a role of {", ".join(_ROLES)}, and a content that is a text'
          _refuse(f'the message {number} is {message!r:.80}, expected {expected}')
        self._check_special(f'the message {number}', message)
      template = self._templates[name]
      text = template.render(messages, asks=asks, tools=tools)
      vocabularies.as_utf8(text, 'a message')
    except (AttributeError, DataError, TypeError, ValueError) as error:
      reason = foreign.reason(error)
      raise DataError(f'{place}: {reason}. Correct the messages, or {self._name}.') from error
    return text

  @functools.cached_property
  def _special(self) -> re.Pattern:
    """Matches the names of special tokens; nothing if there are none."""
    names = [re.escape(name) for name in self.specials]
    return re.compile('|'.join(names) or '(?!)')

  def _check_special(self, part: str, value: Any) -> None:
    """Raises a ValueError if a part of a conversation spells a special token."""
    special = self._special.search(str(value))
    if special:
      _refuse(f'{part} has the special token {special[0]} of the template')

  def check_read(self, messages: Messages, tools: Tools | None, place: str) -> None:
    """Raises a DataError if the template leaves out a part of a conversation."""
    whole = self.render(messages, place, asks=False, tools=tools)
    if tools:
      without_tools = self.render(messages, place, asks=False)
      if whole == without_tools:
        self._refuse_lost(place, 'the tools')
    self._check_contents(messages, tools, place, whole)
    for number, message in enumerate(messages, 1):
      earlier = list(messages[: number - 1])
      for field in SAID:
        if not message.get(field):
          continue
        without_field = {**message}
        del without_field[field]
        begin_with = [*earlier, message]
        begin_without = [*earlier, without_field]
        text = self.render(begin_with, place, asks=False, tools=tools)
        text_without = self.render(begin_without, place, asks=False, tools=tools)
        if text == text_without:
          self._refuse_lost(place, f'{field} of the message {number}')

  def _check_contents(
    self,
    messages: Messages,
    tools: Tools | None,
    place: str,
    whole: str,
  ) -> None:
    """Raises a DataError if the text `whole` of a conversation does not depend on a content."""
    mark = 'end'
    while mark in whole:
      mark += 'd'
    marked = []
    for number, message in enumerate(messages, 1):
      content = message['content']
      if content.strip():
        content += f' {mark}{number}.'
      marked.append({**message, 'content': content})
    with_marks = self.render(marked, place, asks=False, tools=tools)
    for number, message in enumerate(messages, 1):
      if not message['content'].strip() or f'{mark}{number}.' in with_marks:
        continue
      # A template may change a content. Does another content change the text?
      changed = {**message, 'content': f'{message["content"]}.'}
      with_change = [*messages[: number - 1], changed, *messages[number:]]
      text = self.render(with_change, place, asks=False, tools=tools)
      if text == whole:
        role = message['role']
        self._refuse_lost(place, f'the message {number}, of the role {role}')

  def prompt(self, messages: Any, place: str, tools: Tools | None = None) -> np.ndarray:
    """The tokens int32 [T] of a conversation to answer; raises a DataError, see `render`."""
    if isinstance(messages, tuple):
      messages = [*messages]
    given = {'messages': messages, 'tools': tools}
    talk, tools = conversation(given, 'messages', place)
    last = talk[-1] if talk else None
    if last is None or last['role'] not in ('user', 'tool'):
      raise DataError(
        f'{place}: nothing asks for an answer: the last message is {last!r:.80}. Expected a list '
        'such as [{"role": "user", "content": "Hello"}].'
      )
    text = self.render(talk, place, asks=True, tools=tools)
    whole = self.render(talk, place, asks=False, tools=tools)
    self._check_contents(talk, tools, place, whole)
    if tools:
      without_tools = self.render(talk, place, asks=True)
      if text == without_tools:
        self._refuse_lost(place, 'the tools')
    return self.ids(text)

  def stops(self, more: str | Sequence[str]) -> list[str]:
    """The text that ends an answer, such as '<|im_end|>', if there is one, and more strings."""
    stops = []
    end = self._end or self._next_mark.strip()
    if end:
      stops.append(end)
    if isinstance(more, str):
      stops.append(more)
    else:
      stops += more
    return stops

  @property
  def next_mark(self) -> str:
    """The mark of the message after an answer, for a template that does not end answers itself.

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
    talk = self.render(_TALK, 'An example', asks=False)
    _, _, end = talk.rpartition('ANSWER')
    return end.strip()

  @functools.cached_property
  def _next_mark(self) -> str:
    """The text up to the first special token after an answer, or else up to the next content."""
    answered = self.render(_TALK, 'An example', asks=False)
    longer_talk = [*_TALK, _NEXT]
    continued = self.render(longer_talk, 'An example', asks=False)
    after_answer = continued.removeprefix(answered)
    mark, _, _ = after_answer.partition('NEXT')
    special = self._special.search(mark)
    if special:
      return mark[: special.end()]
    return mark.rstrip()

  def _refuse_lost(self, place: str, part: str) -> NoReturn:
    raise DataError(
      f'{place}: {self._name} leaves out {part}, so that a model never reads it. Write a template '
      'that has it to chat_template.jinja beside the tokenizer, or remove it from the file.'
    )


def sources_of(vocabulary: Vocabulary) -> dict[str, str]:
  """The texts of the templates by name, with DEFAULT; raises a ConfigurationError without one."""
  templates: Any = None
  if isinstance(vocabulary, HuggingFaceVocabulary) and vocabulary.file:
    config = tokenizer_config.read_config(vocabulary.file)
    templates = config.get('chat_template')
  if isinstance(templates, str):
    templates = {DEFAULT: templates}
  elif isinstance(templates, list):
    templates = template_files.named_templates(templates)
  if isinstance(templates, dict) and len(templates) == 1:
    (name,) = templates
    if name != WITH_TOOLS:
      templates = {DEFAULT: templates[name]}
  if not isinstance(templates, dict):
    templates = {}
  are_texts = [isinstance(text, str) for text in templates.values()]
  if not all(are_texts):
    templates = {}
  if DEFAULT not in templates:
    others = ''
    if templates:
      listed = ', '.join(map(repr, templates))
      others = f', only those named {listed:.200}'
    raise ConfigurationError(
      f'The vocabulary {vocabulary.file or "bytes"} has no chat template{others}. Use a '
      f'tokenizer.json with "chat_template" in tokenizer_config.json, or with '
      f'{template_files.TEMPLATE} beside it.'
    )
  rendered: dict[str, str] = {}
  for name in (DEFAULT, WITH_TOOLS):
    if name in templates:
      rendered[name] = str(templates[name])
  return rendered


def described(vocabulary: Vocabulary) -> dict[str, Any]:
  """The entries of the templates in store.json."""
  templates: Any = sources_of(vocabulary)
  if len(templates) == 1:
    templates = templates[DEFAULT]
  return {'chat_template': templates, 'rendering': _RENDERING}


@functools.lru_cache(4)
def _process(source: str, bos: str, eos: str) -> TemplateProcess:
  """The process of a template, which a model that answers several conversations keeps."""
  return TemplateProcess(source, {'bos_token': bos, 'eos_token': eos})


def _refuse(reason: str) -> NoReturn:
  raise ValueError(reason)
