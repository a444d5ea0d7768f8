"""The base of both Longformer mixers: heads with windows over time."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

import haiku as hk

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.layers import check_sizes, project
from valkyrie.sharding import sequence_parallel
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


@dataclasses.dataclass(eq=False)
class WindowAttention(hk.Module):
  """Heads, and their projections.

  Attributes:
    heads: H.
    head_width: K, even, since rotary positions rotate pairs.
    window: W, the number of tokens before itself, or on each side, that a token sees.
    kv_heads: J, dividing H; None means H.
    dilations: d of each key-value head, which sees the distances d, 2d, ..., Wd; None means 1.
    document_start: g, the first tokens of a document, which are global.
    slice_size: S, queries computed at once.
    dropout: the share of attention weights zeroed in training.
    rotary: the class of the frequencies of positions (`Rotary.base = 500000.0` in gin).
    name: Haiku's.

  Raises:
    ConfigurationError: the heads cannot be formed, or a number is out of its range.
  """

  heads: int
  head_width: int
  window: int
  kv_heads: int | None = None
  dilations: Sequence[int] | None = None
  document_start: int = 0
  slice_size: int = 128
  dropout: float = 0.0
  rotary: Callable[[], Rotary] = Rotary
  name: str | None = None

  def __post_init__(self):
    super().__post_init__()
    owner, kv_heads = type(self).__name__, self.kv_heads or self.heads
    check_sizes(owner, heads=self.heads, kv_heads=kv_heads, head_width=self.head_width)
    check_sizes(owner, window=self.window, slice_size=self.slice_size)
    check_sizes(owner, 0, document_start=self.document_start)
    if self.heads % kv_heads or self.head_width % 2:
      raise ConfigurationError(
        f'{owner}: heads={self.heads} must be a multiple of kv_heads={kv_heads}, and '
        f'head_width={self.head_width} must be even.'
      )
    dilations = tuple(self.dilations or (1,) * kv_heads)
    if len(dilations) != kv_heads or min(dilations) < 1:
      raise ConfigurationError(
        f'{owner}.dilations={dilations}: give one integer of at least 1 for each of the '
        f'kv_heads={kv_heads}.'
      )
    self._rotary = self.rotary()
    self._heads = Heads(self.heads, kv_heads, self.head_width, dilations)

  @hk.transparent
  def _project_heads(self, x: Array) -> tuple[Array, Array, Array]:
    """x [B, T, D] -> queries [B, T, H, K], and keys and values [B, T, J, K]."""
    heads = self._heads
    q, k, v = project(
      x, ('embed', 'heads'), query=heads.q_width, key=heads.kv_width, value=heads.kv_width
    )
    return heads.split(q), heads.split(k), heads.split(v)

  @hk.transparent
  def _project_out(self, out: Array, width: int) -> Array:
    """[B, T, H, K] -> [B, T, D]."""
    (projected,) = project(out.reshape(*out.shape[:2], -1), ('heads', 'embed'), out=width)
    return projected

  def _dropout(self) -> Dropout | None:
    """Dropout of attention weights, in training."""
    key = hk.maybe_next_rng_key() if self.dropout else None
    return None if key is None else Dropout(sequence_parallel.fold_in_shard(key), self.dropout)
