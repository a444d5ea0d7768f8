"""Low-rank adapters (LoRA, Hu et al. 2021): a matrix W becomes W + A B, and only A and B learn."""

from collections.abc import Sequence
import contextlib
import contextvars
import dataclasses
import re

import gin

from valkyrie.errors import ConfigurationError, regular_expression
from valkyrie.sharding import scopes


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Lora:
  """The matrices with an adapter, and its size.

  A [inputs, rank] begins at random and B [rank, outputs] at zero, so an adapter changes nothing at
  first. There is no further factor: the learning rate of B does what it would do.

  Attributes:
    pattern: a regular expression that is found in the paths of matrices, as in model_info.txt.
    rank: of the adapters.
  """

  pattern: str = r'attention/(query|key|value|out)$'
  rank: int = 8

  def __post_init__(self):
    if self.rank < 1:
      raise ConfigurationError(f'Lora.rank={self.rank} must be at least 1.')
    regular_expression('Lora.pattern', self.pattern)

  def fits(self, path: str) -> bool:
    """Whether the matrix at a path has an adapter."""
    return re.search(self.pattern, path) is not None

  def check(self, matrices: Sequence[str]) -> None:
    """Raises a ConfigurationError if no adapter is among these paths, of all matrices."""
    if not any(path.endswith('_lora_a') for path in matrices):
      raise ConfigurationError(
        f'Lora.pattern={self.pattern!r} is found in none of the {len(matrices)} paths of matrices, '
        f'such as {", ".join(matrices[:3])}. Correct it, or set LanguageModel.lora = None.'
      )


# Of the model whose parameters are being made, see `layers.parameter`.
adapters: contextvars.ContextVar[Lora | None] = contextvars.ContextVar('adapters', default=None)


def adapted(lora: Lora | None) -> contextlib.AbstractContextManager:
  """Gives adapters to the matrices that are made inside."""
  return scopes.within(adapters, lora)
