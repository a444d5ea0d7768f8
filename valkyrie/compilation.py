"""What is known of a run before a number of it is computed: shapes, layouts, compiled steps."""

from collections.abc import Callable
import time

import jax
import jax.numpy as jnp

from valkyrie.models.language_model import Model
from valkyrie.monitoring import heartbeat
from valkyrie.monitoring.progress import Progress
from valkyrie.partitioning import Partitioner
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import RecentLosses
from valkyrie.training.train_step import TrainState, initial_state
from valkyrie.types import Batch


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
) -> list[Callable]:
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
  compiled: dict[tuple, Callable] = {}
  for phase in curriculum.phases:
    if phase.shape not in compiled:
      heartbeat.beat(phase='compile')
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
