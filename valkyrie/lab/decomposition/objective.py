"""The objective of a decomposition: components that reconstruct the model wherever masks ablate.

The model is frozen. Its own pass over a chunk is the clean one. Masked passes read the chunk with
masks, and should give the next-token distributions of the clean pass, while as few components as
possible matter for each token. The rules D1 to D25 are in `valkyrie.lab.decomposition`.

A masked pass carries a memory of its own through the document: what an ablated component would have
written is missing later, as it is for the model whose weights are masked (D22).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import ClassVar

import gin
import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.patterns import near_words
from valkyrie.config.ranges import (
  Limit,
  NonNegativeFloat,
  NonNegativeInt,
  PositiveFloat,
  PositiveInt,
  Seed,
  check_fields,
)
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.lab.decomposition.adversary import Adversary, Attack
from valkyrie.lab.decomposition.chunk_losses import (
  ARRAYS,
  NAME,
  PENALTY,
  STEP,
  TOKENS,
  AttackedTerm,
  ChunkReading,
  MeanImportance,
  is_array,
  named_sources,
  sources_of,
)  # fmt: skip
from valkyrie.lab.decomposition.evaluation import ComponentScores, with_memory
from valkyrie.lab.decomposition.faithfulness import faithful, unfaithfulness
from valkyrie.lab.decomposition.importance import Importance, PerComponent
from valkyrie.lab.decomposition.masks import Stochastic
from valkyrie.models.features import SITES
from valkyrie.models.model import Model
from valkyrie.models.sites import Entry, entry_of, sites_of
from valkyrie.training import rounding
from valkyrie.training.gradient_term import GradientTerm, OnePass, StepGradient
from valkyrie.training.objective import Chunk, Part, Start, Terms
from valkyrie.training.optimizers import Group
from valkyrie.training.tbptt import Learns, learned_and_frozen
from valkyrie.types import Array, Batch, Params
from valkyrie.weights.named_tensors import names_of


@gin.configurable
@may_change_on_resume('train_steps')  # it stretches the exponent's fall
@dataclasses.dataclass(frozen=True)
class Decomposition(GradientTerm):
  """Reconstruction under masks, few important components, and faithfulness to the matrices.

  Attributes:
    seed: the seed of the draws.
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
    memory: 'own', a carry for each masked pass; 'clean', the carry of the clean pass for all.
    clip_norm: the largest norm of the components' gradient.
    side_by_side: read the masked passes of a step at once, where they have the same sites: each
      layer gathers its weights once for all of them, and the factors have one gradient.
  """

  seed: Seed
  train_steps: NonNegativeInt
  importance: Callable[[], Importance] = PerComponent
  reconstruction: Sequence[Callable[[], Stochastic]] = (Stochastic,)
  minimality: NonNegativeFloat = 1e-3
  exponent: NonNegativeFloat = 2.0
  last_exponent: NonNegativeFloat = 0.4
  smooth: bool = False
  frequency: NonNegativeFloat = 0.0
  reference_tokens: PositiveInt = 1
  faithfulness: NonNegativeFloat = 1.0
  faithful_steps: NonNegativeInt = 200
  faithful_rate: PositiveFloat = 1e-3
  memory: str = 'own'
  clip_norm: Limit = 0.01
  side_by_side: bool = False

  name: ClassVar[str] = NAME
  activations: ClassVar[Sequence[str]] = (SITES,)

  def __post_init__(self):
    check_fields(self)
    check_choice('Decomposition.memory', self.memory, ('own', 'clean'))
    if not self.reconstruction:
      raise ConfigurationError(
        'Decomposition.reconstruction is empty, so nothing would make the components reconstruct '
        'the model. Name classes of masked passes, such as (@Stochastic,).'
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
    sites = sites_of(model.parameters())
    if not sites:
      raise ConfigurationError(
        'Decomposition needs matrices to decompose, but no matrix of the model is a site. Set '
        "LanguageModel.sites = @Sites, and Sites.components = (('PATTERN', C),) with a regular "
        'expression for paths in model_info.txt and the number of components of such a matrix.'
      )
    used = _used_entries(model)
    for entry in model.about.site_entries:
      if entry not in used:
        near = near_words(entry.pattern, [*names_of(model.parameters())])
        raise ConfigurationError(
          f'Sites.components has the pattern {entry.pattern!r}, but no path of a matrix in its '
          f'layers contains it, or earlier patterns match all such paths.{near} Correct the '
          'pattern, or remove it; model_info.txt has the paths.'
        )

    def passes(carry):
      if self.memory == 'clean':
        return [[] for _ in self.losses]
      return [[carry] * len(loss.passes(sites)) for loss in self.losses]

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
    return {
      str(number): loss for number, loss in enumerate(self.losses) if isinstance(loss, Adversary)
    }

  def initial_state(self, model: Model, rows: int, tokens: int) -> dict[str, Attack] | None:
    """The attacks of the adversaries, by their number; None without an adversary."""
    sites = sites_of(model.parameters())
    attacks = {}
    for number, adversary in self._adversaries().items():
      attacks[number] = adversary.start(sites, rows, tokens, self.seed)
    return attacks or None

  def prepared(self, params: Params, start: Start) -> Params:
    """The parameters after Adam on only faithfulness, whose moments are forgotten (D19)."""
    if not self.faithful_steps:
      return params
    sites = sites_of(start.model.parameters())

    def fit(params):
      fitted = faithful(params, sites, self.faithful_steps, self.faithful_rate)
      return fitted, unfaithfulness(params, sites), unfaithfulness(fitted, sites)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    jit = start.partitioner.jit(fit, donate_argnums=0, out_shardings=(shardings, None, None))
    fitted, before, after = jit(params)
    start.say(
      f'{self.faithful_steps} steps on faithfulness: the mean squared difference of W and V U went '
      f'from {float(before):.3g} to {float(after):.3g}'
    )
    return fitted

  # A step.

  def step_gradient(
    self,
    one_pass: OnePass,
    model: Model,
    terms: Terms,
    learns: Learns,
    params: Params,
    state: dict[str, Attack] | None,
    step: Array,
    batch: Batch,
  ) -> StepGradient:
    """The gradient of all losses; see `GradientTerm`.

    What needs all tokens of the step comes before it: the mean importances, whose logarithm counts,
    and the adversaries' ascents. Faithfulness, a value of only the parameters, is computed once.
    """
    arrays = self._arrays(one_pass, step, batch)
    attacks = self._attacks(one_pass, arrays, state, step)
    for number, attack in attacks.items():
      arrays |= named_sources(number, attack.sources)
    slope = None
    if self.faithfulness:
      arrays[PENALTY], slope = self._penalty(model, learns, params)
    gradient, carry, sums = one_pass(terms, {ARRAYS: arrays}, learns)
    by_arrays = gradient.pop(ARRAYS, {})
    if slope is not None:
      gradient = jax.tree.map(jnp.add, gradient, slope)
    for number, adversary in self._adversaries().items():
      if adversary.persistent and adversary.coefficient:
        attacks[number] = self._last_ascent(adversary, attacks[number], step, number, by_arrays)
    return StepGradient(gradient, carry, sums, attacks or None)

  def _arrays(self, one_pass: OnePass, step: Array, batch: Batch) -> dict[str, Array]:
    """What each chunk knows of its step: its number, its tokens, and the mean importances."""
    tokens = jnp.maximum(jnp.sum(batch.segment_ids > 0), 1)
    arrays = {
      STEP: jnp.asarray(step, jnp.float32),
      TOKENS: jnp.asarray(tokens, jnp.float32),
    }
    if self.frequency:
      _, _, sums = one_pass([MeanImportance(self)], {ARRAYS: arrays}, is_array)
      for name, total in sums.terms.items():
        arrays[name] = total / jnp.maximum(sums.weight, 1.0)
    return arrays

  def _attacks(
    self,
    one_pass: OnePass,
    arrays: Mapping[str, Array],
    state: dict[str, Attack] | None,
    step: Array,
  ) -> dict[str, Attack]:
    """The attacks after the ascents before the step, by the number of the adversary."""
    attacks = {}
    for number, adversary in self._adversaries().items():
      term = AttackedTerm(self, number, adversary)

      def gradient_of(sources, number=number, term=term):
        all_arrays = {**arrays, **named_sources(number, sources)}
        gradient, _, _ = one_pass([term], {ARRAYS: all_arrays}, is_array)
        return sources_of(number, gradient[ARRAYS])

      attack = (state or {})[number]
      if not adversary.persistent:
        attack = adversary.restarted(attack, self.seed, step)
      attacks[number] = adversary.ascended(attack, step, gradient_of)
    return attacks

  def _last_ascent(
    self,
    adversary: Adversary,
    attack: Attack,
    step: Array,
    number: str,
    by_arrays: Mapping[str, Array],
  ) -> Attack:
    """The attack after its last ascent, by the step's own gradient (D14)."""
    coefficient = adversary.coefficient
    slope = jax.tree.map(lambda g: g / coefficient, sources_of(number, by_arrays))
    return adversary.ascend(attack, step, slope)

  def _penalty(self, model: Model, learns: Learns, params: Params) -> tuple[Array, Params]:
    """(faithfulness with its coefficient, its gradient by the parameters that learn)."""
    learning, frozen = learned_and_frozen(rounding.wide(params), learns)
    sites = sites_of(model.parameters())

    def penalty(learning):
      whole = hk.data_structures.merge(frozen, learning)
      return self.faithfulness * unfaithfulness(whole, sites)

    return jax.value_and_grad(penalty)(learning)

  # A chunk.

  def __call__(self, chunk: Chunk) -> Part:
    """All losses of a chunk."""
    read = ChunkReading(self, chunk)
    sums = {}
    passes = []
    total = jnp.zeros(())
    found = read.reconstructions(self.losses, self.side_by_side)
    for number, (loss, (divergence, carries)) in enumerate(zip(self.losses, found, strict=True)):
      passes.append(carries)
      if loss.coefficient:
        kind = 'adversarial' if loss.adversarial else loss.live
        sums[f'reconstruction_{number}_{kind}'] = divergence
        total += loss.coefficient * divergence / chunk.total
    if self.minimality:
      sums['minimality'] = read.minimality()
      total += self.minimality * sums['minimality'] / chunk.total
    if self.frequency:
      sums['frequency'] = read.frequency()
      total += self.frequency * sums['frequency'] / chunk.total
    if self.faithfulness:
      # It does not depend on tokens, so each chunk has a share that is proportional to its weight.
      penalty = read.weight * lax.stop_gradient(chunk.params[ARRAYS][PENALTY])
      sums['faithfulness'] = penalty / self.faithfulness
      total += penalty / chunk.total
    sums['alive_per_token'] = read.alive()
    return Part(total, sums, read.after._replace(passes=passes))


def _used_entries(model: Model) -> set[Entry | None]:
  """The entries of `Sites.components` that make matrices of a model sites."""
  parameters = model.parameters()
  names = names_of(parameters)
  used = set()
  for path in sites_of(parameters):
    for name in names[path]:
      _, layer, _ = name.split('.', 2)
      used.add(entry_of(model.about.site_entries, path, int(layer)))
  return used
