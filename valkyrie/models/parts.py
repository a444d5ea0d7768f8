"""Names of the parts of a model, by which sizes and gradients are summed."""

from collections.abc import Callable
import re
from typing import Any

from valkyrie.types import Params


def is_of_model(module: str) -> bool:
  """Whether a module is of the language model, and not of a term of the objective."""
  return module.partition('/')[0] == 'model'


def part_of(module: str, name: str) -> str:
  """The part of a parameter: 'embedding', 'norms', 'mlp', or the name of its mixer or insert.

  `module` is Haiku's name, such as 'model/layers/block_0/~/gated_recurrence/~/s5'. What a term of
  the objective adds is one part, such as 'teacher'.
  """
  if not is_of_model(module):
    return module.partition('/')[0]
  names = [re.sub(r'_\d+$', '', part) for part in module.split('/')]
  if '~' in names:
    return names[names.index('~') + 1]
  if names[-1].endswith('norm'):
    return 'norms'
  if len(names) == 1:
    return name
  return names[-1]


def sums_of_parts(params: Params, measure: Callable[..., Any]) -> dict[str, Any]:
  """{part: the sum of `measure` of its parameters}."""
  sums: dict[str, Any] = {}
  for module, parameters in params.items():
    for name, value in parameters.items():
      part = part_of(module, name)
      size = measure(value)
      if part in sums:
        size = sums[part] + size
      sums[part] = size
  return dict(sorted(sums.items()))
