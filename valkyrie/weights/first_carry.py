"""A learned first carry, added to the weights of the run with which it was learned."""

from collections.abc import Callable, Mapping

import haiku as hk
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.errors import ConfigurationError
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.types import Params
from valkyrie.weights import named_tensors
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
  has_first_carry = any('.first_carry' in name for name in tensors)
  if not has_first_carry or not _are_of_same_weights(tensors, params):
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


def _are_of_same_weights(tensors: Mapping[str, Tensor], params: Params) -> bool:
  """Whether the tensors that a source and the parameters share begin with the same numbers.

  A file of a first carry has the last norm alone; a run and an export have all tensors.
  """
  own = named_tensors.merged(named_tensors.of_params(params))
  theirs = named_tensors.merged(tensors)
  shared = own.keys() & theirs.keys()
  if 'final_norm.scale' not in shared:
    return False
  for name in shared:
    if '.first_carry' not in name and not _begin_equally(own[name], theirs[name]):
      return False
  return True


def _begin_equally(x: Tensor, y: Tensor) -> bool:
  """Whether the first rows are equal, or all of two vectors; a table may have more rows."""
  if len(x.shape) != len(y.shape) or x.shape[1:] != y.shape[1:]:
    return False
  index = tuple(slice(None) for _ in x.shape)
  if len(x.shape) > 1:
    index = (slice(0, 1), *index[1:])
  rows_of_x = x.read(index)
  rows_of_y = y.read(index)
  return rows_of_x.shape == rows_of_y.shape and np.allclose(rows_of_x, rows_of_y)
