"""One optimizer step, as a pure function of the train state and a batch."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import optax

from valkyrie.models.model import Model
from valkyrie.models.parts import sums_of_parts
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import rounding, tbptt
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.data_parallel import Compute, shard_map_step
from valkyrie.training.objective import PENALTY, PREDICTION, Sums, Terms, shared_module
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import LossSpikes, RecentLosses, detect
from valkyrie.types import Array, Batch, Carry, Params

# Folded into the seed: dropout and rounding share no key with `initial_state`.
_DROPOUT, _ROUNDING = 0x64726F70, 0x726F756E


class TrainState(NamedTuple):
  """The whole state of a run, as one pytree of arrays.

  step: int32, steps taken, refused ones included: it determines the feed's position.
  params, optimizer_state: as Haiku and optax hold them.
  carry: of every row, after the last token that it has read.
  skipped: int32, steps refused for a non-finite number or a loss spike.
  recent: the losses that `spikes` compares the next one with; None without.
  average: of the parameters over the steps; None without.
  objective: what its terms keep, by name, see `objective.Term.initial_state`; None without.
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


class StepMetrics(NamedTuple):
  """Scalars of a step, on the devices.

  part_norms: the norm of the gradient of each part, see `models.parts`.
  skipped: as in the TrainState after it; spiked: whether this step was refused for its loss.
  """

  sums: Sums
  grad_norm: Array
  part_norms: dict[str, Array]
  learning_rate: Array
  skipped: Array
  spiked: Array


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
  average = jax.tree.map(jnp.copy, params) if with_average else None
  return TrainState(zero, params, moments, carry, zero, recent, average, objective)


def state_axes(
  model: Model, optimizer: Optimizer, partitioner: Partitioner, shapes: TrainState
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
    recent=jax.tree.map(lambda leaf: (None,) * leaf.ndim, shapes.recent),
    average=None if shapes.average is None else params,
    objective=jax.tree.map(lambda leaf: (None,) * leaf.ndim, shapes.objective),
  )


def make_train_step(
  model: Model,
  optimizer: Optimizer,
  curriculum: Curriculum,
  phase: Phase,
  *,
  seed: int,
  remat_chunks: bool,
  keep_carries: bool = False,
  spikes: LossSpikes | None = None,
  terms: Terms = PREDICTION,
  micro_batches: int = 1,
  average_decay: float | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
  """The step of one phase: (state, batch [B, N·C]) -> (state, metrics).

  A step whose loss, gradient or carry is not finite, or whose loss is a spike, is refused whole:
  parameters and optimizer state do not change. The feed moves on, so no carry, old or new, precedes
  the next tokens: every row starts from an empty carry, as at a document start.

  A step without a target, as of a long prompt, is only read: momentum and decay would move the
  parameters, and a loss of 0 would be no loss to compare others with.

  Frozen parameters get no gradient and do not enter its norm. Dropout and rounding depend only on
  the seed and the step, so a resumed run draws the same numbers.
  """

  # The functions follow in the order in which they run: `train_step` calls `whole_step`, and this
  # `_in_micro_batches` on every device, which calls `of_rows` for each group of its rows.
  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    def measure(term, shared):
      gradient, _, sums = whole_step(state, batch, [term], {term.name: shared}, is_shared)
      return gradient[shared_module(term)], sums

    kept, shared = dict(state.objective or {}), {}
    for term in terms:
      found, shared[term.name] = term.before(kept.get(term.name), state.step, batch, measure)
      kept |= {term.name: found} if term.name in kept else {}
    slopes = add_penalties(state.params, shared)
    gradient, carry, sums = whole_step(state, batch, terms, shared, learns)
    for term in terms:
      of_shared = gradient.pop(shared_module(term), {})
      if term.name in kept:
        kept[term.name] = term.after(kept[term.name], state.step, shared[term.name], of_shared)
    # Where nothing learns, XLA needs no memory for the zeros.
    zeros = jax.tree.map(jnp.zeros_like, rounding.wide(state.params))
    gradient = hk.data_structures.merge(
      zeros, jax.tree.map(jnp.add, gradient, slopes) if slopes else gradient
    )
    norm = optax.tree.norm(gradient)
    squares = sums_of_parts(gradient, lambda leaf: jnp.sum(jnp.square(leaf)))
    part_norms = {part: jnp.sqrt(total) for part, total in squares.items()}
    learning_rate = optimizer.learning_rate(state.step) * curriculum.learning_rate_scale(state.step)
    params, optimizer_state = optimizer.update(
      gradient,
      state.optimizer_state,
      rounding.wide(state.params),
      learning_rate,
      model.kinds(state.params),
      plan=phase.planner,
    )
    params = rounding.stored(params, state.params, lambda: key_of(_ROUNDING, state.step))

    healthy = jnp.isfinite(sums.followed) & jnp.isfinite(norm)
    for leaf in jax.tree.leaves(carry):
      healthy &= jnp.all(jnp.isfinite(leaf))
    spiked, recent = jnp.zeros((), bool), state.recent
    if spikes is not None and recent is not None:
      loss = sums.followed / sums.weight  # NaN, which is not compared, without a target
      spiked, recent = detect(spikes, recent, loss)
      healthy &= ~spiked

    # `where` instead of a product with a flag: 0 x NaN is NaN.
    def accept(flag, new, old):
      return jax.tree.map(lambda n, o: jnp.where(flag, n, o), new, old)

    counts = healthy & (sums.weight > 0)
    state = state._replace(
      step=state.step + 1,
      params=accept(counts, params, state.params),
      optimizer_state=accept(counts, optimizer_state, state.optimizer_state),
      carry=accept(healthy, carry, model.initial_carry(batch.inputs.shape[0])),
      skipped=state.skipped + jnp.where(healthy, 0, 1),
      recent=recent,
      objective=state.objective and accept(counts, kept, state.objective),
    )
    if average_decay is not None:
      state = state._replace(average=_averaged(state, average_decay))
    return state, StepMetrics(sums, norm, part_norms, learning_rate, state.skipped, spiked)

  def whole_step(state, batch, terms, shared, learns):
    arrays = {shared_module(term): shared[term.name] for term in terms if shared[term.name]}
    extended = model.sharing(arrays)

    of_rows = functools.partial(
      tbptt.gradients,
      extended,
      backprop_chunks=phase.backprop_chunks,
      remat_chunks=remat_chunks,
      keep_carries=keep_carries,
      terms=terms,
      learns=learns,
      plan=phase.planner,
    )
    return shard_map_step(
      functools.partial(_in_micro_batches, of_rows, extended, micro_batches, learns),
      extended,
      {**state.params, **arrays},
      state.carry,
      batch,
      key_of(_DROPOUT, state.step) if model.about.has_dropout else None,
      chunk_size=phase.chunk_size,
      learns=learns,
    )

  def add_penalties(params, shared):
    """Puts the terms' penalties among their shared arrays; returns their gradient, if any."""
    learning, frozen = tbptt.learned_and_frozen(rounding.wide(params), learns)

    def penalties(learning):
      whole = hk.data_structures.merge(frozen, learning)
      of_terms = {term.name: term.penalty(model, whole) for term in terms}
      return {name: value for name, value in of_terms.items() if value is not None}

    found, pull_back = jax.vjp(penalties, learning)
    for name, value in found.items():
      shared[name] = {**shared[name], PENALTY: value}
    return pull_back(jax.tree.map(jnp.ones_like, found))[0] if found else None

  def learns(module, name):
    return optimizer.learns(f'{module}/{name}')

  def is_shared(module, _):
    return module.startswith('shared/')

  def key_of(use: int, step: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), use), step)

  return train_step


