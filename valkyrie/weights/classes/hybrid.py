"""The base of classes with layers of several kinds: their plan is compared with a model."""

import abc
from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.models.language_model import LanguageModel
from valkyrie.weights.classes import parts
from valkyrie.weights.classes.model_class import ModelClass
from valkyrie.weights.config_fields import FETCH
from valkyrie.weights.facts import Facts, facts_of


class Hybrid(ModelClass):
  """A class with layers of several kinds: recurrences, windows, full attention.

  Attributes:
    architecture: what its config.json calls it.
  """

  architecture: str

  def scale(self, width: int) -> float:
    """The factor on its embeddings [`width`]."""
    del width
    return 1.0

  def config_of(self, model: LanguageModel) -> dict[str, Any] | str:
    facts = facts_of(model)
    fields = self._fields_of(facts)
    if isinstance(fields, str):
      return fields
    config = {
      'architectures': [self.architecture],
      'model_type': self.kind,
      **facts.sizes,
      # A tied table cannot hold another scale of the inputs than the class has.
      'tie_word_embeddings': facts.tied and facts.scale == self.scale(facts.sizes['hidden_size']),
      **fields,
    }
    return facts.difference(self.plan(config)) or config

  @abc.abstractmethod
  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    """The fields of a model's config.json besides its sizes, or what the class has not.

    `config_of` compares the plan of these fields with the model, so what they leave out is said.
    """


def shared_bindings(
  config: Mapping[str, Any],
  epsilon: float,
  scale: float = 1.0,
) -> dict[str, Any]:
  """The bindings of the sizes that all classes have."""
  return {
    'LanguageModel.vocabulary_size': config['vocab_size'],
    'LanguageModel.d_model': config['hidden_size'],
    'LanguageModel.layers': config['num_hidden_layers'],
    'LanguageModel.tied': config['tie_word_embeddings'],
    'LanguageModel.embedding_scale': scale,
    'RMSNorm.epsilon': epsilon,
  }


def with_one_spelling(
  file: pathlib.Path,
  config: Mapping[str, Any],
  spellings: Mapping[str, str],
) -> dict[str, Any]:
  """The configuration with one name for each field, from {another spelling: name}.

  Raises a ConfigurationError if two spellings have different values.
  """
  result = dict(config)
  for spelling, name in spellings.items():
    value = result.pop(spelling, None)
    if value is not None and result.setdefault(name, value) != value:
      raise ConfigurationError(
        f'{file} has {name}: {json.dumps(result[name])} and {spelling}: {json.dumps(value)}. '
        'Remove the one that does not count.'
      )
  return result


# The names of kinds of layers in older files, and today.
_TYPES = {'linear_attention': 'linear_attention', 'full_attention': 'full_attention'}
_TYPES |= {'mamba': 'linear_attention', 'attention': 'full_attention'}


def layer_types(
  file: pathlib.Path | None,
  config: Mapping[str, Any],
  default: Sequence[str],
  known: Mapping[str, str] = _TYPES,
) -> Sequence[str]:
  """The kind of each layer, from {a name in `layer_types`: a kind}.

  Raises a ConfigurationError for another list than one of these for each layer.
  """
  types = config.get('layer_types')
  if types is None:
    return default
  count = config['num_hidden_layers']
  are_known = all(isinstance(one, str) and one in known for one in types)
  if not are_known or len(types) != count:
    raise ConfigurationError(
      f'{file} has layer_types: {json.dumps(types):.80}, but {count} of {", ".join(known)} were '
      f'expected. {FETCH}'
    )
  return [known[one] for one in types]


def delta_bindings(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
  """The bindings of Gated DeltaNet in the fields that Qwen3.5 and OLMo Hybrid share."""
  return parts.gated_delta_net(
    config['linear_num_key_heads'],
    config['linear_num_value_heads'],
    config['linear_key_head_dim'],
    config['linear_value_head_dim'],
    taps=config['linear_conv_kernel_dim'],
    **more,
  )
