"""The tokenizer_config.json beside a vocabulary: its BOS and EOS, and its chat templates."""

from collections.abc import Mapping
import os
import pathlib
from typing import Any

from valkyrie import foreign
from valkyrie.data import template_files
from valkyrie.errors import ConfigurationError, raise_outage

NAME = 'tokenizer_config.json'
_LARGEST = 2**26  # bytes
# Usual names of the EOS token, for a tokenizer_config.json that does not name it.
_EOS_NAMES = ('<|endoftext|>', '</s>', '<eos>', '<|end_of_text|>', '<|eot_id|>', '<|im_end|>')


def read_config(path: pathlib.Path) -> dict[str, Any]:
  """The entries of the tokenizer_config.json beside a vocabulary that are not null.

  A file with a chat template beside it has the entry `chat_template`.
  """
  file = path.with_name(NAME)
  try:
    content = b'{}'
    if os.path.lexists(file):
      content = foreign.content(file, _LARGEST)
    entries = foreign.json_object(content, add_bos_token=bool | None)
    for name in ('bos_token', 'eos_token'):
      token = entries.get(name)
      if isinstance(token, dict):
        entries[name] = token.get('content')
      if not isinstance(entries.get(name), str | None):
        raise ValueError(f'its field {name!r} has {token!r:.40}')
  except (OSError, ValueError) as error:
    raise_outage(f'{file} cannot be read', error)
    raise ConfigurationError(
      f'{file} is not a tokenizer configuration ({foreign.reason(error)}). Copy or download it '
      'again.'
    ) from error
  configured = entries.get('chat_template')
  entries['chat_template'] = template_files.templates(path.parent, configured)
  return {name: value for name, value in entries.items() if value is not None}


def bos_id(path: pathlib.Path, number: int | None) -> int:
  if number is None or number < 0:
    raise ConfigurationError(
      f'{path.with_name(NAME)} wants a BOS before each text, but {path} has no such '
      'token. Name it as "bos_token", or set "add_bos_token" to false.'
    )
  return number


def eos_name(path: pathlib.Path, config: Mapping[str, Any], ids: Mapping[str, int]) -> str:
  names = _EOS_NAMES
  if 'eos_token' in config:
    names = [config['eos_token']]
  for name in names:
    if name in ids:
      return name
  quoted = [f'{name!r:.80}' for name in names]
  listed = ', '.join(quoted)
  raise ConfigurationError(
    f'The vocabulary {path} has none of {listed} as the last token of a '
    f'document. Name its end-of-text token as "eos_token" in {path.with_name(NAME)}.'
  )
