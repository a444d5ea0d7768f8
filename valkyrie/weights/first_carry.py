"""A learned first carry, added to the weights of the run with which it was learned."""

from collections.abc import Callable, Mapping
import os
import pathlib

import haiku as hk
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.errors import ConfigurationError, with_home
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.types import Params
from valkyrie.weights import forms, named_tensors, tensor_files
from valkyrie.weights.initial import FRESH, InitialWeights
from valkyrie.weights.source import open_source
from valkyrie.weights.tensor_files import Tensor


def with_first_carry(
  model: Model,
  make: Callable[..., LanguageModel],
  params: Params,
  source: str,
) -> Params:
  """The parameters of a run, with the first carry of a source for a model that has one.

  Raises a ConfigurationError if the source has none, or one that was learned with other weights.
  """
  tensors = open_source(source).tensors
  has_first_carry = any(map(named_tensors.is_first_carry, tensors))
  if not has_first_carry or not _are_of_same_weights(source, tensors, params):
    raise ConfigurationError(
      f'{source} has no first carry that was learned with the weights of this run. Learn one by '
      "gin/optimizers/first_carry.gin from this run; export.form = 'first_carry' exports it."
    )
  new = {}
  for module, group in model.parameters().items():
    new[module] = {}
    for name, parameter in group.items():
      if name not in params[module]:
        new[module][name] = jnp.zeros_like(parameter.shape)
  rules = ((r'^(?!.*\.first_carry)', FRESH),)
  weights = InitialWeights(source, step=LATEST, rules=rules, partial=False)
  whole = hk.data_structures.merge(params, new)
  loaded, _ = weights.load(model, make, whole, '', lambda line: None)
  return loaded


def first_rows(tensors: Mapping[str, Tensor]) -> dict[str, float]:
  """{tensor of weights: the sum of the magnitudes in its first row}, which tells weights apart."""
  sums = {}
  for name, tensor in tensors.items():
    if not named_tensors.is_first_carry(name):
      row = tensor.read(_first_row(tensor))
      sums[name] = float(np.sum(np.abs(forms.wide(row)), dtype=np.float64))
  return sums


def _are_of_same_weights(source: str, tensors: Mapping[str, Tensor], params: Params) -> bool:
  """Whether the tensors that a source and the parameters share begin with the same numbers.

  A run and an export have all tensors. The folder of a first carry has the last norm, and the
  `first_rows` of all in its config.json; of one from earlier versions the norm alone counts.
  """
  own = named_tensors.merged(named_tensors.of_params(params))
  recorded = _recorded_rows(pathlib.Path(with_home(source)))
  if recorded:
    own_rows = first_rows(own)
    if recorded.keys() != own_rows.keys():
      return False
    pairs = [(recorded[name], own_rows[name]) for name in recorded]
    return np.allclose(*np.transpose(pairs), rtol=1e-4, atol=1e-6)
  theirs = named_tensors.merged(tensors)
  shared = own.keys() & theirs.keys()
  if 'final_norm.scale' not in shared:
    return False
  for name in shared:
    if not named_tensors.is_first_carry(name) and not _begin_equally(own[name], theirs[name]):
      return False
  return True


def _recorded_rows(folder: pathlib.Path) -> dict[str, float]:
  """The `first_rows` in the config.json of an exported first carry; none in other sources."""
  file = folder / 'config.json'
  if not folder.is_dir() or not os.path.lexists(file):
    return {}
  rows = tensor_files.read_json(file).get('first_rows', {})
  is_whole = isinstance(rows, dict) and all(isinstance(row, float) for row in rows.values())
  if not is_whole:
    raise ConfigurationError(f'{file} is damaged: its first_rows are not numbers. Export it again.')
  return rows


def _first_row(tensor: Tensor) -> tuple[slice, ...]:
  """The index of the first row, or of all of a vector."""
  index = tuple(slice(None) for _ in tensor.shape)
  if len(tensor.shape) > 1:
    return (slice(0, 1), *index[1:])
  return index


def _begin_equally(x: Tensor, y: Tensor) -> bool:
  """Whether the first rows are equal, or all of two vectors; a table may have more rows."""
  if len(x.shape) != len(y.shape) or x.shape[1:] != y.shape[1:]:
    return False
  index = _first_row(x)
  rows_of_x = x.read(index)
  rows_of_y = y.read(index)
  return rows_of_x.shape == rows_of_y.shape and np.allclose(rows_of_x, rows_of_y)
