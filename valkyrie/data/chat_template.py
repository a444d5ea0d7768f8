"""The chat template of a tokenizer: messages as the text that its model reads.

It is a stranger's code: Jinja's sandbox gives it no files and none of Python's attributes.
"""

from collections.abc import Mapping, Sequence
import datetime
import functools
import json
import re
from typing import Any, NoReturn

import numpy as np

from valkyrie import packages
from valkyrie.data import vocabularies
from valkyrie.data.vocabularies import HuggingFaceVocabulary, Vocabulary
from valkyrie.errors import ConfigurationError, DataError, converted

Messages = Sequence[Mapping[str, Any]]
_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_LONGEST = 2**26  # characters of a text
_DATE = datetime.date(2024, 7, 26)  # in Llama 3.2's template; today's would change texts every day
# Marks answers for an extension of Jinja in transformers; here they are found without it.
_GENERATION = re.compile(r'({%[-+]?\s*)(end)?generation(?=\s*[-+]?%})')


class ChatTemplate:
  """The compiled template of a vocabulary; `ids` and `specials` are the vocabulary's.

  A ConfigurationError is raised if there is no template, or a wrong one.
  """

  def __init__(self, vocabulary: Vocabulary):
    source, self.specials = source_of(vocabulary), vocabulary.specials
    assert isinstance(vocabulary, HuggingFaceVocabulary) and vocabulary.file
    self.ids, self._name = vocabulary.template_ids, f'the chat template of {vocabulary.file}'
    lacks = 'Conversations need the package jinja2, which is not installed'
    advice = f'Install it: {packages.install("jinja2")}'
    with converted((ImportError,), ConfigurationError, lacks, advice):
      import jinja2.sandbox  # noqa: PLC0415  (an optional package)  # pyright: ignore
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols']
    )
    names = {number: name for name, number in self.specials.items()}
    bos, config = map(names.get, vocabulary.bos), vocabularies.configuration(vocabulary.file)
    environment.globals |= {
      'bos_token': config.get('bos_token', ''.join(filter(None, bos))),
      'eos_token': config.get('eos_token', names.get(vocabulary.eos_id, '')),
      'raise_exception': _refuse,
      'strftime_now': _DATE.strftime,
    }
    environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
    unmarked = _GENERATION.sub(lambda t: t[1] + ('endif' if t[2] else 'if true'), source)
    wrong = f'{self._name} is wrong'
    with converted((jinja2.TemplateError,), ConfigurationError, wrong, 'Correct it.'):
      self._template = environment.from_string(unmarked)

  def render(self, messages: Messages, place: str, *, asks: bool) -> str:
    """The text of messages, and what begins an answer if it `asks`; DataError names the place."""
    known, text = '|'.join(map(re.escape, self.specials)) or '(?!)', ''
    given = {'messages': messages, 'tools': None, 'documents': None, 'add_generation_prompt': asks}
    try:
      for number, message in enumerate(messages, 1):
        role, content = message.get('role'), message.get('content')
        if role not in _ROLES or not isinstance(content, str):
          expected = f'a role of {", ".join(_ROLES)}, and a content that is a text'
          _refuse(f'the message {number} is {message!r:.80}, expected {expected}')
        if found := re.search(known, str(message)):
          _refuse(f'the message {number} has the special token {found[0]} of the template')
      for piece in self._template.generate(given):
        text += piece
        if len(text) > _LONGEST:
          _refuse(f'{self._name} writes more than {_LONGEST:,} characters')
      vocabularies.as_utf8(text, 'a message')
    except Exception as error:  # a stranger's code raises any
      reason = str(error) or type(error).__name__
      raise DataError(f'{place}: {reason}. Correct the messages, or {self._name}.') from error
    return text

  def prompt(self, messages: Any, place: str) -> np.ndarray:
    """The tokens int32 [T] of a conversation to answer; raises a DataError, see `render`."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get('role') not in ('user', 'tool'):
      raise DataError(
        f'{place}: nothing asks for an answer: the last message is {last!r:.80}. Expected a list '
        'such as [{"role": "user", "content": "Hello"}].'
      )
    return self.ids(self.render(messages, place, asks=True))

  def stops(self, more: str | Sequence[str]) -> list[str]:
    """The text that ends an answer, such as '<|im_end|>', if there is one, and more strings."""
    talk = [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'ANSWER'}]
    end = self.render(talk, 'An example', asks=False).rpartition('ANSWER')[2].strip()
    return [*filter(None, [end]), *([more] if isinstance(more, str) else more)]


def source_of(vocabulary: Vocabulary) -> str:
  """The text of the template; raises a ConfigurationError if there is none."""
  file = vocabulary.file if isinstance(vocabulary, HuggingFaceVocabulary) else None
  found = vocabularies.configuration(file).get('chat_template') if file else None
  if not isinstance(found, str):
    raise ConfigurationError(
      f'The vocabulary {vocabulary.file or "bytes"} has no chat template. Use a tokenizer.json '
      f'with "chat_template" in tokenizer_config.json, or with {vocabularies.TEMPLATE} beside it.'
    )
  return found


def _refuse(reason: str) -> NoReturn:
  raise ValueError(reason)
