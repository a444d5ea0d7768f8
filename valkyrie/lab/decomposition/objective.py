"""The objective of a decomposition: components that reconstruct the model wherever masks ablate.

The model is frozen. Of each chunk, its own pass is the clean one. Masked passes read the chunk with
other masks, and their next-token distributions should be the clean ones; so few components as
possible should matter for each token. The rules D1 to D25 are in `valkyrie.lab.decomposition`.

A masked pass carries a memory of its own through the document: what an ablated component would have
written is missing later, as it is for the model whose weights are masked (D22).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import ClassVar

import gin
import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import optax

from valkyrie.config import ranges
from valkyrie.config.computation import may_change_on_resume
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.lab.decomposition import draws, importance
from valkyrie.lab.decomposition.adversary import Adversary, Attack
from valkyrie.lab.decomposition.evaluation import ComponentScores, Memory, with_memory
from valkyrie.lab.decomposition.importance import Importance, PerComponent
from valkyrie.lab.decomposition.masks import Stochastic, Tokens, masked
from valkyrie.models.features import SITES
from valkyrie.models.model import Model
from valkyrie.models.sites import Site, U, V, sites_of
from valkyrie.training.losses import divergences
from valkyrie.training.objective import PENALTY, Chunk, Measure, Part, Start, Term
from valkyrie.training.optimizers import Group
from valkyrie.types import Array, Batch, Carry, Params

_STEP, _TOKENS = 'step', 'tokens'  # arrays of a step: its number, and how many tokens it reads
_FREQUENCY = 'frequency/'  # begins the names of shared arrays, as the number of an adversary does


@gin.configurable
@may_change_on_resume('train_steps')  # it stretches the exponent's fall
@dataclasses.dataclass(frozen=True)
class Decomposition(Term):
  """Reconstruction under masks, few important components, and faithfulness to the matrices.

  Attributes:
    seed: of the draws.
    train_steps: the step at which the exponent has fallen to its end.
    importance: the class of the importance functions.
    reconstruction: the classes of the masked passes, `@Stochastic` or `@Adversary`.
    minimality: the coefficient of the importances, summed over components and averaged over tokens.
    exponent, last_exponent: p at the start and at the end of training, of (g + 1e-12)^p.
    smooth: count g² / (g² + γ²) instead, with γ in the place of p.
    frequency: the coefficient of f log2(1 + a f) for the mean f of each component's importance.
    reference_tokens: a, such as the tokens of a step.
    faithfulness: the coefficient of the mean squared difference of W and V U.
    faithful_steps, faithful_rate: steps of Adam on only this difference before the run begins.
    memory: 'own', a carry of its own for each masked pass; 'clean', the clean one for all.
    clip_norm: the largest norm of the components' gradient.
  """

  seed: int
  train_steps: int
  importance: Callable[[], Importance] = PerComponent
  reconstruction: Sequence[Callable[[], Stochastic]] = (Stochastic,)
  minimality: float = 1e-3
  exponent: float = 2.0
  last_exponent: float = 0.4
  smooth: bool = False
  frequency: float = 0.0
  reference_tokens: int = 1
  faithfulness: float = 1.0
  faithful_steps: int = 200
  faithful_rate: float = 1e-3
  memory: str = 'own'
  clip_norm: float = 0.01

  name: ClassVar[str] = 'decomposition'
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __post_init__(self):
    ranges.check_fields(self)
    check_choice('Decomposition.memory', self.memory, ('own', 'clean'))
    if not self.reconstruction:
      raise ConfigurationError(
        'Decomposition.reconstruction is empty: nothing would hold the components to the model. '
        'Name classes of masked passes, such as (@Stochastic,).'
      )

  @property
  def groups(self) -> Sequence[Group]:
    """The model is frozen; components and importances do not decay."""
    return (
      Group(r'_[vu]$', decay=False, clip_norm=self.clip_norm),
      Group('^decomposition/', decay=False, clip_norm=math.inf),
      Group('^model/', learning_rate_scale=0.0),
    )

  # Parameters, carries and state.

  def extended(self, model: Model) -> Model:
    """See `with_memory`."""
    sites, own = sites_of(model.parameters()), self.memory == 'own'
    if not sites:
      raise ConfigurationError(
        'Decomposition needs sites, but no matrix of the model is one. Set LanguageModel.sites = '
        "@Sites, and Sites.components = (('PATTERN', C),) with a pattern of paths in "
        'model_info.txt.'
      )
    for pattern in model.about.site_patterns:
      if not any(re.search(pattern, path) for path in sites):
        raise ConfigurationError(
          f'Sites.components has {pattern!r}, but no site: no path has it, or earlier patterns '
          'take them all. Correct it, or leave it out; model_info.txt has the paths.'
        )

    def passes(one):
      return [[one for _ in loss.passes(sites)] if own else [] for loss in self.losses]

    return with_memory(model, self.name, self.importance(), passes)

  def evaluation(self) -> ComponentScores:
    """The model under maskings and an attack, and the importances."""
    return ComponentScores(self.seed, self.importance, self.memory)

  @functools.cached_property
  def losses(self) -> Sequence[Stochastic]:
    """The masked passes."""
    return [make() for make in self.reconstruction]

  def _adversaries(self) -> dict[str, Adversary]:
    """The adversaries, by their number among the losses."""
    return {str(n): a for n, a in enumerate(self.losses) if isinstance(a, Adversary)}

  def initial_state(self, model: Model, rows: int, tokens: int) -> dict[str, Attack] | None:
    """The attacks of the adversaries, by their number."""
    sites = sites_of(model.parameters())
    return {
      number: adversary.start(sites, rows, tokens, self.seed)
      for number, adversary in self._adversaries().items()
    } or None

  def prepared(self, params: Params, start: Start) -> Params:
    """The parameters after Adam on only faithfulness, whose moments are forgotten (D19)."""
    if not self.faithful_steps:
      return params
    sites = sites_of(start.model.parameters())

    def moved(params):
      after = faithful(params, sites, self.faithful_steps, self.faithful_rate)
      return after, unfaithfulness(params, sites), unfaithfulness(after, sites)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    jit = start.partitioner.jit(moved, donate_argnums=0, out_shardings=(shardings, None, None))
    params, before, after = jit(params)
    start.say(
      f'{self.faithful_steps} steps on faithfulness: the mean squared difference of W and V U went '
      f'from {float(before):.3g} to {float(after):.3g}'
    )
    return params

  # Around a step.

  def before(
    self, state: dict[str, Attack] | None, step: Array, batch: Batch, measure: Measure
  ) -> tuple[dict[str, Attack] | None, Mapping[str, Array]]:
    """The mean importances, whose logarithm needs all tokens, and the adversaries' ascents."""
    tokens = jnp.maximum(jnp.sum(batch.segment_ids > 0), 1)
    shared = {
      name: jnp.asarray(value, jnp.float32) for name, value in ((_STEP, step), (_TOKENS, tokens))
    }
    if self.frequency:
      _, sums = measure(_MeanImportance(self), shared)
      shared |= {name: total / jnp.maximum(sums.weight, 1.0) for name, total in sums.terms.items()}
    attacks = {}
    for number, adversary in self._adversaries().items():

      def gradient_of(sources, number=number):
        found, _ = measure(_Attacked(self, number), {**shared, **_named(number, sources)})
        return _of_number(number, found)

      begun = (state or {})[number]
      if not adversary.persistent:
        begun = adversary.restarted(begun, self.seed, step)
      attacks[number] = adversary.ascended(begun, step, gradient_of)
    for number, attack in attacks.items():
      shared |= _named(number, attack.sources)
    return attacks or None, shared

  def after(
    self,
    state: dict[str, Attack] | None,
    step: Array,
    shared: Mapping[str, Array],
    gradient: Mapping[str, Array],
  ) -> dict[str, Attack] | None:
    """The last ascent, by the step's own gradient (D14)."""
    found = dict(state or {})
    for number, adversary in self._adversaries().items():
      if adversary.persistent and adversary.coefficient:
        of = jax.tree.map(lambda g, by=adversary: g / by.coefficient, _of_number(number, gradient))
        found[number] = adversary.ascend(found[number], step, of)
    return found or None

  def penalty(self, model: Model, params: Params) -> Array | None:
    """Faithfulness."""
    if not self.faithfulness:
      return None
    return self.faithfulness * unfaithfulness(params, sites_of(model.parameters()))

  # A chunk.

  def __call__(self, chunk: Chunk) -> Part:
    """All losses of a chunk."""
    read = _Read(self, chunk)
    losses, sums = [], {}

    def add(name, coefficient, sum_over_tokens):
      if coefficient:
        sums[name] = sum_over_tokens()
        losses.append(coefficient * sums[name] / chunk.total)

    passes = []
    for number, loss in enumerate(self.losses):
      total, carries = read.reconstruction(number, loss)
      kind = 'adversarial' if loss.adversarial else loss.live
      add(f'reconstruction_{number}_{kind}', loss.coefficient, lambda found=total: found)
      passes.append(carries)
    add('minimality', self.minimality, read.minimality)
    add('frequency', self.frequency, read.frequency)
    # No token has a part in it: each chunk gets its share of the weight.
    if self.faithfulness:
      penalty = read.weight * lax.stop_gradient(chunk.shared[PENALTY])
      sums['faithfulness'] = penalty / self.faithfulness
      losses.append(penalty / chunk.total)
    sums['alive_per_token'] = read.alive()
    loss = sum(losses, jnp.zeros(()))
    return Part(loss, sums, read.after._replace(passes=passes))


