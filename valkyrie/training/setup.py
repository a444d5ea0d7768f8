"""The parts of a run, checked to fit together, and their train steps on the mesh."""

from collections.abc import Callable, Collection, Mapping, Sequence
import copy
import dataclasses
import functools
from typing import Annotated

import gin
import jax
import jax.numpy as jnp

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import PositiveInt, Range, Seed, check_fields
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.models import language_model, lora
from valkyrie.models.declarations import FIRST_CARRY
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.mixer_check import check_mixer
from valkyrie.models.model import Model
from valkyrie.models.parts import sums_of_parts
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import gradient_norms
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.gradient_term import gradient_term
from valkyrie.training.objective import Prediction, Term, terms_of
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import LossSpikes
from valkyrie.training.train_state import TrainState, initial_state, state_axes
from valkyrie.training.train_step import make_train_step
from valkyrie.types import Batch, Carry, SequenceMixer, TaskFeed


@gin.configurable
@may_change_on_resume(  # a checkpoint records the rows
  'batch_size', 'hunt_nan', 'grad_norm_by_layer', 'check_mixers'
)
@dataclasses.dataclass(frozen=True)
class StepSettings:
  """The settings that decide the compiled train steps.

  Attributes:
    seed: the seed of the parameters and of dropout.
    batch_size: B, rows, each with a carry.
    model, partitioner, curriculum, optimizer, loss_spikes: the classes of the parts.
    objective: the class of a `training.objective.Term`, or a sequence of classes, which add up.
    remat_chunks: recompute chunks in the backward pass; False saves their activations.
    keep_carries: with `remat_chunks`, keep the carries of all chunks instead of about 2 sqrt(n):
      more memory, and one forward pass less.
    hunt_nan: wait for every step, and end at the first refused one with the name of the module
      where its first non-finite number appears.
    micro_batches: groups into which each device's rows are split; their gradients add up.
    average_decay: of an exponential moving average of the parameters, such as 0.999, which
      evaluations and generation then use; None keeps none.
    grad_norm_by_layer: log the norm of the gradient of each layer, too.
    check_mixers: check imported mixers as a run starts, which takes seconds.
  """

  seed: Seed
  batch_size: PositiveInt
  model: Callable[..., LanguageModel]
  partitioner: Callable[[], Partitioner]
  curriculum: Callable[[], Curriculum]
  optimizer: Callable[[], Optimizer]
  objective: Callable[[], Term] | Sequence[Callable[[], Term]] = Prediction
  loss_spikes: Callable[[], LossSpikes] = LossSpikes
  remat_chunks: bool = True
  keep_carries: bool = False
  hunt_nan: bool = False
  micro_batches: PositiveInt = 1
  average_decay: Annotated[float, Range('(0, 1)')] | None = None
  grad_norm_by_layer: bool = False
  check_mixers: bool = True

  def __post_init__(self):
    check_fields(self)


