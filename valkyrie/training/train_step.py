"""One optimizer step as a pure function of the train state and a batch."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from valkyrie.models.language_model import Model
from valkyrie.training import tbptt
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.data_parallel import spread
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import LossSpikes, RecentLosses, judge
from valkyrie.types import Array, Batch, Carry, Params

# Folded into the seed, so that dropout shares no key with what `initial_state` draws from it.
_DROPOUT = 0x64726F70


class TrainState(NamedTuple):
  """All that a run must remember, as one pytree of arrays.

  step: int32, steps taken, refused ones included: it tells the feed's position.
  params, optimizer_state: as Haiku and optax hold them.
  carry: the memory of every row, from the last token that it has read.
  skipped: int32, steps refused because a number was not finite or the loss a spike.
  recent: what `spikes` compares the next loss with; None where nothing is.
  """

  step: Array
  params: Params
  optimizer_state: Any
  carry: Carry
  skipped: Array
  recent: RecentLosses | None = None


class StepMetrics(NamedTuple):
  """What a step says of itself: scalars on the device, not waited for.

  skipped: as in the TrainState after it; spiked: whether this step was refused for its loss.
  """

  sums: tbptt.Sums
  grad_norm: Array
  learning_rate: Array
  skipped: Array
  spiked: Array


def initial_state(
  model: Model,
  optimizer: Optimizer,
  seed: int,
  batch_size: int,
  recent: RecentLosses | None = None,
) -> TrainState:
  """The state before the first step; pure, so that it can be traced for its shapes."""
  params, carry = model.init(jax.random.key(seed), batch_size)
  zero = jnp.zeros((), jnp.int32)
  return TrainState(zero, params, optimizer.init(params), carry, zero, recent)


def make_train_step(
  model: Model,
  optimizer: Optimizer,
  curriculum: Curriculum,
  phase: Phase,
  *,
  seed: int,
  remat: bool,
  spikes: LossSpikes | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
  """The step of one phase: (state, batch [B, N·C]) -> (state, metrics).

  A step whose loss, gradient or carry is not finite, or whose loss is a spike, is refused whole:
  parameters and optimizer keep what they held before. Its tokens are gone all the same, so no
  carry, old or new, fits what comes next, and every row starts from an empty one as at a document
  start.

  Dropout draws from the seed and the step alone: a resumed run draws what it would have drawn.
  """

  def dropout_key(step: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _DROPOUT), step)

  differentiate = functools.partial(
    tbptt.gradients,
    model,
    backprop_chunks=phase.backprop_chunks,
    remat=remat,
    plan=phase.planner,
  )

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    gradient, carry, sums = spread(
      differentiate,
      model,
      state.params,
      state.carry,
      batch,
      dropout_key(state.step) if model.draws else None,
      chunk_size=phase.chunk_size,
      backwards=True,
    )
    norm = optax.tree.norm(gradient)
    learning_rate = optimizer.learning_rate(state.step) * curriculum.learning_rate_scale(state.step)
    params, optimizer_state = optimizer.update(
      gradient, state.optimizer_state, state.params, learning_rate, plan=phase.planner
    )

    healthy = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
    for leaf in jax.tree.leaves(carry):
      healthy &= jnp.all(jnp.isfinite(leaf))
    spiked, recent = jnp.zeros((), bool), state.recent
    if spikes is not None and recent is not None:
      loss = sums.loss / jnp.maximum(sums.weight, 1.0)
      spiked, recent = judge(spikes, recent, loss)
      healthy &= ~spiked

    # `where` and not a product with a flag: 0 x NaN is NaN.
    def accept(new, old):
      return jax.tree.map(lambda n, o: jnp.where(healthy, n, o), new, old)

    state = TrainState(
      step=state.step + 1,
      params=accept(params, state.params),
      optimizer_state=accept(optimizer_state, state.optimizer_state),
      carry=accept(carry, model.initial_carry(batch.inputs.shape[0])),
      skipped=state.skipped + jnp.where(healthy, 0, 1),
      recent=recent,
    )
    return state, StepMetrics(sums, norm, learning_rate, state.skipped, spiked)

  return train_step
