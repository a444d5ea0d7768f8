"""The heads of a window attention: their number, width and dilations."""

from collections.abc import Sequence
from typing import NamedTuple

from valkyrie.errors import ConfigurationError
from valkyrie.models.layers import check_sizes
from valkyrie.types import Array


class Heads(NamedTuple):
  """Grouped-query heads.

  count: H; kv: J, which divides H; width: K.
  dilations: d of each of the J key-value heads.
  """

  count: int
  kv: int
  width: int
  dilations: tuple[int, ...]

  @property
  def q_width(self) -> int:
    """H · K, the width of the queries of all heads."""
    return self.count * self.width

  @property
  def kv_width(self) -> int:
    """J · K, the width of the keys, or of the values, of all heads."""
    return self.kv * self.width

  def split(self, x: Array) -> Array:
    """[B, T, heads · K] -> [B, T, heads, K]."""
    return x.reshape(*x.shape[:2], -1, self.width)


def checked_heads(
  owner: str,
  heads: int,
  head_width: int,
  kv_heads: int | None,
  window: int,
  dilations: Sequence[int] | None,
) -> Heads:
  """The heads of the module `owner`; J defaults to H, dilations to 1.

  Raises:
    ConfigurationError: the heads cannot be formed.
  """
  kv_heads = kv_heads or heads
  check_sizes(owner, heads=heads, kv_heads=kv_heads, head_width=head_width, window=window)
  if heads % kv_heads or head_width % 2:
    raise ConfigurationError(
      f'{owner}: heads={heads} must be a multiple of kv_heads={kv_heads}, and '
      f'head_width={head_width} must be even.'
    )
  each = tuple(dilations or (1,) * kv_heads)
  if len(each) != kv_heads or min(each) < 1:
    raise ConfigurationError(
      f'{owner}.dilations={each}: give one integer of at least 1 for each of the '
      f'kv_heads={kv_heads}.'
    )
  return Heads(heads, kv_heads, head_width, each)
