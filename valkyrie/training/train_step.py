"""One optimizer step, as a pure function of the train state and a batch.

It reads the batch, decides whether to refuse the step, updates the parameters, and records the new
state with its metrics:

    (state, batch) -> read -> refuse -> update -> record -> (state, metrics)
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from valkyrie.models.model import Model
from valkyrie.training import gradient_norms, rounding, tbptt
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.data_parallel import in_micro_batches, shard_map_step
from valkyrie.training.gradient_term import gradient_term
from valkyrie.training.objective import PREDICTION, Sums, Terms
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import LossSpikes, RecentLosses, detect
from valkyrie.training.train_state import TrainState
from valkyrie.types import Array, Batch, Carry, Params

# Folded into the seed: dropout and rounding share no key with `initial_state`.
_DROPOUT = 0x64726F70
_ROUNDING = 0x726F756E


class StepMetrics(NamedTuple):
  """Scalars of a step, on the devices.

  part_norms: norms of the gradient, see `gradient_norms`.
  skipped: as in the TrainState after it; spiked: whether this step was refused for its loss.
  """

  sums: Sums
  grad_norm: Array
  part_norms: dict[str, Array]
  learning_rate: Array
  skipped: Array
  spiked: Array


class StepParts(NamedTuple):
  """What the steps of a phase are made of; `setup.StepSettings` explains the settings."""

  model: Model
  optimizer: Optimizer
  curriculum: Curriculum
  phase: Phase
  seed: int
  remat_chunks: bool
  keep_carries: bool = False
  spikes: LossSpikes | None = None
  terms: Terms = PREDICTION
  micro_batches: int = 1
  average_decay: float | None = None
  norms: Callable[[Params], dict[str, Array]] = gradient_norms.by_part

  def learns(self, module: str, name: str) -> bool:
    """Whether a parameter learns."""
    return self.optimizer.learns(f'{module}/{name}')

  def key(self, use: int, step: Array) -> Array:
    """The key of a step for one use: a resumed run draws the same numbers."""
    key_of_run = jax.random.key(self.seed)
    key_of_use = jax.random.fold_in(key_of_run, use)
    return jax.random.fold_in(key_of_use, step)


class Reading(NamedTuple):
  """What a step has read of its batch.

  gradient: of all parameters, float32, zero where nothing learns; norm, part_norms: its norms.
  carry: after the batch.
  objective: as in the TrainState.
  """

  gradient: Params
  norm: Array
  part_norms: dict[str, Array]
  carry: Carry
  sums: Sums
  objective: Any


class Verdict(NamedTuple):
  """Whether a step counts.

  healthy: its loss, gradient and carry are finite, and the loss is not a spike.
  spiked: the loss is a spike.
  recent: as in the TrainState.
  """

  healthy: Array
  spiked: Array
  recent: RecentLosses | None


class Update(NamedTuple):
  """The parameters and the optimizer's state after the step, if it counts."""

  params: Params
  optimizer_state: Any
  learning_rate: Array