class Setup:
  """The parts of a run, and the shapes and shardings of its train state.

  Attributes:
    settings: the settings.
    model, partitioner, curriculum, optimizer, loss_spikes: the parts; the model has the parameters
      and carries of the objective, too.
    language_model: without those, as it is evaluated.
    terms: the terms of the objective.
    state: the shapes, dtypes and shardings of the TrainState.
  """

  def __init__(self, settings: StepSettings):
    """Makes the parts, without compilation; a ConfigurationError if they do not fit together."""
    self.settings = settings
    self.partitioner = settings.partitioner()
    self.terms = terms_of(settings.objective)
    self.language_model = language_model.transform(settings.model)
    self.model = self._extended(self.language_model)
    self.curriculum = settings.curriculum()
    self._check_chunks()
    self._check_time_axis()
    groups = [group for term in self.terms for group in term.groups]
    self.optimizer = settings.optimizer().preceded_by(groups)
    self.loss_spikes = settings.loss_spikes()
    shapes = jax.eval_shape(self._initial_state)
    self._check_average(shapes)
    axes = state_axes(self.model, self.optimizer, self.partitioner, shapes)
    self.partitioner.check_rules(axes)
    self._shardings: TrainState = self.partitioner.shardings(shapes, axes)
    self.state: TrainState = jax.tree.map(
      lambda leaf, sharding: leaf.update(sharding=sharding), shapes, self._shardings
    )

  def _extended(self, model: Model) -> Model:
    """The model with what the terms add to it."""
    for term in self.terms:
      model = term.extended(model)
    return model

  def initial_state(self) -> TrainState:
    """The state before the first step, on the mesh."""
    return self.partitioner.jit(self._initial_state, out_shardings=self._shardings)()

  def _initial_state(self) -> TrainState:
    settings = self.settings
    rows = self.settings.batch_size
    tokens = max(phase.tokens_per_row for phase in self.curriculum.phases)
    term = gradient_term(self.terms)
    objective = None
    if term is not None:
      kept = term.initial_state(self.model, rows, tokens)
      if kept is not None:
        objective = {term.name: kept}
    return initial_state(
      self.model,
      self.optimizer,
      settings.seed,
      rows,
      self.loss_spikes.initial(),
      objective,
      with_average=settings.average_decay is not None,
    )

  def initial_carry(self) -> Carry:
    """The empty carry of all rows, on the mesh."""
    rows = self.settings.batch_size
    jit = self.partitioner.jit
    return jit(lambda: self.model.initial_carry(rows), out_shardings=self._shardings.carry)()

  def train_step(self, phase: Phase, *, remat: bool = True) -> Callable:
    """The pure step of a phase: (state, batch [B, N·C]) -> (state, metrics).

    With `remat` False nothing is recomputed, so that it can run operation by operation.
    """
    model = self.model
    if not remat:
      plain = functools.partial(self.settings.model, remat_policy=None)
      model = self._extended(language_model.transform(plain))
    norms = gradient_norms.by_part
    if self.settings.grad_norm_by_layer:
      norms = gradient_norms.by_part_and_layer
    return make_train_step(
      model,
      self.optimizer,
      self.curriculum,
      phase,
      seed=self.settings.seed,
      remat_chunks=remat and self.settings.remat_chunks,
      keep_carries=self.settings.keep_carries,
      spikes=self.loss_spikes,
      terms=self.terms,
      micro_batches=self.settings.micro_batches,
      average_decay=self.settings.average_decay,
      norms=norms,
    )

  def trace(self, phase: Phase) -> jax.stages.Traced:
    """The step of a phase on the mesh, traced.

    It donates the memory of its state, unless `hunt_nan` needs the state after a refused step.
    """
    rectangle = (self.settings.batch_size, phase.tokens_per_row)
    sharding = self.partitioner.batch_sharding()
    integers = jax.ShapeDtypeStruct(rectangle, jnp.int32, sharding=sharding)
    floats = jax.ShapeDtypeStruct(rectangle, jnp.float32, sharding=sharding)
    return self.partitioner.jit(
      self.train_step(phase),
      donate_argnums=() if self.settings.hunt_nan else 0,
      out_shardings=(self._shardings, None),
    ).trace(self.state, Batch(integers, integers, floats, integers, integers))

  def remarks(self) -> list[str]:
    """What a run says about its configuration before it starts."""
    counts = self.language_model.counts()
    remarks = [self._sizes(counts)]
    for path in self.undeclared_parameters():
      remarks.append(
        f'{path} is replicated on every device: its module declares no axes, and '
        'Partitioner.parameter_axes has no rule for it'
      )
    forgetful = self.short_horizon()
    if forgetful:
      remarks.append(f'warning: {forgetful}')
    added = {}
    for module, group in self.model.counts().items():
      if module not in counts:
        added[module] = group
    for name, count in sums_of_parts(added, _itself).items():
      remarks.append(f'{count:,} more parameters of the objective: {name}')
    total = 0
    learning = 0
    idle = 0
    for module, group in counts.items():
      for name, count in group.items():
        total += count
        if self.optimizer.learns(f'{module}/{name}'):
          learning += count
        elif name.endswith((lora.A, lora.B)) or name.startswith(FIRST_CARRY):
          idle += count
    if learning < total:
      remarks.append(
        f'{learning:,} of {total:,} parameters learn; groups with a learning rate of 0 are frozen'
      )
    if idle:
      remarks.append(
        f'warning: {idle:,} parameters of adapters or first carries are frozen. Of several files '
        'that bind Optimizer.groups, the last one counts'
      )
    return remarks

  def _sizes(self, counts: Mapping[str, Mapping[str, int]]) -> str:
    """The parameters of each part, their dtypes and the mesh."""
    parts = sums_of_parts(counts, _itself)
    total = sum(parts.values())
    by_size = sorted(parts.items(), key=lambda item: -item[1])
    listed = ', '.join(f'{part} {size:,}' for part, size in by_size)
    leaves = jax.tree.leaves(self.state.params)
    dtype_names = {str(leaf.dtype) for leaf in leaves}
    dtypes = ' and '.join(sorted(dtype_names))
    axis_sizes = self.partitioner.mesh.shape.items()
    mesh = ', '.join(f'{axis}={size}' for axis, size in axis_sizes)
    return (
      f'{total:,} parameters ({listed}) in {dtypes}, computed in '
      f'{self.model.about.compute_dtype}; mesh {mesh}'
    )

  def short_horizon(self) -> str | None:
    """A warning, if the recurrences forget within the tokens that a step reads of a row."""
    horizon = self.model.about.horizon
    row = max(phase.tokens_per_row for phase in self.curriculum.phases)
    if horizon is None or horizon >= row:
      return None
    return (
      f'a step reads {row:,} tokens of each row, but no recurrence has a time constant above '
      f'{horizon:,.0f} tokens at initialization. To remember the row, set the horizon of the mixer '
      f'(such as S5.horizon) to {row} or more'
    )

  def schedule(self, step: int) -> dict[str, float]:
    """The learning rate of the step after `step` steps, and the step where the schedule ends."""
    ends = self.optimizer.train_steps
    return {'rate': self.rate(step, ends), 'ends': ends}

  def rate(self, step: int, ends: int) -> float:
    """The learning rate of the step after `step` steps, if the schedule ends at the step `ends`."""
    number = jnp.int32(step)
    optimizer = self.optimizer.ending_at(ends)
    rate = optimizer.learning_rate(number)
    scale = self.curriculum.learning_rate_scale(number)
    return float(rate * scale)

  def with_kernels(self, lengths: Collection[tuple[str, int]]) -> 'Setup':
    """This run with kernels of these mixers in pieces of so many tokens; see `kernel_check`."""
    if not lengths:
      return self
    setup = copy.copy(self)
    model = functools.partial(self.settings.model, kernel_lengths=lengths)
    setup.settings = dataclasses.replace(self.settings, model=model)
    setup.language_model = language_model.transform(model)
    setup.model = setup._extended(setup.language_model)
    return setup

  def undeclared_parameters(self) -> list[str]:
    """The paths of the parameters that no module and no rule gives axes: they are replicated."""
    undeclared = []

    def note(path, declared, shape):
      axes = self.partitioner.parameter_axes(path, declared, shape)
      if declared is None and not any(axes) and self.partitioner.mesh.size > 1:
        undeclared.append(path)
      return axes

    self.model.parameter_axes(note)
    return undeclared

  def _check_chunks(self) -> None:
    phases = self.curriculum.phases
    self.partitioner.check_batch(self.settings.batch_size, *(phase.chunk_size for phase in phases))
    rows = self.settings.batch_size // self.partitioner.parts_of('batch')
    if rows % self.settings.micro_batches:
      raise ConfigurationError(
        f'StepSettings.micro_batches={self.settings.micro_batches} does not divide the {rows} rows '
        f'of each device. Use a divisor of {rows}.'
      )

  def _check_average(self, shapes: TrainState) -> None:
    decay = self.settings.average_decay
    leaves = jax.tree.leaves(shapes.params)
    is_rounded = any(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    if decay is not None and is_rounded:
      raise ConfigurationError(
        f'StepSettings.average_decay={decay} moves an average by less than the last digit of '
        "bfloat16. Set LanguageModel.parameter_dtype = 'float32', or average_decay = None."
      )

  def _check_time_axis(self) -> None:
    axes = self.partitioner.axes_of('time')
    parts = self.model.about.needs_whole_rows
    if axes and parts:
      raise ConfigurationError(
        f"Partitioner.axis_rules splits 'time' over {axes}, but {' and '.join(parts)} must have "
        'whole rows on one device. Include a layout that keeps rows whole, such as '
        'gin/partition/zero1.gin, or use mixers that support sequence parallelism '
        '(LongformerAttention, S5, or your own with sequence_parallel = True) and '
        'LanguageModel.insert = None.'
      )


def _itself(count: int) -> int:
  return count


def check_feed(model: Model, feed: TaskFeed, rows: int) -> None:
  """Raises a ConfigurationError unless the feed has `rows` rows and tokens that the model knows."""
  if feed.batch_size != rows:
    raise ConfigurationError(
      f'The feed has {feed.batch_size} rows, but {rows} are read. Give both the same batch_size: '
      'train/TaskFeed and StepSettings, and validation/TaskFeed and Evaluator.'
    )
  known = model.about.vocabulary_size
  if feed.vocabulary_size > known:
    raise ConfigurationError(
      f"The feed's vocabulary has {feed.vocabulary_size} tokens, but the model has only {known}. "
      f'Set LanguageModel.vocabulary_size = {feed.vocabulary_size}.'
    )


def check_documents(model: Model, feed: TaskFeed) -> None:
  """Raises a DataError if the model cannot read the feed's longest document.

  It opens the feed, which refuses too few documents before a state of so many rows is made.
  """
  feed.open()
  sees = model.about.max_context
  if sees is not None and feed.longest > sees:
    raise DataError(
      f'The longest document has {feed.longest:,} tokens, but the model sees at most {sees:,} '
      '(FullAttention.max_context). Cut documents with text_cut = BYTES of gin/data/text.gin, let '
      'each token see its last tokens by FullAttention.slides = True, let each chunk be read alone '
      'by FullAttention.carried = False, or use LongformerAttention. If TaskFeed.pass_carry joins '
      'documents, set it to 0.'
    )


def make_mixer(make: Callable[..., LanguageModel], block: int, place: int) -> SequenceMixer:
  """A new mixer of a block of the pattern of the module that `make` builds.

  It is made within its block: bindings of the scopes of the model and of the block apply.
  """
  blocks = make(name='model').blocks()
  return blocks[block].mixers[place]


def check_mixers(model: Callable[..., LanguageModel]) -> None:
  """Checks the mixers that are not of this package, whose tests check its own; see `check_mixer`.

  Raises a ConfigurationError that names the broken rule.
  """

  def made(one: LanguageModel) -> tuple[int, list[list[type]]]:
    kinds = []
    for block in one.blocks():
      kinds_of_block = [type(mixer) for mixer in block.mixers]
      kinds.append(kinds_of_block)
    return one.d_model, kinds

  width, kinds = language_model.asked(model, made)
  for row, kinds_of_block in enumerate(kinds):
    for column, kind in enumerate(kinds_of_block):
      package, _, _ = kind.__module__.partition('.')
      if package != 'valkyrie':
        rebuild = functools.partial(make_mixer, model, row, column)
        named = functools.update_wrapper(rebuild, kind, updated=())
        check_mixer(named, width)