def _in_micro_batches(
  compute: Compute,
  model: Model,
  count: int,
  learns: tbptt.Learns,
  params: Params,
  carry: Carry,
  batch: Batch,
  total: Array,
  rng: Array | None,
  *,
  chunk_size: int,
) -> tuple[Params, Carry, Any]:
  """`compute` over `count` groups of rows, one after the other; gradients and sums are added up.

  Every group divides its loss by the weight of the whole step, so the gradient is the same as for
  all rows at once, from less memory. Dropout draws other numbers than without groups.
  """
  if count == 1:
    return compute(params, carry, batch, total, rng, chunk_size=chunk_size)
  batch_axes = jax.tree.map(
    lambda axes: axes.index('batch'),
    model.carry_axes(carry),
    is_leaf=lambda axes: isinstance(axes, tuple) and 'batch' in axes,
  )

  def split(x, axis):
    # [..., B, ...] -> [count, ..., B / count, ...]. Group m has the rows m, m + count, ...: with
    # rows over devices, each device keeps its own.
    parts = x.reshape(*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])
    return jnp.moveaxis(parts, axis + 1, 0)

  def join(parts, axis):
    x = jnp.moveaxis(parts, 0, axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

  def one(gradient, now):
    number, carry, batch = now
    key = None if rng is None else jax.random.fold_in(rng, number)
    more, carry, sums = compute(params, carry, batch, total, key, chunk_size=chunk_size)
    return jax.tree.map(jnp.add, gradient, more), (carry, sums)

  groups = (
    jnp.arange(count),
    jax.tree.map(split, carry, batch_axes),
    jax.tree.map(lambda leaf: split(leaf, 0), batch),
  )
  learning, _ = tbptt.learned_and_frozen(params, learns)
  gradient, (carries, sums) = lax.scan(one, tbptt.zero_gradients(learning), groups)
  carry = jax.tree.map(join, carries, batch_axes)
  return gradient, carry, jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums)


def _averaged(state: TrainState, decay: float) -> Params:
  """The exponential moving average after a step; a refused step moves it by nothing new.

  The decay begins at 2/11 and rises to its value, (1 + n) / (10 + n) after n steps: the average
  soon forgets the initialization (as TensorFlow's ExponentialMovingAverage).
  """
  steps = state.step.astype(jnp.float32)
  share = jnp.minimum(decay, (1 + steps) / (10 + steps))
  return jax.tree.map(lambda a, p: share * a + (1 - share) * p, state.average, state.params)
