"""The fields of rotary positions, and what they bind."""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.rotary import Rotary
from valkyrie.weights import config_fields
from valkyrie.weights.config_fields import FETCH, Fields

# The `max_position_embeddings` of an export whose layers have no limit: recurrences, and windows.
# Other programs make a table of the angles of so many tokens.
WITHOUT_A_LIMIT = 2**17
# (name there, parameter of Rotary, its type) of scaled positions.
_SCALING = (
  ('factor', 'factor', float),
  ('original_max_position_embeddings', 'original_context', int),
  ('low_freq_factor', 'low_turns', float),
  ('high_freq_factor', 'high_turns', float),
)
# In a context of one token no pair turns once, so the factor slows all of them.
_LINEAR = {'original_context': 1, 'low_turns': 1.0, 'high_turns': 4.0}
FIELDS = Fields(
  {name: kind for name, _, kind in _SCALING} | {'rope_theta': float, 'rope_type': str, 'type': str}
)


def check(file: pathlib.Path, found: Mapping[str, Any], fields: Fields = FIELDS) -> None:
  """Raises a ConfigurationError for an object of rotary positions that cannot be read.

  `fields` are those inside the object, if the class has others than a Llama.
  """
  objects = [found.get(name) or {} for name in ('rope_parameters', 'rope_scaling')]
  for inside in objects:
    config_fields.check(file, inside, fields)
  if all(objects) and objects[0] != objects[1]:
    raise ConfigurationError(
      f'{file} has rope_parameters: {json.dumps(objects[0]):.80} and rope_scaling: '
      f'{json.dumps(objects[1]):.80}. Remove the one that does not count.'
    )


def inside(config: Mapping[str, Any]) -> Mapping[str, Any]:
  """The object of a configuration; two generations of the format name it differently."""
  return config.get('rope_parameters') or config.get('rope_scaling') or {}


def bindings(config: Mapping[str, Any], default_base: float = 10_000.0) -> dict[str, Any]:
  """The bindings of `Rotary`; raises a ConfigurationError for another kind of scaling."""
  scaling = inside(config)
  base = scaling.get('rope_theta') or config.get('rope_theta', default_base)
  kind = scaling.get('rope_type') or scaling.get('type') or 'default'
  older = scaling.get('type') or kind  # before transformers 4.43
  if older != kind:
    raise ConfigurationError(
      f'The configuration has rotary positions of rope_type {kind!r:.40} and of type '
      f'{older!r:.40}, two spellings of one field. Remove the one that does not count.'
    )
  found = {'Rotary.base': float(base), 'Rotary.factor': 1.0}
  if kind == 'llama3':
    missing = [name for name, _, _ in _SCALING if scaling.get(name) is None]
    if missing:
      raise ConfigurationError(
        "The configuration scales rotary positions by 'llama3' without "
        f'{", ".join(missing)}. {FETCH}'
      )
    for theirs, ours, number_type in _SCALING:
      found[f'Rotary.{ours}'] = number_type(scaling[theirs])
    return found
  if kind == 'linear':
    if scaling.get('factor') is None:
      raise ConfigurationError(
        f"The configuration scales rotary positions by 'linear' without factor. {FETCH}"
      )
    found['Rotary.factor'] = float(scaling['factor'])
    return found | {f'Rotary.{ours}': value for ours, value in _LINEAR.items()}
  if kind != 'default':
    raise ConfigurationError(
      f'The configuration scales rotary positions by rope_type {kind!r}, but Valkyrie has '
      "only 'llama3', 'linear' and 'default'. Take a model with one of these."
    )
  if scaling.get('factor', 1) != 1:
    raise ConfigurationError(
      f"The configuration has rotary positions of rope_type 'default' with the factor "
      f'{scaling["factor"]!r:.40}, which this type does not use. Correct the type or remove the '
      'factor.'
    )
  return found


def scaling_of(rotary: Rotary) -> dict[str, Any]:
  """The object of scaled positions; empty where they are not scaled."""
  if rotary.factor == 1:
    return {}
  if all(getattr(rotary, ours) == value for ours, value in _LINEAR.items()):
    return {'rope_type': 'linear', 'factor': rotary.factor}
  numbers = {theirs: getattr(rotary, ours) for theirs, ours, _ in _SCALING}
  return {'rope_type': 'llama3', **numbers}
