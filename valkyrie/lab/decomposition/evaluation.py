"""Evaluations of a decomposition: the model under masks, and how many components are active.

Of the targets: accuracy and cross-entropy under seven maskings, its excess over the target model's,
and the divergence from it. Of all tokens: how many components are active, and how many are alive.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import gin
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.config import ranges
from valkyrie.config.computation import may_change_on_resume
from valkyrie.lab.decomposition import draws, importance
from valkyrie.lab.decomposition.adversary import Adversary, Sources
from valkyrie.lab.decomposition.importance import Importance
from valkyrie.lab.decomposition.masks import Stochastic, Tokens, masked
from valkyrie.models.declarations import Masks
from valkyrie.models.features import SITES, Features
from valkyrie.models.model import Model
from valkyrie.models.sites import Site, sites_of
from valkyrie.training.losses import divergences, token_scores
from valkyrie.training.objective import Chunk, Part, Term
from valkyrie.types import Array, Batch, Carry, Params
from valkyrie.weights.named_tensors import names_of

# The masks m of components with importances g, for r uniform in [0, 1]: 1; g + (1 - g) r, with the
# delta; g; g > threshold; r; 0; and for each token as many as exceed the threshold, at random.
MASKINGS = ('unmasked', 'stochastic', 'important', 'rounded', 'random', 'zero', 'shuffled')
ADVERSARIAL = 'adversarial'
ALIVE = 1e-6  # the mean importance above which a component is alive
_USE = 2**20  # of the first draw: no pass of training has it


class Memory(NamedTuple):
  """The carry of a decomposition: of draws, importances, and masked passes.

  Training has the passes of each loss, an evaluation one pass of each masking and the attacked one
  last. With the memory 'clean', masked passes have none.
  """

  place: draws.Place
  importance: Carry
  passes: Sequence[Any]


def with_memory(
  model: Model, name: str, functions: Importance, passes: Callable[[Carry], Sequence[Any]]
) -> Model:
  """Adds the importance functions, and the carries of the masked passes, made of a fresh carry."""

  def initial_carry(rows):
    one = {'model': model.initial_carry(rows)['model']}
    of_importance = functions.initial_carry(rows, model.about.compute_dtype)
    return Memory(draws.start(rows), of_importance, passes(one))

  return model.extended(name, *functions.created(sites_of(model.parameters())), initial_carry)


@may_change_on_resume()
@gin.configurable
@dataclasses.dataclass(frozen=True)
class ComponentScores(Term):
  """Sums over the chunks of an evaluation; they are no loss.

  Attributes:
    seed, importance, memory: see `Decomposition`.
    threshold: the importance above which a component is active, and kept by the masking 'rounded'.
    attacked_tokens: the chunks that begin before so many tokens of a row are attacked; 0 for none.
    ascents, rate: steps of the attack by signs, whose sources all tokens of a chunk share.
  """

  seed: int
  importance: Callable[[], Importance]
  memory: str
  threshold: float = 0.1
  attacked_tokens: int = 1024
  ascents: int = 20
  rate: float = 0.1

  name: ClassVar[str] = 'decomposition'
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __post_init__(self):
    ranges.check_fields(self)

  def extended(self, model: Model) -> Model:
    """See `with_memory`."""
    count = len(MASKINGS) + 1 if self.memory == 'own' else 0
    return with_memory(model, self.name, self.importance(), lambda one: [one] * count)

  def importances(
    self, model: Model, params: Params, features: Features, carry: Carry, batch: Batch
  ) -> tuple[dict[str, Array], Carry]:
    """({path: g [L, B, T, C]}, the lower importances of a chunk, and the carry after it)."""
    sites = sites_of(model.parameters())
    inputs = features.sites or {}
    z, after = self.importance()(params, sites, inputs, carry, batch)
    return jax.tree.map(importance.lower, z), after

  def __call__(self, chunk: Chunk) -> Part:
    """All sums of a chunk."""
    sites = sites_of(chunk.model.parameters())
    before: Memory = chunk.before[self.name]
    numbers, place = draws.tokens(before.place, chunk.batch.inputs.shape[1])
    low, of_importance = self.importances(
      chunk.model, chunk.params, chunk.features, before.importance, chunk.batch
    )
    read = _Read(chunk, sites, low, Tokens(self.seed, place.row, numbers))
    clean = {'model': chunk.before['model']}
    *own, last = before.passes or [clean] * (len(MASKINGS) + 1)

    # One program for all maskings, over their stacked carries.
    found, afters = lax.map(
      lambda at: read.under(read.masking(at[0], self.threshold), at[1]),
      (jnp.arange(len(MASKINGS)), jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)),
    )
    nothing = jnp.zeros(())
    weight = jnp.sum(chunk.batch.weights)
    divergence = nothing
    after = last
    attacked = before.place.read[0] < self.attacked_tokens
    if self.attacked_tokens:
      divergence, after = lax.cond(
        attacked, lambda carry: self._attack(read, carry), lambda carry: (nothing, carry), last
      )
    sums = {f'{kind}/{name}': x[n] for kind, x in found.items() for n, name in enumerate(MASKINGS)}
    sums |= {f'kl/{ADVERSARIAL}': divergence, 'attacked': attacked * weight, 'weight': weight}
    sums['loss/target'] = read.scores(chunk.features)['loss']
    real = (chunk.batch.segment_ids > 0).astype(jnp.float32)
    sums['tokens'] = jnp.sum(real)
    for path, g in low.items():
      active = (g > self.threshold).astype(g.dtype)
      sums[f'importance/{path}'] = jnp.einsum('lbtc,bt->lc', g, real)
      sums[f'active/{path}'] = jnp.einsum('lbtc,bt->lc', active, real)
    own = [*(jax.tree.map(lambda leaf, n=n: leaf[n], afters) for n in range(len(MASKINGS))), after]
    return Part(nothing, sums, Memory(place, of_importance, own if before.passes else []))

  def _attack(self, read: '_Read', carry: Carry) -> tuple[Array, Carry]:
    """(The summed divergence that an adversary reaches in a chunk, the carry after the chunk)."""
    adversary = Adversary(
      live='all', source=None, scope='all', sets=1, persistent=False, ascents=self.ascents,
      rate=self.rate,
    )  # fmt: skip

    def reached(sources: Sources):
      r = adversary.of_tokens(sources, read.tokens)
      (given,) = adversary.masks(0, read.low, read.sites, read.tokens, r)
      found, after = read.under(given, carry)
      return found['kl'], after

    def gradient_of(sources: Sources):
      gradient = jax.grad(lambda r: reached(r)[0])(sources)
      # Inside a `shard_map` each device has the gradient of its own tokens.
      return lax.psum(gradient, jax.sharding.get_abstract_mesh().manual_axes)

    start = adversary.start(read.sites, 1, 1, self.seed)
    return reached(adversary.ascended(start, jnp.zeros((), jnp.int32), gradient_of).sources)

  def metrics(self, model: Model, sums: Mapping[str, Any]) -> dict[str, float]:
    """See docs/decomposition.md for their names and meaning."""
    found = {}
    target = _mean(sums['loss/target'], sums['weight'])
    for name in MASKINGS:
      loss = _mean(sums[f'loss/{name}'], sums['weight'])
      found |= {f'loss/{name}': loss, f'excess_loss/{name}': loss - target}
      found |= {
        f'{n}/{name}': _mean(sums[f'{n}/{name}'], sums['weight']) for n in ('kl', 'accuracy')
      }
    if sums['attacked']:
      found[f'kl/{ADVERSARIAL}'] = _mean(sums[f'kl/{ADVERSARIAL}'], sums['attacked'])
    names = names_of(model.parameters())
    alive = []
    shares = []
    for path in sites_of(model.parameters()):
      share = sums[f'active/{path}'] / max(sums['tokens'], 1)
      found |= {f'active/{n}': float(a) for n, a in zip(names[path], share.sum(-1), strict=True)}
      alive.append((sums[f'importance/{path}'] / max(sums['tokens'], 1) > ALIVE).ravel())
      shares.append(share.ravel())
    lives = np.concatenate(alive)
    active = np.concatenate(shares)
    found |= {'active': float(active.sum()), 'alive': float(lives.sum())}
    found['ever_active'] = float((active > 0).sum())
    found['density'] = _mean(active[lives].sum(), lives.sum())
    return {f'components/{name}': value for name, value in found.items()}


class _Read(NamedTuple):
  """A chunk with its lower importances, to be read under masks."""

  chunk: Chunk
  sites: Mapping[str, Site]
  low: Mapping[str, Array]
  tokens: Tokens

  def masking(self, number: Array, threshold: float) -> dict[str, Masks]:
    """The masks of MASKINGS[number] for every site, from draws of their own."""
    uniform = Stochastic(live='all', source=None)
    r = uniform.sources([*self.sites], self.sites, _USE + number, self.tokens)
    (stochastic,) = uniform.masks(0, self.low, self.sites, self.tokens, r)

    def of(low, path):
      kinds = (
        jnp.ones_like,
        lambda _: stochastic[path].components,
        lambda g: g,
        lambda g: (g > threshold).astype(g.dtype),
        lambda g: r[path][..., :-1].astype(g.dtype),
        jnp.zeros_like,
        lambda g: _as_many((g > threshold).sum(-1, keepdims=True), r[path]).astype(g.dtype),
      )
      delta = jnp.where(number == MASKINGS.index('stochastic'), stochastic[path].delta, 0)
      return Masks(lax.switch(number, kinds, low), delta, stochastic[path].route)

    return {path: of(low, path) for path, low in self.low.items()}

  def under(self, given: Mapping[str, Masks], carry: Carry) -> tuple[dict[str, Array], Carry]:
    """(The sums under masks, the carry after the chunk)."""
    features, after = masked(self.chunk, given, carry)
    return self.scores(features), after

  def scores(self, features: Features) -> dict[str, Array]:
    """Weighted cross-entropy, right targets, and divergence from the target model, summed."""
    batch = self.chunk.batch
    size = self.chunk.model.about.vocabulary_size
    found = token_scores(features, batch.targets, size)
    return {
      'loss': jnp.sum(batch.weights * found.loss),
      'accuracy': jnp.sum(batch.weights * found.right),
      'kl': jnp.sum(batch.weights * divergences(self.chunk.features, features, size)),
    }


def _as_many(count: Array, r: Array) -> Array:
  """Where the components of a site are the `count` with the smallest r [..., C + 1]."""
  ranks = jnp.argsort(jnp.argsort(r[..., :-1], axis=-1), axis=-1)
  return ranks < count


def _mean(total: Any, weight: Any) -> float:
  return float(total / weight) if weight else math.nan
