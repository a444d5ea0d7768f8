"""The files of a tokenizer's chat templates, beside its configuration."""

import os
import pathlib
from typing import Any

from valkyrie import foreign
from valkyrie.errors import ConfigurationError, converted

TEMPLATE = 'chat_template.jinja'  # the default one
FOLDER = 'additional_chat_templates'  # named ones, NAME.jinja
_LARGEST = 2**26  # bytes of a template


def found(folder: pathlib.Path) -> list[pathlib.Path]:
  """The files of templates in the folder of a tokenizer, the default one first."""
  default = folder / TEMPLATE
  files = sorted(folder.glob(f'{FOLDER}/*.jinja'))
  if os.path.lexists(default):
    files.insert(0, default)
  return files


def templates(folder: pathlib.Path, configured: Any) -> Any:
  """The entry `chat_template` of a configuration, with the templates in files; they go before it.

  It is the text of one template, or a list of named ones, as transformers writes it. Raises a
  ConfigurationError for a file that cannot be read.
  """
  files = found(folder)
  if not files:
    return configured
  named: dict[str, Any] = {}
  if isinstance(configured, list):
    named = named_templates(configured)
  elif configured is not None:
    named = {'default': configured}
  for file in files:
    name = file.stem
    is_default = file.parent == folder and file.name == TEMPLATE
    if is_default:
      name = 'default'
    wrong = f'{file} is not a chat template'
    with converted((OSError, ValueError), ConfigurationError, wrong, 'Copy or download it again.'):
      named[name] = foreign.content(file, _LARGEST).decode()
  if named.keys() == {'default'}:
    return named['default']
  return [{'name': name, 'template': text} for name, text in named.items()]


def named_templates(listed: list[Any]) -> dict[str, Any]:
  """{name: template} of a list in a configuration; entries without a text as name are left out."""
  templates = {}
  for entry in listed:
    is_named = isinstance(entry, dict) and isinstance(entry.get('name'), str)
    if is_named:
      templates[entry['name']] = entry.get('template')
  return templates
