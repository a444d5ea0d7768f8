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
from valkyrie.models import kernel_choice, language_model
from valkyrie.models.features import ACTIVATIONS, Description, Features
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.model import Model
from valkyrie.models.precision import wide
from valkyrie.training.losses import divergences
from valkyrie.training.objective import Chunk, Part, Start, Term
from valkyrie.training.optimizers import Group
from valkyrie.types import Carry, Params

_PREFIX = 'teacher/'


class Weights(Protocol):
  """Weights from elsewhere: `weights.initial.InitialWeights`."""

  def load(
    self,
    model: Model,
    make: Callable,
    params: Params,
    vocabulary: str,
    say: Callable,
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
    _check_kernels(self._make)
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
    for _, student_layer, teacher_layer in self.match:
      _check_layer(student_layer, 'student', student)
      _check_layer(teacher_layer, 'teacher', teacher)

    def init(rng):
      params, _ = self._teacher.init(rng, 1)
      return _named(params)

    def parameters():
      return _named(self._teacher.parameters())

    def initial_carry(rows):
      carry = self._teacher.initial_carry(rows)
      return carry['model']

    with_teacher = model.extended(self.name, init, parameters, initial_carry)
    contexts = []
    for longest in (teacher.max_context, student.max_context):
      if longest is not None:
        contexts.append(longest)
    whole = dict.fromkeys((*student.needs_whole_rows, *teacher.needs_whole_rows))
    about = student._replace(
      max_context=min(contexts, default=None),
      needs_whole_rows=tuple(whole),
    )
    return with_teacher._replace(about=about)

  def prepared(self, params: Params, start: Start) -> Params:
    """Loads the teacher, which must be whole."""
    initial = self._params(params)
    source = self.source()
    start.say('the teacher of the objective:')
    try:
      loaded, complete = source.load(
        self._teacher, self._make, initial, start.vocabulary, start.say
      )
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
    teacher, after = self._read(chunk)

    def total(values):
      return jnp.sum(batch.weights * values)

    size = chunk.model.about.vocabulary_size
    divergence = divergences(teacher, student, size, self.temperature, self.top_k)
    sums = {'divergence': total(divergence)}
    scale = self.weight * self.temperature**2
    loss = scale * sums['divergence']
    if self.match:
      student_values = student.activations or {}
      teacher_values = teacher.activations or {}
      differences = []
      for kind, student_layer, teacher_layer in self.match:
        ours = student_values[kind][student_layer]
        theirs = teacher_values[kind][teacher_layer]
        difference = _squared(ours, theirs)
        differences.append(difference)
      sums['layers'] = total(sum(differences)) / len(differences)
      loss += self.match_weight * sums['layers']
    share = loss / chunk.total
    return Part(share, lax.stop_gradient(sums), after['model'])

  def _read(self, chunk: Chunk) -> tuple[Features, Carry]:
    """(What the teacher makes of a chunk, its carry after it), both without a gradient."""
    params = self._params(chunk.params)
    carry = {'model': chunk.before[self.name]}
    params, carry = lax.stop_gradient((params, carry))
    results = self._teacher.read(params, carry, chunk.batch, activations=self.activations)
    return lax.stop_gradient(results)

  def _params(self, params: Params) -> Params:
    """The parameters of the teacher among a run's."""
    modules = self._teacher.parameters()
    return {module: params[_PREFIX + module] for module in modules}


def _check_kernels(make: Callable[..., LanguageModel]) -> None:
  """Raises a ConfigurationError if the teacher requires kernels, since none computes it."""
  blocks = language_model.asked(make, lambda model: model.blocks())
  for block in blocks:
    for mixer in block.mixers:
      asking = kernel_choice.asking(mixer)
      choice = getattr(asking, 'kernels', None)
      if choice not in (None, 'prefer'):
        name = f'{type(asking).__name__}.kernels'
        raise ConfigurationError(
          f'The teacher has {name} = {choice!r}, but a teacher is computed by the plain forms. Set '
          f'teacher/{name} = None.'
        )


def _check_layer(layer: int, whose: str, about: Description) -> None:
  """Raises a ConfigurationError unless a model has a layer with this number."""
  if not 0 <= layer < about.layers:
    raise ConfigurationError(
      f'Distillation.match has layer {layer} of the {whose}, whose layers are 0 to '
      f'{about.layers - 1}. Use one of these.'
    )


def _named(params: Any) -> Any:
  """The modules of a teacher, as the run has them."""
  return {_PREFIX + module: group for module, group in params.items()}


def _squared(a: jax.Array, b: jax.Array) -> jax.Array:
  a = a.astype(wide(a.dtype))
  b = b.astype(wide(b.dtype))
  squares = jnp.square(a - b)
  return jnp.mean(squares, axis=-1)
