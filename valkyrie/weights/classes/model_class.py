"""A class of models of another program: its fields, bindings and tensors."""

import abc
from collections.abc import Mapping
import pathlib
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.models.language_model import LanguageModel
from valkyrie.weights import config_fields
from valkyrie.weights.config_fields import Fields
from valkyrie.weights.name_table import Names
from valkyrie.weights.plan import Plan

_MOST = 10_000  # layers, and heads of a layer: the tables of names grow with them


class ModelClass(abc.ABC):
  """A class of models: what its config.json means, and where its tensors are.

  Attributes:
    kind: its model_type.
    a_model: what a message calls such a model, such as 'a Llama'.
    fields: what it does with the fields of config.json.
    defaults: the values of fields that are missing.
    mixer: the recurrence that makes a model one of this class; empty for a decoder.
  """

  kind: str
  a_model: str
  fields: Fields
  defaults: Mapping[str, Any] = {}
  mixer = ''

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in a file.

    Raises a ConfigurationError that names a field which is missing, of another type, unknown, or
    of something that Valkyrie does not compute.
    """
    config_fields.check(file, found, self.fields)
    config_fields.check_needed(file, found, self.fields.needed, self.a_model)
    for name in ('num_hidden_layers', 'num_attention_heads'):
      count = found.get(name) or 1
      if count > _MOST:
        raise ConfigurationError(
          f'{file} has {name}: {count}, but at most {_MOST:,} were expected. {config_fields.FETCH}'
        )
    return dict(found)

  @abc.abstractmethod
  def plan(self, config: Mapping[str, Any]) -> Plan:
    """The model of a checked configuration; raises a ConfigurationError that names a field."""

  @abc.abstractmethod
  def names(self, config: Mapping[str, Any]) -> Names:
    """The tensors of a model with this configuration."""

  @abc.abstractmethod
  def config_of(self, model: LanguageModel) -> dict[str, Any] | str:
    """The configuration of a model, inside Haiku, or what this class has not."""
