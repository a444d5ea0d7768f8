"""Distillation: a frozen teacher reads each chunk beside the model, which learns what it predicts.

The teacher's parameters and carry are part of the train state, so that they follow layouts,
micro-batches, refused steps and checkpoints, and a resumed run does not need the folder from which
the teacher came.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, ClassVar, Protocol

import gin
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.config.ranges import NonNegativeFloat, PositiveInt, check_fields
from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models import language_model
from valkyrie.models.features import ACTIVATIONS
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.models.precision import wide
from valkyrie.training.losses import divergences
from valkyrie.training.objective import Chunk, Part, Start, Term
from valkyrie.training.optimizers import Group
from valkyrie.types import Params

_PREFIX = 'teacher/'


class Weights(Protocol):
  """Weights from elsewhere: `weights.initial.InitialWeights`."""

  def load(
    self, model: Model, make: Callable, params: Params, vocabulary: str, say: Callable
  ) -> tuple[Params, bool]: ...


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Distillation(Term):
  """What a teacher predicts, and optionally the outputs of its layers (Hinton et al. 2015).

      weight x T² x KL(teacher || student), of the distributions softmax(logits / T)
      + match_weight x the mean, over the pairs and D, of the squared differences of layers

  The gradient of the divergence falls with 1 / T², for which the factor T² makes up (Hinton et al.
  2015, section 2).

  Attributes:
    teacher: the class of the teacher, such as @teacher/LanguageModel: bindings in this scope, such
      as teacher/Block.mixers, are of the teacher, and what they lack is as in the student.
    source: the class of its weights, such as @teacher/InitialWeights.
    weight: the weight of the divergence.
    temperature: T.
    top_k: the likeliest tokens of the teacher that are told apart, and all others are one outcome;
      None tells all apart.
    match: (kind, layer of the student, layer of the teacher), such as ('stream', 5, 5), of a kind
      in `ACTIVATIONS`; layers count from 0.
    match_weight: the weight of the differences of these values.
  """

  teacher: Callable[..., LanguageModel]
  source: Callable[[], Weights]
  weight: NonNegativeFloat = 1.0
  temperature: NonNegativeFloat = 1.0
  top_k: PositiveInt | None = None
  match: Sequence[tuple[str, int, int]] = ()
  match_weight: NonNegativeFloat = 1.0

  name: ClassVar[str] = 'teacher'
  groups: ClassVar[Sequence[Group]] = (Group(f'^{_PREFIX}', learning_rate_scale=0.0),)

  def __post_init__(self):
    check_fields(self)
    if not self.temperature:
      raise ConfigurationError('Distillation.temperature = 0 divides by 0. Use a number above 0.')
    for pair in self.match:
      if len(pair) != 3:
        raise ConfigurationError(
          f"Distillation.match has {pair!r}. Use triples such as ('stream', 5, 5): a kind, a layer "
          'of the student and one of the teacher.'
        )
      check_choice('Distillation.match', pair[0], ACTIVATIONS)

  @property
  def activations(self) -> Sequence[str]:
    """The kinds of the values that are compared."""
    return tuple(dict.fromkeys(kind for kind, *_ in self.match))

  @functools.cached_property
  def _teacher(self) -> Model:
    return language_model.transform(self._make)

  def _make(self, **named: Any) -> LanguageModel:
    """The teacher's module; it has no backward pass, and adapters are merged as it is loaded."""
    return self.teacher(lora=None, sites=None, remat_policy=None, **named)

  def extended(self, model: Model) -> Model:
    """Adds the teacher; raises a ConfigurationError if it does not fit the student."""
    teacher = self._teacher.about
    student = model.about
    if teacher.vocabulary_size != student.vocabulary_size:
      raise ConfigurationError(
        f'The teacher has {teacher.vocabulary_size:,} tokens and the student '
        f'{student.vocabulary_size:,}: their distributions cannot be compared. Use a teacher with '
        "the student's tokenizer."
      )
    if self.match and teacher.width != student.width:
      raise ConfigurationError(
        f'Distillation.match compares outputs of {student.width} numbers with outputs of '
        f'{teacher.width}. Leave it out, or use models of one width (LanguageModel.d_model).'
      )
    sides = ('student', student), ('teacher', teacher)
    for _, *layers in self.match:
      for layer, (whose, about) in zip(layers, sides, strict=True):
        if not 0 <= layer < about.layers:
          raise ConfigurationError(
            f'Distillation.match has layer {layer} of the {whose}, whose layers are 0 to '
            f'{about.layers - 1}. Use one of these.'
          )
    with_teacher = model.extended(
      self.name,
      lambda rng: _named(self._teacher.init(rng, 1)[0]),
      lambda: _named(self._teacher.parameters()),
      lambda rows: self._teacher.initial_carry(rows)['model'],
    )
    contexts = [about.max_context for about in (teacher, student) if about.max_context is not None]
    whole = dict.fromkeys((*student.needs_whole_rows, *teacher.needs_whole_rows))
    return with_teacher._replace(
      about=student._replace(max_context=min(contexts, default=None), needs_whole_rows=(*whole,))
    )

  def prepared(self, params: Params, start: Start) -> Params:
    """Loads the teacher, which must be whole."""
    own = {module: params[_PREFIX + module] for module in self._teacher.parameters()}
    source = self.source()
    start.say('the teacher of the objective:')
    try:
      loaded, complete = source.load(self._teacher, self._make, own, start.vocabulary, start.say)
      if not complete:
        raise ConfigurationError('Some of its parameters are new.')
    except ConfigurationError as error:
      raise ConfigurationError(
        'The teacher cannot be loaded. Bind its parts in the scope of Distillation.teacher, as in '
        f'teacher/Block.mixers = (@FullAttention,); all else is as in the student. {error}'
      ) from error
    return {**params, **_named(loaded)}

  def __call__(self, chunk: Chunk) -> Part:
    """The divergence, and the differences of layers; no gradient reaches the teacher."""
    batch = chunk.batch
    student = chunk.features
    params = {module: chunk.params[_PREFIX + module] for module in self._teacher.parameters()}
    carry = {'model': chunk.before[self.name]}
    params, carry = lax.stop_gradient((params, carry))
    results = self._teacher.read(params, carry, batch, activations=self.activations)
    teacher, after = lax.stop_gradient(results)

    def total(values):
      return jnp.sum(batch.weights * values)

    size = chunk.model.about.vocabulary_size
    divergence = divergences(teacher, student, size, self.temperature, self.top_k)
    sums = {'divergence': total(divergence)}
    loss = self.weight * self.temperature**2 * sums['divergence']
    if self.match:
      student_values = student.activations or {}
      teacher_values = teacher.activations or {}
      differences = []
      for kind, student_layer, teacher_layer in self.match:
        ours = student_values[kind][student_layer]
        theirs = teacher_values[kind][teacher_layer]
        differences.append(_squared(ours, theirs))
      sums['layers'] = total(sum(differences)) / len(differences)
      loss += self.match_weight * sums['layers']
    return Part(loss / chunk.total, lax.stop_gradient(sums), after['model'])


def _named(params: Any) -> Any:
  """The modules of a teacher, as the run has them."""
  return {_PREFIX + module: group for module, group in params.items()}


def _squared(a: jax.Array, b: jax.Array) -> jax.Array:
  a, b = (x.astype(wide(x.dtype)) for x in (a, b))
  return jnp.mean(jnp.square(a - b), axis=-1)
