"""Language models inside of models that also read images: their configuration and their tensors."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.weights import config_fields
from valkyrie.weights.classes.model_class import ModelClass
from valkyrie.weights.config_fields import FETCH, Fields
from valkyrie.weights.name_table import Entry, Names

# {how the name of a tensor begins: how it begins inside of a model with images}.
_INSIDE = {
  'model.': ('model.language_model.', 'language_model.model.'),
  'lm_head.': ('language_model.lm_head.',),
}


def text_config(
  file: pathlib.Path,
  found: Mapping[str, Any],
  text_class: ModelClass,
  *,
  no_effect: Sequence[str],
  tied: bool,
  defaults: Mapping[str, Any],
) -> dict[str, Any]:
  """The configuration of the language model, which `text_class` has checked.

  Args:
    found: what the file has.
    no_effect: the fields outside of `text_config` that change nothing in texts.
    tied: whether the model is tied where no outer field says it.
    defaults: values of needed fields that such a file may lack.

  Raises a ConfigurationError that names a field.
  """
  text = found.get('text_config')
  if not isinstance(text, dict) or text.get('model_type', text_class.kind) != text_class.kind:
    raise ConfigurationError(
      f'{file} has text_config: {text!r:.80}, but an object of the model_type {text_class.kind!r} '
      f'was expected. {FETCH}'
    )
  outside = {name: value for name, value in found.items() if name != 'text_config'}
  config_fields.check(file, outside, Fields({'tie_word_embeddings': bool}, no_effect=no_effect))
  config = text_class.checked(file, {**defaults, **text})
  # The outer field counts: the tables are outside.
  config['tie_word_embeddings'] = outside.get('tie_word_embeddings', tied)
  for name in ('bos_token_id', 'eos_token_id'):
    config.setdefault(name, outside.get(name))
  return config


def spelled(names: Names, skipped: Sequence[str]) -> Names:
  """The tensors also under the names that they have inside; `skipped` are those of other parts."""
  layers = {}
  for kind, entries in names.layers.items():
    layers[kind] = [_spelled(one) for one in entries]
  shared = [_spelled(one) for one in names.shared]
  return names._replace(shared=shared, layers=layers, skipped=(*names.skipped, *skipped))


def _spelled(one: Entry) -> Entry:
  spellings = list(one.spellings)
  for pieces in one.spellings:
    for outside, prefixes in _INSIDE.items():
      if not all(piece.name.startswith(outside) for piece in pieces):
        continue
      for prefix in prefixes:
        inside = [
          piece._replace(name=prefix + piece.name.removeprefix(outside)) for piece in pieces
        ]
        spellings.append(inside)
  return one._replace(spellings=spellings)