def unfaithfulness(params: Params, sites: Mapping[str, Site]) -> Array:
  """The mean of (W - V U)² over all elements of all sites, float32 (D10)."""
  total, count = jnp.zeros(()), 0
  for site in sites.values():
    # One layer after the other: a device of a split model holds V U of one layer at a time.
    of_layer = jax.checkpoint(lambda now: jnp.sum(jnp.square(now[0] - now[1] @ now[2])))
    layers = lax.stop_gradient(site.target(params)), *site.factors(params)
    total += jnp.sum(lax.map(of_layer, layers))
    count += site.layers * site.d_in * site.d_out
  return total / float(count)  # more than an int32 holds


def faithful(params: Params, sites: Mapping[str, Site], steps: int, rate: float) -> Params:
  """The parameters after steps of Adam on only `unfaithfulness`, which move the factors (D19)."""
  optimizer = optax.adam(rate)
  slope = jax.grad(lambda factors, rest: unfaithfulness(merge(factors, rest), sites))

  def step(_, carry):
    factors, state = carry
    updates, state = optimizer.update(slope(factors, rest), state)
    return optax.apply_updates(factors, updates), state

  factors, rest = hk.data_structures.partition(lambda _, name, __: name[-2:] in (V, U), params)
  merge = hk.data_structures.merge
  factors, _ = lax.fori_loop(0, steps, step, (factors, optimizer.init(factors)))
  return merge(factors, rest)


