"""Adversarial masks: sources that ascend the reconstruction loss, shared by tokens (D13 to D17)."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import ClassVar, NamedTuple
import zlib

import gin
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.lab.decomposition.masks import Stochastic, Tokens
from valkyrie.models.sites import Site
from valkyrie.types import Array

SCOPES = ('all', 'rows', 'positions', 'tokens')
_B1 = 0.5
_B2 = 0.99
_EPSILON = 1e-8

Sources = Mapping[str, Array]


class Attack(NamedTuple):
  """The sources in [0, 1] by path, their moments for Adam, and the number of updates."""

  sources: Sources
  mean: Sources
  square: Sources
  count: Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Adversary(Stochastic):
  """A pass whose sources maximize its loss, which the components then learn to withstand.

  Attributes:
    scope: who shares a source: 'all' tokens; 'rows', the tokens of a row, with `sets` sources for
      the rows in turns; 'positions', the tokens at the same place of each step's rows; 'tokens',
      only the token at this place of this row.
    sets: of sources, in the scope 'rows'.
    ascents: before each step; the step's own gradient gives one more to a persistent adversary.
    persistent: keep the sources and their moments from step to step, and ascend with Adam; else
      draw them anew in each step, and ascend by the signs of gradients.
    rate: the learning rate of the sources, or the size of a step by signs.
    warmup_steps: steps of the run in which a persistent adversary's rate rises linearly.
  """

  scope: str = 'all'
  sets: int = 1
  ascents: int = 2
  persistent: bool = True
  rate: float = 0.01
  warmup_steps: int = 0

  adversarial: ClassVar[bool] = True

  def __post_init__(self):
    super().__post_init__()
    check_choice('Adversary.scope', self.scope, SCOPES)
    if self.source is not None or self.live not in ('all', 'subset'):
      raise ConfigurationError(
        f'Adversary.live={self.live!r} with source={self.source}: an adversary has sources of its '
        "own. Use live = 'all' or 'subset', and leave source = None."
      )
    if self.sets > 1 and self.scope != 'rows':
      raise ConfigurationError(
        f"Adversary.sets={self.sets} needs Adversary.scope = 'rows', not {self.scope!r}."
      )

  def start(self, sites: Mapping[str, Site], rows: int, tokens: int, seed: int) -> Attack:
    """Uniform sources [R, S, L, C + 1], for the rows and the tokens of a row that do not share."""
    if self.sets > rows:
      raise ConfigurationError(
        f'Adversary.sets={self.sets}, but a step has {rows} rows. Use at most as many sets.'
      )
    own_rows = {'rows': self.sets, 'tokens': rows}.get(self.scope, 1)
    own_tokens = tokens if self.scope in ('positions', 'tokens') else 1

    zeros = {
      path: jnp.zeros((own_rows, own_tokens, site.layers, site.components + 1))
      for path, site in sites.items()
    }
    attack = Attack(zeros, zeros, zeros, jnp.zeros((), jnp.int32))
    return self.restarted(attack, seed, jnp.zeros((), jnp.int32))

  def restarted(self, attack: Attack, seed: int, step: Array) -> Attack:
    """The attack with new sources, a function of the seed and the step."""

    def drawn(path, source):
      key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
      return jax.random.uniform(jax.random.fold_in(key, step), source.shape)

    return attack._replace(sources={p: drawn(p, r) for p, r in attack.sources.items()})

  def of_tokens(self, sources: Sources, tokens: Tokens) -> dict[str, Array]:
    """{path: r [L, B, T, C + 1]} of the tokens of a chunk."""

    def of(source):
      rows, places = source.shape[:2]
      found = source[tokens.row[:, None] % rows, tokens.number % places]
      return jnp.moveaxis(found, 2, 0)

    return {path: of(source) for path, source in sources.items()}

  def ascend(self, attack: Attack, step: Array, gradient: Sources) -> Attack:
    """One update by a gradient of the loss, projected to [0, 1]."""
    if not self.persistent:
      moved = jax.tree.map(
        lambda r, g: jnp.clip(r + self.rate * jnp.sign(g), 0, 1), attack.sources, gradient
      )
      return attack._replace(sources=moved)
    count = attack.count + 1
    mean = jax.tree.map(lambda m, g: _B1 * m + (1 - _B1) * g, attack.mean, gradient)
    square = jax.tree.map(lambda v, g: _B2 * v + (1 - _B2) * g * g, attack.square, gradient)
    exponent = count.astype(jnp.float32)
    rate = self.rate * jnp.minimum(1.0, (step + 1) / max(self.warmup_steps, 1))

    def moved(r, m, v):
      direction = m / (1 - _B1**exponent) / (jnp.sqrt(v / (1 - _B2**exponent)) + _EPSILON)
      return jnp.clip(r + rate * direction, 0, 1).astype(r.dtype)

    return Attack(jax.tree.map(moved, attack.sources, mean, square), mean, square, count)

  def ascended(
    self, attack: Attack, step: Array, gradient_of: Callable[[Sources], Sources]
  ) -> Attack:
    """The attack after the ascents that precede a step."""

    def one(attack, _):
      return self.ascend(attack, step, gradient_of(attack.sources)), None

    return lax.scan(one, attack, None, length=self.ascents)[0] if self.ascents else attack
