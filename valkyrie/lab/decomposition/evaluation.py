"""Evaluations of a decomposition: the model under masks, and how many components are active.

For the targets: accuracy and cross-entropy under seven maskings, the excess of the cross-entropy
over the target model's, and the divergence from that model. For all tokens: the error of the
residual stream and of attention patterns under maskings, how many components are active, and how
many are alive.
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

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import Fraction, NonNegativeInt, PositiveFloat, Seed, check_fields
from valkyrie.lab.decomposition import draws, importance
from valkyrie.lab.decomposition.activation_errors import hidden_sums, layers_of, pattern_sums
from valkyrie.lab.decomposition.adversary import Adversary, Sources
from valkyrie.lab.decomposition.importance import Importance
from valkyrie.lab.decomposition.masks import Stochastic, Tokens, masked, smallest
from valkyrie.models.attention.patterns import Patterns
from valkyrie.models.features import SITES, Features, Kind
from valkyrie.models.matrices import Masks
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
STREAM = 'stream'  # the activations whose error is measured
ALIVE = 1e-6  # the mean importance above which a component is alive
_USE = 2**20  # the use of the first draw: no pass of training has it


class Memory(NamedTuple):
  """The carry of a decomposition: the place of its draws, and carries.

  importance: the carry of the importance functions.
  passes: the carries of masked passes, and none with the memory 'clean'. Training has a list of
    them for each loss; an evaluation has one for each masking, and the attacked pass's at the end.
  """

  place: draws.Place
  importance: Carry
  passes: Sequence[Any]


def with_memory(
  model: Model,
  name: str,
  functions: Importance,
  passes: Callable[[Carry], Sequence[Any]],
) -> Model:
  """Adds the importance functions, and the carries of the masked passes, made of a fresh carry."""

  def initial_carry(rows):
    carries = model.initial_carry(rows)
    carry_of_pass = {'model': carries['model']}
    return Memory(
      place=draws.start(rows),
      importance=functions.initial_carry(rows, model.about.compute_dtype),
      passes=passes(carry_of_pass),
    )

  init, parameters = functions.created(sites_of(model.parameters()))
  return model.extended(name, init, parameters, initial_carry)


@may_change_on_resume()
@gin.configurable
@dataclasses.dataclass(frozen=True)
class ComponentScores(Term):
  """Sums over the chunks of an evaluation; they add nothing to the loss.

  Attributes:
    seed, importance, memory: see `Decomposition`.
    threshold: the importance above which a component is active, and kept by the masking 'rounded'.
    attacked_tokens: the chunks that begin before so many tokens of a row are attacked; 0 for none.
    ascents, rate: steps of the attack by signs, whose sources all tokens of a chunk share.
    pattern_queries: tokens of each chunk whose attention patterns are compared, evenly spaced; 0
      for none. Memory grows with their number x the keys that a token may read.
  """

  seed: Seed
  importance: Callable[[], Importance]
  memory: str
  threshold: Fraction = 0.1
  attacked_tokens: NonNegativeInt = 1024
  ascents: NonNegativeInt = 20
  rate: PositiveFloat = 0.1
  pattern_queries: NonNegativeInt = 16

  name: ClassVar[str] = 'decomposition'

  def __post_init__(self):
    check_fields(self)

  @property
  def asked(self) -> Patterns:
    """The queries of a chunk whose attention patterns are compared."""
    return Patterns(self.pattern_queries)

  @property
  def activations(self) -> Sequence[Kind]:
    """The inputs of sites, and what is compared."""
    return (SITES, STREAM, self.asked)

  def extended(self, model: Model) -> Model:
    """See `with_memory`."""
    count = 0
    if self.memory == 'own':
      count = len(MASKINGS) + 1
    return with_memory(model, self.name, self.importance(), lambda carry: [carry] * count)

  def importances(
    self,
    model: Model,
    params: Params,
    features: Features,
    carry: Carry,
    batch: Batch,
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
    time = chunk.batch.inputs.shape[1]
    numbers, place = draws.tokens(before.place, time)
    low, importance_carry = self.importances(
      chunk.model, chunk.params, chunk.features, before.importance, chunk.batch
    )
    tokens = Tokens(self.seed, place.row, numbers)
    read = _Read(chunk, sites, low, tokens)
    clean = {'model': chunk.before['model']}
    *carries, last = before.passes or [clean] * (len(MASKINGS) + 1)
    by_masking, carries = self._under_maskings(read, carries)

    weight = jnp.sum(chunk.batch.weights)
    is_attacked = before.place.read[0] < self.attacked_tokens
    divergence = jnp.zeros(())
    if self.attacked_tokens:
      divergence, last = lax.cond(
        is_attacked,
        lambda carry: self._attack(read, carry),
        lambda carry: (jnp.zeros(()), carry),
        last,
      )
    real = (chunk.batch.segment_ids > 0).astype(jnp.float32)
    sums = {
      'weight': weight,
      'tokens': jnp.sum(real),
      'queries': jnp.sum(real[:, self.asked.at(time)]),
      'attacked': is_attacked * weight,
      f'kl/{ADVERSARIAL}': divergence,
      'loss/target': read.scores(chunk.features)['loss'],
    }
    for kind, values in by_masking.items():
      for number, name in enumerate(MASKINGS):
        sums[f'{kind}/{name}'] = values[number]
    for path, g in low.items():
      active = (g > self.threshold).astype(g.dtype)
      sums[f'importance/{path}'] = jnp.einsum('lbtc,bt->lc', g, real)
      sums[f'active/{path}'] = jnp.einsum('lbtc,bt->lc', active, real)
    passes = []
    if before.passes:
      passes = [*carries, last]
    return Part(jnp.zeros(()), sums, Memory(place, importance_carry, passes))

  def _under_maskings(
    self,
    read: '_Read',
    carries: Sequence[Carry],
  ) -> tuple[dict[str, Array], list[Carry]]:
    """({kind of sum: its value by masking}, the carries after the chunk).

    All maskings share one program, which runs over their stacked carries.
    """

    def under(number_and_carry):
      number, carry = number_and_carry
      masks = read.masking(number, self.threshold)
      return read.compared(masks, carry, self.asked)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *carries)
    numbers = jnp.arange(len(MASKINGS))
    sums, stacked = lax.map(under, (numbers, stacked))
    after = []
    for number in range(len(MASKINGS)):
      after.append(jax.tree.map(lambda leaf, number=number: leaf[number], stacked))
    return sums, after

  def _attack(self, read: '_Read', carry: Carry) -> tuple[Array, Carry]:
    """(The summed divergence that an adversary reaches in a chunk, the carry after the chunk)."""
    adversary = Adversary(
      live='all', source=None, scope='all', sets=1, persistent=False, ascents=self.ascents,
      rate=self.rate,
    )  # fmt: skip

    def attack(sources: Sources):
      r = adversary.spread(sources, read.tokens)
      (given,) = adversary.masks(0, read.low, read.sites, read.tokens, r)
      sums, after = read.under(given, carry)
      return sums['kl'], after

    def gradient_of(sources: Sources):
      gradient, _ = jax.grad(attack, has_aux=True)(sources)
      # Inside a `shard_map` each device has the gradient of its own tokens.
      manual_axes = jax.sharding.get_abstract_mesh().manual_axes
      return lax.psum(gradient, manual_axes)

    start = adversary.start(read.sites, 1, 1, self.seed)
    first_step = jnp.zeros((), jnp.int32)
    ascended = adversary.ascended(start, first_step, gradient_of)
    return attack(ascended.sources)

  def metrics(self, model: Model, sums: Mapping[str, Any]) -> dict[str, float]:
    """See docs/decomposition.md for their names and meaning."""
    metrics = {}
    weight = sums['weight']

    def mean(name):
      return _mean(sums[name], weight)

    target_loss = mean('loss/target')
    for name in MASKINGS:
      loss = mean(f'loss/{name}')
      metrics[f'loss/{name}'] = loss
      metrics[f'excess_loss/{name}'] = loss - target_loss
      for kind in ('kl', 'accuracy'):
        metrics[f'{kind}/{name}'] = mean(f'{kind}/{name}')
      by_layer = sums[f'hidden_error/{name}'] / sums[f'hidden_square/{name}']
      metrics[f'hidden_error/{name}'] = float(by_layer.mean())
    if sums['attacked']:
      name = f'kl/{ADVERSARIAL}'
      metrics[name] = _mean(sums[name], sums['attacked'])
    metrics |= _pattern_errors(model, sums)
    metrics |= _activity(model, sums)
    return {f'components/{name}': value for name, value in metrics.items()}


def _pattern_errors(model: Model, sums: Mapping[str, Any]) -> dict[str, float]:
  """The divergence of attention patterns, by masking and layer and of all, means over heads."""
  metrics = {}
  for masking in MASKINGS:
    errors = {}
    for path, names in layers_of(model.parameters()).items():
      totals = sums.get(f'pattern_error/{path}/{masking}')
      if totals is not None and sums['queries']:
        means = totals.mean(-1) / sums['queries']
        errors |= dict(zip(names, means, strict=True))
    for layer, error in errors.items():
      metrics[f'pattern_error/{masking}/{layer}'] = float(error)
    if errors:
      metrics[f'pattern_error/{masking}'] = float(np.mean([*errors.values()]))
  return metrics


def _activity(model: Model, sums: Mapping[str, Any]) -> dict[str, float]:
  """How many components are active in each site and in all, and how many are alive."""
  names = names_of(model.parameters())
  tokens = max(sums['tokens'], 1)
  metrics = {}
  all_shares = []
  all_means = []
  for path in sites_of(model.parameters()):
    shares = sums[f'active/{path}'] / tokens
    means = sums[f'importance/{path}'] / tokens
    active_components = shares.sum(-1)
    for name, active in zip(names[path], active_components, strict=True):
      metrics[f'active/{name}'] = float(active)
    all_shares.append(shares.ravel())
    all_means.append(means.ravel())
  shares = np.concatenate(all_shares)
  all_means_together = np.concatenate(all_means)
  is_alive = all_means_together > ALIVE
  is_ever_active = shares > 0
  alive = is_alive.sum()
  metrics['active'] = float(shares.sum())
  metrics['alive'] = float(alive)
  metrics['ever_active'] = float(is_ever_active.sum())
  shares_of_alive = shares[is_alive]
  metrics['density'] = _mean(shares_of_alive.sum(), alive)
  return metrics


class _Read(NamedTuple):
  """A chunk with its lower importances, to be read under masks."""

  chunk: Chunk
  sites: Mapping[str, Site]
  low: Mapping[str, Array]
  tokens: Tokens

  def masking(self, number: Array, threshold: float) -> dict[str, Masks]:
    """The masks of MASKINGS[number] for every site; each masking has its own draws."""
    uniform = Stochastic(live='all', source=None)
    r = uniform.sources([*self.sites], self.sites, _USE + number, self.tokens)
    (stochastic,) = uniform.masks(0, self.low, self.sites, self.tokens, r)
    masks = {}
    for path, low in self.low.items():
      masks[path] = _site_masks(number, threshold, low, r[path], stochastic[path])
    return masks

  def under(self, given: Mapping[str, Masks], carry: Carry) -> tuple[dict[str, Array], Carry]:
    """(The sums under masks; the carry after)."""
    features, after = masked(self.chunk, given, carry)
    return self.scores(features), after

  def compared(
    self,
    given: Mapping[str, Masks],
    carry: Carry,
    asked: Patterns,
  ) -> tuple[dict[str, Array], Carry]:
    """As `under`, with the errors of hidden activations and of attention patterns."""
    features, after = masked(self.chunk, given, carry, (STREAM, asked))
    sums = self.scores(features)
    clean = self.chunk.features
    real = self.chunk.batch.segment_ids > 0
    error, square = hidden_sums(clean, features, real)[STREAM]
    sums |= {'hidden_error': error, 'hidden_square': square}
    queries = asked.at(real.shape[1])
    for path, error in pattern_sums(clean, features, real[:, queries]).items():
      sums[f'pattern_error/{path}'] = error
    return sums, after

  def scores(self, features: Features) -> dict[str, Array]:
    """Weighted cross-entropy, right targets, and divergence from the target model, summed."""
    batch = self.chunk.batch
    size = self.chunk.model.about.vocabulary_size
    scores = token_scores(features, batch.targets, size)
    divergence = divergences(self.chunk.features, features, size)
    return {
      'loss': jnp.sum(batch.weights * scores.loss),
      'accuracy': jnp.sum(batch.weights * scores.right),
      'kl': jnp.sum(batch.weights * divergence),
    }


def _site_masks(
  number: Array,
  threshold: float,
  low: Array,
  r: Array,
  stochastic: Masks,
) -> Masks:
  """The masks of a site in MASKINGS[number], from sources r [L, B, T, C + 1]."""
  drawn = r[..., :-1]

  def rounded(g):
    is_active = g > threshold
    return is_active.astype(g.dtype)

  def shuffled(g):
    is_active = g > threshold
    count = is_active.sum(-1, keepdims=True)
    is_chosen = smallest(drawn, count)
    return is_chosen.astype(g.dtype)

  functions = {
    'unmasked': jnp.ones_like,
    'stochastic': lambda _: stochastic.components,
    'important': lambda g: g,
    'rounded': rounded,
    'random': lambda g: drawn.astype(g.dtype),
    'zero': jnp.zeros_like,
    'shuffled': shuffled,
  }
  by_number = [functions[name] for name in MASKINGS]
  components = lax.switch(number, by_number, low)
  is_stochastic = number == MASKINGS.index('stochastic')
  delta = jnp.where(is_stochastic, stochastic.delta, 0)
  return Masks(components, delta, stochastic.route)


def _mean(total: Any, weight: Any) -> float:
  """The mean; NaN without a weight."""
  if not weight:
    return math.nan
  return float(total / weight)
