"""The state of a run: what a step changes, and what a checkpoint keeps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from valkyrie.models.model import Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import rounding
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import RecentLosses
from valkyrie.types import Array, Carry, Params


class TrainState(NamedTuple):
  """The whole state of a run, as one pytree of arrays.

  step: int32, steps taken, refused ones included: it determines the feed's position.
  params, optimizer_state: as Haiku and optax hold them.
  carry: of every row, after the last token that it has read.
  skipped: int32, steps refused for a non-finite number or a loss spike.
  recent: the losses that `spikes` compares the next one with; None without.
  average: the average of the parameters over the steps; None without.
  objective: {name: state} of the term that computes its own gradients, see `gradient_term`; None
    without one.
  """

  step: Array
  params: Params
  optimizer_state: Any
  carry: Carry
  skipped: Array
  recent: RecentLosses | None = None
  average: Params | None = None
  objective: Any = None

  @property
  def evaluated(self) -> Params:
    """The parameters that evaluations and generation use: the average, if there is one."""
    return self.params if self.average is None else self.average


def initial_state(
  model: Model,
  optimizer: Optimizer,
  seed: int,
  batch_size: int,
  recent: RecentLosses | None = None,
  objective: Any = None,
  *,
  with_average: bool = False,
) -> TrainState:
  """The state before the first step; pure."""
  params, carry = model.init(jax.random.key(seed), batch_size)
  zero = jnp.zeros((), jnp.int32)
  moments = optimizer.init(rounding.wide(params), model.kinds(params))
  average = None
  if with_average:
    average = jax.tree.map(jnp.copy, params)
  return TrainState(zero, params, moments, carry, zero, recent, average, objective)


def state_axes(
  model: Model,
  optimizer: Optimizer,
  partitioner: Partitioner,
  shapes: TrainState,
) -> TrainState:
  """The logical axes of every leaf of a train state."""
  params = model.parameter_axes(partitioner.parameter_axes)
  scalar: Any = ()
  return TrainState(
    step=scalar,
    params=params,
    optimizer_state=optimizer.state_axes(shapes.optimizer_state, shapes.params, params),
    carry=model.carry_axes(shapes.carry),
    skipped=scalar,
    recent=_whole(shapes.recent),
    average=None if shapes.average is None else params,
    objective=_whole(shapes.objective),
  )


def _whole(shapes: Any) -> Any:
  """The axes of arrays that every device has whole."""
  return jax.tree.map(lambda leaf: (None,) * leaf.ndim, shapes)