class _Read:
  """What the losses of a chunk share: importances, draws and the clean distribution."""

  def __init__(self, settings: Decomposition, chunk: Chunk):
    self.settings, self.chunk = settings, chunk
    self.sites = sites_of(chunk.model.parameters())
    self.before: Memory = chunk.before[settings.name]
    time = chunk.batch.inputs.shape[1]
    numbers, place = draws.tokens(self.before.place, time)
    self._tokens = Tokens(settings.seed, self.before.place.row, numbers)
    self._weights = chunk.batch.weights
    # Importances count for all tokens, also where nothing is predicted.
    of_step = lax.stop_gradient(chunk.shared[_TOKENS])
    self._share = (chunk.batch.segment_ids > 0) * (chunk.total / of_step)
    self.weight = jnp.sum(self._weights)
    functions, inputs = settings.importance(), chunk.features.sites or {}
    z, after = functions(chunk.params, self.sites, inputs, self.before.importance, chunk.batch)
    self.after = self.before._replace(place=place, importance=after)
    self.low = jax.tree.map(importance.lower, z)
    self.high = jax.tree.map(importance.upper, z)

  def reconstruction(self, number: int, loss: Stochastic) -> tuple[Array, list[Carry]]:
    """The summed divergence of a loss, the mean over its passes, and their carries."""
    sources = None
    if isinstance(loss, Adversary):
      sources = loss.of_tokens(_of_number(str(number), self.chunk.shared), self._tokens)
    passes = [*loss.masks(number, self.low, self.sites, self._tokens, sources)]
    own, size = self.before.passes[number], self.chunk.model.about.vocabulary_size
    total, carries = jnp.zeros(()), []
    for index, given in enumerate(passes):
      features, after = masked(self.chunk, given, own[index] if own else self.chunk.before)
      found = divergences(self.chunk.features, features, size)
      total += jnp.sum(self._weights * found) / len(passes)
      carries += [after] if own else []
    return total, carries

  @functools.cached_property
  def powers(self) -> dict[str, Array]:
    """{path: [L, C]}, sums over the tokens of the importance to some power (D11)."""
    first, last = self.settings.exponent, self.settings.last_exponent
    done = lax.stop_gradient(self.chunk.shared[_STEP]) / self.settings.train_steps
    exponent = first + (last - first) * jnp.minimum(done, 1.0)

    def of(high):
      counted = importance.counted(high, exponent, self.settings.smooth)
      return jnp.einsum('lbtc,bt->lc', counted, self._share)

    return {path: of(high) for path, high in self.high.items()}

  def minimality(self) -> Array:
    """The sum over tokens and components."""
    return sum((jnp.sum(f) for f in self.powers.values()), jnp.zeros(()))

  def frequency(self) -> Array:
    """The chunk's share of h(f) = f log2(1 + a f), of the mean f of the whole step (D12).

    Its gradient is the gradient of h'(f) times the chunk's f; over all chunks, they add up to h's.
    """
    a, slopes, value = self.settings.reference_tokens, jnp.zeros(()), jnp.zeros(())
    for path, of_chunk in self.powers.items():
      f = lax.stop_gradient(self.chunk.shared[_FREQUENCY + path])
      bits = jnp.log2(1 + a * f)
      slopes += jnp.sum((bits + a * f / ((1 + a * f) * math.log(2))) * of_chunk)
      value += jnp.sum(f * bits)
    return slopes + lax.stop_gradient(value * self.weight - slopes)

  def alive(self) -> Array:
    """The components with an importance above 0.1, summed over tokens."""
    return sum(
      (jnp.einsum('lbtc,bt->', (low > 0.1).astype(low.dtype), self._share)
       for low in self.low.values()),
      jnp.zeros(()),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Attacked(Term):
  """The loss of one adversary, everywhere routed, which its sources ascend."""

  settings: Decomposition
  number: str

  name: ClassVar[str] = Decomposition.name
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __call__(self, chunk: Chunk) -> Part:
    read, number = _Read(self.settings, chunk), int(self.number)
    adversary = dataclasses.replace(self.settings.losses[number], live='all')
    total, carries = read.reconstruction(number, adversary)
    passes = [*read.before.passes]
    passes[number] = carries
    return Part(total / chunk.total, {}, read.after._replace(passes=passes))


@dataclasses.dataclass(frozen=True)
class _MeanImportance(Term):
  """The importance of each component, summed over the tokens of a step."""

  settings: Decomposition

  name: ClassVar[str] = Decomposition.name
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __call__(self, chunk: Chunk) -> Part:
    read = _Read(self.settings, chunk)
    found = {_FREQUENCY + path: f for path, f in read.powers.items()}
    return Part(jnp.zeros(()), found, read.after)


def _named(number: str, sources: Mapping[str, Array]) -> dict[str, Array]:
  return {f'{number} {path}': r for path, r in sources.items()}


def _of_number(number: str, shared: Mapping[str, Array]) -> dict[str, Array]:
  begin = f'{number} '
  return {n.removeprefix(begin): r for n, r in shared.items() if n.startswith(begin)}
