"""The objective of training: terms that add up, each computed chunk by chunk.

`StepSettings.objective` names the class of a term, or of several. A term of yours computes a
value for each target from what the model returns, and may add parameters and carries
(docs/objectives.md).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, NamedTuple

import chex
import gin
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie import edges
from valkyrie.config.ranges import NonNegativeFloat, check_fields
from valkyrie.errors import ConfigurationError
from valkyrie.models.features import Features, Kind
from valkyrie.models.model import Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import losses
from valkyrie.training.optimizers import Group
from valkyrie.types import Array, Batch, Carry, Params


class Sums(NamedTuple):
  """Sums over tokens, float32: they add up over chunks, steps and hosts.

  loss: the weighted nats of the next tokens; None where no term of the objective predicts them.
  weight: the weight of the tokens.
  beyond_window: weight of the tokens with more than a window of their document before them.
  terms: what the terms report, by name.
  objective: the value of an objective without a loss of tokens, times the weight; else None.
  """

  loss: Array | None
  weight: Array
  beyond_window: Array
  terms: Mapping[str, Array]
  objective: Array | None = None

  @property
  def followed(self) -> Array:
    """The loss of the tokens, or else the objective, whose spikes are watched."""
    if self.loss is not None:
      return self.loss
    assert self.objective is not None
    return self.objective


class Chunk(NamedTuple):
  """What a term reads of a chunk.

  model, params: the run's, with the parameters that the term added.
  features: the model's, with the `activations` that the term asks for.
  batch: the tokens and their weights, [B, C].
  before: the carries before the chunk: of the model as 'model', of a term by its name.
  rng: the key of the chunk, where the model has dropout; else None.
  total: float32, the weight of the whole step, by which a sum over tokens is divided.
  in_one_pass: see `losses.weighted_loss`.
  """

  model: Model
  params: Params
  features: Features
  batch: Batch
  before: Carry
  rng: Array | None
  total: Array | float
  in_one_pass: bool


class Part(NamedTuple):
  """What a term returns: its share of the loss, sums over tokens by name, and its carry."""

  loss: Array
  sums: Mapping[str, Array]
  carry: Carry = None


class Start(NamedTuple):
  """What a term reads before the first step of a new run.

  model: with the parameters of the terms; partitioner: on whose mesh these are.
  vocabulary: the fingerprint of the tokenizer.
  say: logs a line.
  """

  model: Model
  partitioner: Partitioner
  vocabulary: str
  say: Callable[[str], None]


class Term:
  """A part of the objective; a subclass overrides `values`, or `__call__` for more freedom.

  Attributes:
    name: the name of its carry, which is unique; by default the class's name.
    activations: the intermediate values of the model that it reads, see `features.Kind`.
    groups: groups of parameters, which precede the optimizer's groups.
  """

  name: ClassVar[str] = ''
  activations: Sequence[Kind] = ()
  groups: Sequence[Group] = ()

  def __init_subclass__(cls):
    cls.name = cls.name or cls.__name__

  def extended(self, model: Model) -> Model:
    """The model with the parameters and the carries of this term, see `Model.extended`."""
    return model

  def prepared(self, params: Params, start: Start) -> Params:
    """The parameters with which a new run begins, on the same mesh, after its weights were loaded.

    A resumed run has them in its checkpoint.
    """
    return params

  def values(self, chunk: Chunk) -> Mapping[str, Array]:
    """Values of the targets by name, [B, C] each: their weighted means are added to the loss.

    The name 'loss' is the cross-entropy's, and is refused.
    """
    raise ConfigurationError(
      f'{type(self).__name__} computes nothing. Define its method `values`, or `__call__`.'
    )

  def evaluation(self) -> 'Term | None':
    """A term that evaluations compute and report by its `metrics`; None for none."""
    return None

  def metrics(self, model: Model, sums: Mapping[str, Any]) -> dict[str, float]:
    """{name: number} of an evaluation, from its sums over all chunks, on the host."""
    raise NotImplementedError(f'{type(self).__name__} has no `metrics`')

  def __call__(self, chunk: Chunk) -> Part:
    """Sums the weighted values."""
    values_by_name = self.values(chunk)
    if 'loss' in values_by_name:
      raise ConfigurationError(
        f"{type(self).__name__}.values has the name 'loss', which is the cross-entropy of the next "
        'tokens. Give these values another name.'
      )
    weights = chunk.batch.weights

    def message() -> str:
      shapes = {name: jnp.shape(values) for name, values in values_by_name.items()}
      return f'{type(self).__name__}.values returned {shapes}'

    expected = f'It has to return {{name: values}} of the targets, {weights.shape} each.'
    with edges.asserted(message, expected):
      chex.assert_shape([*values_by_name.values()], [weights.shape] * len(values_by_name))
    sums = {name: jnp.sum(weights * values) for name, values in values_by_name.items()}
    zero = jnp.zeros(())
    total = sum(sums.values(), zero)
    share = total / chunk.total
    return Part(share, lax.stop_gradient(sums))


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Prediction(Term):
  """The cross-entropy of the next tokens.

  Attributes:
    z_loss: a factor on the mean squared logarithm of the softmax's normalizer, which is added to
      the loss and keeps logits from drifting (PaLM, Chowdhery et al. 2022, has 1e-4).
    weight: a factor on the whole term, beside other terms.
  """

  z_loss: NonNegativeFloat = 0.0
  weight: NonNegativeFloat = 1.0

  def __post_init__(self):
    check_fields(self)

  def __call__(self, chunk: Chunk) -> Part:
    batch = chunk.batch
    loss, predicted = losses.weighted_loss(
      chunk.features,
      batch.targets,
      batch.weights,
      chunk.model.about.vocabulary_size,
      chunk.total,
      z_loss=self.z_loss,
      in_one_pass=chunk.in_one_pass,
    )
    sums = {'loss': predicted.loss}
    if self.z_loss:
      sums['z_loss'] = predicted.squares
    if self.weight != 1:
      loss = self.weight * loss
    return Part(loss, sums)


Terms = Sequence[Term]
PREDICTION: Terms = (Prediction(),)


def terms_of(objective: Callable[[], Term] | Sequence[Callable[[], Term]]) -> tuple[Term, ...]:
  """The terms of `StepSettings.objective`; a ConfigurationError if they do not fit together."""
  classes = objective
  if not isinstance(classes, Sequence):
    classes = [classes]
  terms = []
  for make in classes:
    term = None
    if callable(make) and not isinstance(make, Term):
      term = make()
    if not isinstance(term, Term):
      raise ConfigurationError(
        f'StepSettings.objective has {make!r:.60}, which is not a class of a Term of '
        'training.objective. Name classes of terms, such as (@Prediction,).'
      )
    terms.append(term)
  names = [term.name for term in terms]
  are_distinct = len({*names, 'model'}) > len(names)
  if not terms or not are_distinct:
    raise ConfigurationError(
      f'StepSettings.objective has the terms {", ".join(names) or "none"}. Name at least one term, '
      "and each only once; a term cannot have the name 'model'."
    )
  return tuple(terms)


def evaluations(terms: Terms) -> tuple[Term, ...]:
  """What evaluations report of the terms."""
  reported = [term.evaluation() for term in terms]
  return tuple(term for term in reported if term is not None)


def _check_part(term: Term, part: Part, before: Carry) -> None:
  """Raises a ConfigurationError for a loss with axes, or a carry of another form than `before`."""
  owner = f'The term {type(term).__name__}'
  with edges.asserted(
    lambda: f'{owner} returned a loss of shape {jnp.shape(part.loss)}',
    'Return its sum over the tokens, a number of shape ().',
  ):
    chex.assert_shape([part.loss], [()])
  edges.check_carry(owner, part.carry, before, 'before')


def visit(
  terms: Terms,
  model: Model,
  params: Params,
  carry: Carry,
  batch: Batch,
  rng: Array | None = None,
  *,
  total: Array | float = 1.0,
  in_one_pass: bool = False,
) -> tuple[Features, Carry, dict[str, Part]]:
  """Reads one chunk [B, C] of every row: (features, all carries after it, the part of each term).

  The carry of a term that is not among `terms` stays as it is.
  """
  kinds: dict[Kind, None] = {}
  for term in terms:
    kinds |= dict.fromkeys(term.activations)
  carry_of_model = {'model': carry['model']}
  features, after = model.read(params, carry_of_model, batch, rng, activations=tuple(kinds))
  chunk = Chunk(model, params, features, batch, carry, rng, total, in_one_pass)
  parts = {term.name: term(chunk) for term in terms}
  for term in terms:
    part = parts[term.name]
    before = carry.get(term.name, part.carry)
    _check_part(term, part, before)
  own = {}
  for name, part in parts.items():
    if name in carry:
      own[name] = part.carry
  return features, {**carry, **after, **own}, parts


def read(
  terms: Terms,
  model: Model,
  params: Params,
  carry: Carry,
  batch: Batch,
  rng: Array | None = None,
  *,
  total: Array | float = 1.0,
  **options: bool,
) -> tuple[Array, tuple[Carry, Sums]]:
  """Reads one chunk [B, C] of every row, with the options of `visit`; see `Chunk`.

  Returns (the loss divided by `total`, (the carries after the chunk, its sums)).
  """
  _, after, by_name = visit(terms, model, params, carry, batch, rng, total=total, **options)
  parts = [*by_name.values()]
  names = []
  for part in parts:
    names += part.sums
  if len(set(names)) < len(names):
    raise ConfigurationError(
      f'Terms of the objective share a name: {", ".join(sorted(names))}. Let each term return sums '
      'with names of its own.'
    )
  sums: dict[str, Any] = {}
  for part in parts:
    sums |= part.sums
  loss, *more = (part.loss for part in parts)
  for other in more:
    loss += other
  predicted = sums.pop('loss', None)
  value = None
  if predicted is None:
    value = lax.stop_gradient(loss) * total
  weight = jnp.sum(batch.weights)
  is_beyond = batch.positions > model.about.window
  found = Sums(
    loss=predicted,
    objective=value,
    weight=weight,
    beyond_window=jnp.sum(batch.weights * is_beyond),
    terms=sums,
  )
  return loss, (after, jax.tree.map(lax.stop_gradient, found))
