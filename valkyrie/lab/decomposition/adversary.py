"""Adversarial masks: sources that ascend the reconstruction loss, shared by tokens (D13 to D17)."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import ClassVar, NamedTuple
import zlib

import gin
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.lab.decomposition.masks import Stochastic, Tokens
from valkyrie.models.sites import Site
from valkyrie.types import Array

SCOPES = ('all', 'rows', 'positions', 'tokens')
DTYPES = ('float32', 'bfloat16')
_B1 = 0.5
_B2 = 0.99
_EPSILON = 1e-8

Sources = Mapping[str, Array]


class Attack(NamedTuple):
  """The sources in [0, 1] by path, their two moments for Adam, and the number of updates."""

  sources: Sources
  mean: Sources
  square: Sources
  count: Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Adversary(Stochastic):
  """A pass whose sources maximize its loss, which the components then learn to withstand.

  Attributes:
    scope: which tokens share a source: 'all'; 'rows', the tokens of a row, with `sets` sources for
      the rows in turns; 'positions', the tokens at the same place of each step's rows; 'tokens',
      only the token at this place of this row.
    sets: the number of sets of sources, in the scope 'rows'.
    ascents: ascents before each step; the step's own gradient gives one more to a persistent
      adversary.
    persistent: keep the sources and their moments from step to step, and ascend with Adam;
      otherwise draw new sources in each step, and ascend by the signs of gradients.
    rate: the learning rate of the sources, or the size of a step by signs.
    warmup_steps: steps of the run in which a persistent adversary's rate rises linearly.
    dtype: 'float32', or 'bfloat16', of sources and moments: half of the memory, which counts in the
      scopes 'positions' and 'tokens'. Near 1, its sources move by 1/256 or not at all.
  """

  scope: str = 'all'
  sets: PositiveInt = 1
  ascents: NonNegativeInt = 2
  persistent: bool = True
  rate: PositiveFloat = 0.01
  warmup_steps: NonNegativeInt = 0
  dtype: str = 'float32'

  adversarial: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    check_choice('Adversary.scope', self.scope, SCOPES)
    check_choice('Adversary.dtype', self.dtype, DTYPES)
    if self.source is not None or self.live not in ('all', 'subset'):
      raise ConfigurationError(
        f'Adversary.live={self.live!r} with source={self.source}: an adversary finds its own '
        "sources in one pass. Set live = 'all' or 'subset', and source = None."
      )
    if self.sets > 1 and self.scope != 'rows':
      raise ConfigurationError(
        f"Adversary.sets={self.sets} needs Adversary.scope = 'rows', not {self.scope!r}. Set this "
        'scope, or Adversary.sets = 1.'
      )

  def start(
    self,
    sites: Mapping[str, Site],
    rows: int,
    tokens: int,
    seed: int,
  ) -> Attack:
    """Uniform sources [R, S, L, C + 1], for the rows and the tokens of a row that do not share."""
    if self.sets > rows:
      raise ConfigurationError(
        f'Adversary.sets={self.sets}, but a step has {rows} rows. Set Adversary.sets to at most '
        f'{rows}.'
      )
    match self.scope:
      case 'all':
        shared = (1, 1)
      case 'rows':
        shared = (self.sets, 1)
      case 'positions':
        shared = (1, tokens)
      case _:
        shared = (rows, tokens)
    zeros = {}
    for path, site in sites.items():
      shape = (*shared, site.layers, site.components + 1)
      zeros[path] = jnp.zeros(shape, self.dtype)
    attack = Attack(zeros, zeros, zeros, jnp.zeros((), jnp.int32))
    return self.restarted(attack, seed, jnp.zeros((), jnp.int32))

  def restarted(self, attack: Attack, seed: int, step: Array) -> Attack:
    """The attack with new sources, a function of the seed and the step."""

    drawn = {}
    for path, source in attack.sources.items():
      key_of_run = jax.random.key(seed)
      key = jax.random.fold_in(key_of_run, zlib.crc32(path.encode()))
      key = jax.random.fold_in(key, step)
      drawn[path] = jax.random.uniform(key, source.shape).astype(source.dtype)
    return attack._replace(sources=drawn)

  def spread(self, sources: Sources, tokens: Tokens) -> dict[str, Array]:
    """{path: r [L, B, T, C + 1]}: the source of each token of a chunk."""
    spread = {}
    for path, source in sources.items():
      rows, places = source.shape[:2]
      row = tokens.row[:, None] % rows
      place = tokens.number % places
      # Tokens that share a source add up its gradient in float32.
      wide = source.astype(jnp.promote_types(source.dtype, jnp.float32))
      r = wide[row, place]
      spread[path] = jnp.moveaxis(r, 2, 0)
    return spread

  def ascend(self, attack: Attack, step: Array, gradient: Sources) -> Attack:
    """One update by a gradient of the loss, projected to [0, 1]."""
    if self.persistent:
      return self._ascend_by_adam(attack, step, gradient)

    def move(r, g):
      moved = jnp.clip(r + self.rate * jnp.sign(g), 0, 1)
      return moved.astype(r.dtype)

    sources = jax.tree.map(move, attack.sources, gradient)
    return attack._replace(sources=sources)

  def _ascend_by_adam(self, attack: Attack, step: Array, gradient: Sources) -> Attack:
    # The gradient is float32, in which the moments are computed, and then rounded to be kept.
    def next_mean(m, g):
      return _B1 * m + (1 - _B1) * g

    def next_square(v, g):
      return _B2 * v + (1 - _B2) * g * g

    def kept(new, old):
      return new.astype(old.dtype)

    count = attack.count + 1
    mean = jax.tree.map(next_mean, attack.mean, gradient)
    square = jax.tree.map(next_square, attack.square, gradient)
    exponent = count.astype(jnp.float32)
    mean_weight = 1 - _B1**exponent
    square_weight = 1 - _B2**exponent
    steps_to_full_rate = max(self.warmup_steps, 1)
    warmup = jnp.minimum(1.0, (step + 1) / steps_to_full_rate)
    rate = self.rate * warmup

    def move(r, m, v):
      unbiased_mean = m / mean_weight
      unbiased_square = v / square_weight
      deviation = jnp.sqrt(unbiased_square)
      direction = unbiased_mean / (deviation + _EPSILON)
      moved = jnp.clip(r + rate * direction, 0, 1)
      return moved.astype(r.dtype)

    sources = jax.tree.map(move, attack.sources, mean, square)
    mean = jax.tree.map(kept, mean, attack.mean)
    square = jax.tree.map(kept, square, attack.square)
    return Attack(sources, mean, square, count)

  def ascended(
    self,
    attack: Attack,
    step: Array,
    gradient_of: Callable[[Sources], Sources],
  ) -> Attack:
    """The attack after the ascents that precede a step."""

    if not self.ascents:
      return attack

    def ascend_once(attack, _):
      gradient = gradient_of(attack.sources)
      return self.ascend(attack, step, gradient), None

    attack, _ = lax.scan(ascend_once, attack, None, length=self.ascents)
    return attack