def make_train_step(
  model: Model,
  optimizer: Optimizer,
  curriculum: Curriculum,
  phase: Phase,
  **settings: Any,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
  """The step of one phase: (state, batch [B, N·C]) -> (state, metrics); see `StepParts`."""
  if not phase.insert:
    model = model.without_insert()
  parts = StepParts(model, optimizer, curriculum, phase, **settings)
  return functools.partial(train_step, parts)


def train_step(parts: StepParts, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
  """One step.

  A step whose loss, gradient or carry is not finite, or whose loss is a spike, is refused whole:
  parameters and optimizer state do not change. The feed moves on, so no carry, old or new, precedes
  the next tokens: every row starts from an empty carry, as at a document start.

  A step without a target, such as one inside a long prompt, updates the carry only. Otherwise
  momentum and decay would move the parameters, and a loss of 0 would upset the detection of spikes.
  """
  reading = read_batch(parts, state, batch)
  verdict = refuse(parts, state, reading)
  update = update_parameters(parts, state, reading.gradient)
  return record(parts, state, batch, reading, verdict, update)


def read_batch(parts: StepParts, state: TrainState, batch: Batch) -> Reading:
  """Reads the batch: the gradient of the loss, the carry and the sums."""
  one_pass = functools.partial(_read_once, parts, state, batch)
  term = gradient_term(parts.terms)
  objective = state.objective
  if term is None:
    gradient, carry, sums = one_pass(parts.terms, {}, parts.learns)
  else:
    kept = (objective or {}).get(term.name)
    found = term.step_gradient(
      one_pass, parts.model, parts.terms, parts.learns, state.params, kept, state.step, batch
    )
    gradient = found.gradient
    carry = found.carry
    sums = found.sums
    objective = objective and {term.name: found.state}
  # Frozen parameters get zeros, which XLA never materializes.
  zeros = jax.tree.map(jnp.zeros_like, rounding.wide(state.params))
  gradient = hk.data_structures.merge(zeros, gradient)
  norm = optax.tree.norm(gradient)
  return Reading(gradient, norm, parts.norms(gradient), carry, sums, objective)


def _read_once(
  parts: StepParts,
  state: TrainState,
  batch: Batch,
  terms: Terms,
  arrays: Mapping[str, Mapping[str, Array]],
  learns: tbptt.Learns,
) -> tuple[Params, Carry, Sums]:
  """One pass over all devices; see `gradient_term.OnePass`.

  `shard_map_step` calls `in_micro_batches` on every device, which calls `tbptt.gradients` for each
  group of its rows.
  """
  model = parts.model.sharing(arrays)
  of_rows = functools.partial(
    tbptt.gradients,
    model,
    backprop_chunks=parts.phase.backprop_chunks,
    remat_chunks=parts.remat_chunks,
    keep_carries=parts.keep_carries,
    terms=terms,
    learns=learns,
  )
  of_device = functools.partial(in_micro_batches, of_rows, model, parts.micro_batches, learns)
  rng = None
  if model.about.has_dropout:
    rng = parts.key(_DROPOUT, state.step)
  return shard_map_step(
    of_device,
    model,
    {**state.params, **arrays},
    state.carry,
    batch,
    rng,
    chunk_size=parts.phase.chunk_size,
    learns=learns,
  )


def refuse(parts: StepParts, state: TrainState, reading: Reading) -> Verdict:
  """Decides whether the step counts."""
  has_finite_loss = jnp.isfinite(reading.sums.followed)
  healthy = has_finite_loss & jnp.isfinite(reading.norm)
  for leaf in jax.tree.leaves(reading.carry):
    is_finite = jnp.isfinite(leaf)
    healthy &= jnp.all(is_finite)
  if parts.spikes is None or state.recent is None:
    no_spike = jnp.zeros((), bool)
    return Verdict(healthy, no_spike, state.recent)
  # Without a target the loss is NaN, which is not compared.
  loss = reading.sums.followed / reading.sums.weight
  spiked, recent = detect(parts.spikes, state.recent, loss)
  is_accepted = healthy & ~spiked
  return Verdict(is_accepted, spiked, recent)


def update_parameters(parts: StepParts, state: TrainState, gradient: Params) -> Update:
  """The parameters after one step of the optimizer, in the dtypes in which they are stored."""
  schedule = parts.optimizer.learning_rate(state.step)
  scale = parts.curriculum.learning_rate_scale(state.step)
  learning_rate = schedule * scale
  params, optimizer_state = parts.optimizer.update(
    gradient,
    state.optimizer_state,
    rounding.wide(state.params),
    learning_rate,
    parts.model.kinds(state.params),
  )
  params = rounding.stored(params, state.params, lambda: parts.key(_ROUNDING, state.step))
  return Update(params, optimizer_state, learning_rate)


def record(
  parts: StepParts,
  state: TrainState,
  batch: Batch,
  reading: Reading,
  verdict: Verdict,
  update: Update,
) -> tuple[TrainState, StepMetrics]:
  """The state after the step, and its metrics."""
  counts = verdict.healthy & (reading.sums.weight > 0)
  rows = batch.inputs.shape[0]
  no_carry = parts.model.initial_carry(rows)
  new = state._replace(
    step=state.step + 1,
    params=_chosen(counts, update.params, state.params),
    optimizer_state=_chosen(counts, update.optimizer_state, state.optimizer_state),
    carry=_chosen(verdict.healthy, reading.carry, no_carry),
    skipped=state.skipped + jnp.where(verdict.healthy, 0, 1),
    recent=verdict.recent,
    objective=_chosen(counts, reading.objective, state.objective),
  )
  if parts.average_decay is not None:
    new = new._replace(average=_averaged(new, parts.average_decay))
  metrics = StepMetrics(
    sums=reading.sums,
    grad_norm=reading.norm,
    part_norms=reading.part_norms,
    learning_rate=update.learning_rate,
    skipped=new.skipped,
    spiked=verdict.spiked,
  )
  return new, metrics


def _chosen(flag: Array, yes: Any, no: Any) -> Any:
  # `where` instead of a product with a flag: 0 x NaN is NaN.
  return jax.tree.map(lambda y, n: jnp.where(flag, y, n), yes, no)


def _averaged(state: TrainState, decay: float) -> Params:
  """The exponential moving average after a step. It also moves after a refused step.

  The decay begins at 2/11 and rises to its value, (1 + n) / (10 + n) after n steps: the average
  soon forgets the initialization (as TensorFlow's ExponentialMovingAverage).
  """
  steps = state.step.astype(jnp.float32)
  share = jnp.minimum(decay, (1 + steps) / (10 + steps))

  def moved(average, param):
    return share * average + (1 - share) * param

  return jax.tree.map(moved, state.average, state.params)
