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
  """Whether a source and the parameters have the same last norm."""
  scale = params['model/final_norm']['scale']
  tensor = tensors.get('final_norm.scale')
  if tensor is None or tensor.shape != scale.shape:
    return False
  values = tensor.whole()
  return bool(np.allclose(values, scale))
