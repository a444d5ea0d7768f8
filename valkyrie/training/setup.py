"""What is known of a run before a number of it is computed: shapes, layouts, compiled steps."""

from collections.abc import Callable
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Compiled

from valkyrie import fitting
from valkyrie.distributed import heartbeat
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel, Model
from valkyrie.monitoring.progress import Progress
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import LossSpikes, RecentLosses
from valkyrie.training.train_step import TrainState, initial_state, make_train_step
from valkyrie.types import Batch


class Prepared(NamedTuple):
  """The parts of a run that fit together, and the shapes and layouts of its train state.

  make_step: the pure step of a phase: (state, batch [B, N·C]) -> (state, metrics).
  """

  layout: Partitioner
  model: Model
  curriculum: Curriculum
  optimizer: Optimizer
  spikes: LossSpikes
  abstract: TrainState
  make_step: Callable[[Phase], Callable]


def prepare(
  *,
  seed: int,
  batch_size: int,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  curriculum: Callable[[], Curriculum],
  optimizer: Callable[[], Optimizer],
  loss_spikes: Callable[[], LossSpikes],
  remat: bool,
) -> Prepared:
  """Makes the parts that `train` names, of which these are the arguments.

  Raises:
    ConfigurationError: what is wrong with them, before anything is read, written or compiled.
  """
  layout = partitioner()
  functions = language_model.transform(model)
  phases = curriculum()
  layout.check_batch(batch_size, *(phase.chunk_size for phase in phases.phases))
  fitting.check_grain(functions, phases)
  fitting.check_whole_time(functions, layout)
  rule, spikes = optimizer(), loss_spikes()

  def make_step(phase: Phase) -> Callable:
    return make_train_step(functions, rule, phases, phase, seed=seed, remat=remat, spikes=spikes)

  abstract = abstract_state(functions, rule, layout, seed, batch_size, spikes.initial())
  return Prepared(layout, functions, phases, rule, spikes, abstract, make_step)


def abstract_state(
  model: Model,
  optimizer: Optimizer,
  layout: Partitioner,
  seed: int,
  batch_size: int,
  recent: RecentLosses | None = None,
) -> TrainState:
  """The shapes, dtypes and layouts of a train state, with nothing computed."""
  shapes = jax.eval_shape(lambda: initial_state(model, optimizer, seed, batch_size, recent))
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    layout.state_shardings(shapes),
  )


def trace_step(
  step: Callable,
  tokens_per_row: int,
  layout: Partitioner,
  abstract: TrainState,
  batch_size: int,
  donate: bool,
) -> jax.stages.Traced:
  """A step (state, batch [B, tokens_per_row]) -> (state, metrics) on the layout's devices, traced.

  `donate`: the memory of the state that it is given becomes that of the state that it returns.
  """
  rectangle, sharding = (batch_size, tokens_per_row), layout.batch_sharding()
  integers = jax.ShapeDtypeStruct(rectangle, jnp.int32, sharding=sharding)
  floats = jax.ShapeDtypeStruct(rectangle, jnp.float32, sharding=sharding)
  return layout.partition(
    step,
    donate_argnums=0 if donate else (),
    out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), None),
  ).trace(abstract, Batch(integers, integers, floats, integers, integers))


def compile_steps(
  make_step: Callable[[Phase], Callable],
  curriculum: Curriculum,
  layout: Partitioner,
  abstract: TrainState,
  batch_size: int,
  progress: Progress,
  donate: bool,
) -> list[Compiled]:
  """The compiled step of each phase, before the first is taken; phases of one shape share theirs.

  Args:
    make_step: the pure step of a phase: (state, batch [B, N·C]) -> (state, metrics).
    curriculum: the phases.
    layout: the devices.
    abstract: what `abstract_state` says of the state.
    batch_size: B.
    progress: is told of each compilation.
    donate: the memory of the state that a step is given becomes that of the state it returns.
  """
  compiled: dict[tuple, Compiled] = {}
  for phase in curriculum.phases:
    if phase.shape not in compiled:
      heartbeat.beat(stage='compile')
      began = time.perf_counter()
      what = (
        f'{phase.chunks} x {phase.chunk_size} tokens a row, gradient through '
        f'{phase.backprop_chunks}'
      )
      progress.say(f'compiling a step of {what}')
      step = make_step(phase)
      traced = trace_step(step, phase.tokens_per_row, layout, abstract, batch_size, donate)
      compiled[phase.shape] = traced.lower().compile()
      progress.say(f'compiled in {time.perf_counter() - began:.1f} s')
  return [compiled[phase.shape] for phase in curriculum.phases]
