"""Low-rank adapters (LoRA, Hu et al. 2021): a matrix W becomes W + A B, and only A and B learn."""

from collections.abc import Sequence
import dataclasses
import re
from typing import Any

import gin
import haiku as hk
import jax.numpy as jnp

from valkyrie.config.patterns import found_nowhere
from valkyrie.config.ranges import PositiveInt, check_fields
from valkyrie.errors import ConfigurationError, regular_expression
from valkyrie.models.declarations import Declared
from valkyrie.models.layers import parameter
from valkyrie.models.matrices import Adapted
from valkyrie.types import Array

A = '_lora_a'  # the ends of the names of the halves
B = '_lora_b'


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Lora:
  """The matrices with an adapter, and its size.

  A [inputs, rank] begins at random and B [rank, outputs] at zero, so an adapter changes nothing at
  first. There is no factor alpha / rank: the learning rate of B has its effect. `pattern` is a
  regular expression that is found in the paths of the matrices, as in model_info.txt.
  """

  pattern: str = r'attention/(query|key|value|out)$'
  rank: PositiveInt = 8

  def __post_init__(self):
    check_fields(self)
    regular_expression('Lora.pattern', self.pattern)

  def getter(self, following, whole: Array, context: hk.GetterContext) -> Any:
    """A Haiku getter: W + A B for each matrix W whose path fits the pattern."""
    whole = following(whole)
    declared = self._adapted(whole, context)
    if declared is None:
      return whole
    inputs, outputs = declared.axes
    cast = declared.cast
    d_in, d_out = whole.shape
    normal = hk.initializers.RandomNormal(d_in**-0.5)
    name = context.name
    down = parameter(name + A, (d_in, self.rank), normal, axes=(inputs, None), cast=cast)
    up = parameter(name + B, (self.rank, d_out), jnp.zeros, axes=(None, outputs), cast=cast)
    if declared.in_products:
      return Adapted(whole, down, up)
    # Every use casts the sum, so a cast copy of the parts must give the same one.
    adaptation = down.astype(cast) @ up.astype(cast)
    return whole.astype(cast) + adaptation

  def _adapted(self, whole: Array, context: hk.GetterContext) -> Declared | None:
    """The declaration of a matrix whose path fits the pattern; None of others and of halves."""
    declared = context.original_init
    if not isinstance(declared, Declared) or declared.cast is None or whole.ndim != 2:
      return None
    is_half = context.name.endswith((A, B))
    if is_half or not re.search(self.pattern, context.full_name):
      return None
    return declared

  def check(self, matrices: Sequence[str]) -> None:
    """Raises a ConfigurationError if no adapter is among these paths, of all matrices."""
    if not any(path.endswith(A) for path in matrices):
      found = found_nowhere('Lora.pattern', self.pattern, matrices, 'paths of matrices')
      raise ConfigurationError(f'{found} Correct it, or set LanguageModel.lora = None.')
