"""How well a model predicts a split: the same chunks and carries as in training, no gradient."""

from collections.abc import Callable, Sequence
import math
import pathlib
from typing import Any, NamedTuple

import gin
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.computation import may_change_on_resume
from valkyrie.data.feed import TaskFeed
from valkyrie.data.prefetch import prefetch
from valkyrie.errors import ConfigurationError, Preempted
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel, Model
from valkyrie.models.s5.scan import Complex
from valkyrie.monitoring import plot
from valkyrie.monitoring.metrics import Metrics, position_metrics, text_metrics
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.writers import create_writers
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.data_parallel import gathered, spread
from valkyrie.training.losses import token_scores
from valkyrie.types import Array, Batch, Carry, Params

# What an evaluation can cut from the carry between chunks.
CUTS = ('s5', 'all')
_BINS = 31  # powers of two below the position at which int32 ends


class Scores(NamedTuple):
  """Sums over tokens, float32: they add up over chunks.

  loss, weight: [_BINS], the weighted nats and the weight of the targets at the positions 2^k to
    2^(k+1) - 1 of their document; none is at 0, since nothing predicts a document's first token.
  right: the weight of the targets that the model found the likeliest.
  """

  loss: Array
  weight: Array
  right: Array


def chunk_scores(
  model: Model, params: Params, carry: Carry, chunk: Batch, *, plan: bool = True
) -> tuple[Scores, Carry]:
  """Reads one chunk [B, C] of every row -> (its scores, the carry after it)."""
  features, carry = model.apply(
    params, carry, chunk.inputs, chunk.positions, chunk.segment_ids, plan=plan
  )
  losses, right = token_scores(features, chunk.targets, model.vocabulary_size)
  floor_log2 = 31 - lax.clz(chunk.positions + 1)  # the target is one further than its input
  in_bin = floor_log2[..., None] == jnp.arange(_BINS)[None, None]

  def by_position(values):
    return jnp.sum(jnp.where(in_bin, values[..., None], 0.0), axis=(0, 1))

  weights = chunk.weights
  scores = Scores(by_position(weights * losses), by_position(weights), jnp.sum(weights * right))
  return scores, carry


def cut_carry(carry: Carry, initial: Carry, cut: str | None) -> Carry:
  """The carry with its S5 states ('s5'), 'all' of it or nothing (None) as in `initial`."""
  if cut == 's5':
    return jax.tree.map(
      lambda now, start: start if isinstance(now, Complex) else now,
      carry,
      initial,
      is_leaf=lambda part: isinstance(part, Complex),
    )
  return initial if cut == 'all' else carry


@may_change_on_resume()
@gin.configurable
class Evaluator:
  """Reads a split from its start, in rows and chunks of its own."""

  def __init__(
    self,
    model: Model,
    partitioner: Partitioner,
    feed: Callable[[], TaskFeed],
    batch_size: int,
    chunk_size: int,
    chunks: int | None = None,
  ):
    """Opens the split.

    Args:
      model: the pure functions of the model.
      partitioner: the devices.
      feed: makes the split's feed, which ends (`epochs=1`).
      batch_size: rows that the split is dealt to.
      chunk_size: tokens of one forward call.
      chunks: how many chunks of each row a quick evaluation reads; None reads all.
    """
    self._feed = feed()
    self._chunk_size = chunk_size
    self._whole = -(-self._feed.row_tokens // chunk_size)
    self._quick = min(chunks or self._whole, self._whole)
    self._partitioner = partitioner
    self._batch_size = batch_size
    partitioner.check_batch(batch_size, chunk_size)

    def initial_carry():
      return model.initial_carry(batch_size)

    def read(params, carry, chunk, cut, plan):
      def of_device(params, carry, batch, *_, **__):
        scores, carry = chunk_scores(model, params, carry, batch, plan=plan)
        return (), carry, scores

      carry = cut_carry(carry, initial_carry(), cut)
      size = chunk.inputs.shape[1]
      return spread(of_device, model, params, carry, chunk, chunk_size=size, backwards=False)[1:]

    layout = partitioner.state_shardings({'carry': jax.eval_shape(initial_carry)})['carry']
    self._initial_carry = partitioner.partition(initial_carry, out_shardings=layout)
    self._gather = partitioner.partition(lambda params: gathered(model, params))
    self._read = partitioner.partition(
      read, donate_argnums=1, static_argnums=(3, 4), out_shardings=(layout, None)
    )

  def __call__(
    self,
    params: Params,
    *,
    whole: bool,
    cut: str | None = None,
    plan: bool = True,
    stop: Callable[[], bool] = lambda: False,
  ) -> Metrics:
    """How well the split is predicted.

    Args:
      params: the parameters.
      whole: over the whole split, or over its quick part.
      cut: what of the carry no chunk is given by the one before it: its S5 states ('s5'), or
        'all' of it; what the loss then loses is what that part remembered.
      plan: whether a planner takes part, as the phase of training says.
      stop: asked before each chunk whether to give up.

    Returns:
      loss, bits_per_token, bits_per_byte; accuracy, the share of targets that were the likeliest
      token; loss_by_position/P, the loss of the targets at positions P to 2 P - 1 of a document.

    Raises:
      Preempted: `stop` said so.
    """
    chunks = self._whole if whole else self._quick
    spans = ((n * self._chunk_size, self._chunk_size) for n in range(chunks))
    params = self._gather(params)
    carry, sums = self._initial_carry(), []
    rows = self._partitioner.rows(self._batch_size)
    for chunk in prefetch(self._feed, spans, rows=rows):
      if stop():
        raise Preempted('stopped in the middle of an evaluation, which was given up')
      batch = self._partitioner.place_batch(chunk, self._batch_size)
      carry, of_chunk = self._read(params, carry, batch, cut, plan)
      sums.append(of_chunk)
      jax.block_until_ready(sums[-2:-1])  # two chunks under way, as in training
    scores = jax.tree.map(lambda *parts: np.sum(parts, axis=0, dtype=float), *jax.device_get(sums))
    loss, weight = scores.loss.sum(), scores.weight.sum()
    return {
      **text_metrics(loss, weight, self._feed.tokens_per_byte),
      'accuracy': scores.right / weight if weight else math.nan,
      **position_metrics(scores.loss, scores.weight),
    }


def restored_params(
  model: Model, partitioner: Partitioner, checkpoints: Checkpoints, model_dir: str
) -> tuple[Params, int]:
  """The parameters of a run's newest checkpoint, and its step.

  Raises:
    ConfigurationError: where the run has no checkpoint, or it is of another model.
  """
  abstract, _ = jax.eval_shape(lambda: model.init(jax.random.key(0), 1))
  target: dict[str, Any] = {'params': abstract}
  target = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    target,
    partitioner.state_shardings(target),
  )
  with checkpoints.open(model_dir, read_only=True) as saved:
    step = saved.latest_step()
    restored = saved.restore(target, partial=True)
  if restored is None or step is None:
    raise ConfigurationError(
      f'{model_dir} holds no checkpoint. Train there first, or name the --model_dir of a run.'
    )
  return restored[0]['params'], step


@may_change_on_resume()
@gin.configurable
def evaluate(
  model_dir: str,
  *,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  evaluator: Callable[..., Evaluator],
  checkpoints: Checkpoints,
  cuts: Sequence[str] = (),
) -> None:
  """Evaluates a run's newest checkpoint on the whole validation split, and writes and prints it.

  Args:
    model_dir: the directory of the run.
    model, partitioner, evaluator: the classes of the parts.
    checkpoints: how to open them.
    cuts: parts of the carry, 's5' or 'all', each of which one more evaluation does without; it is
      written to model_dir/eval_cut_NAME.
  """
  for cut in cuts:
    if cut not in CUTS:
      raise ConfigurationError(f'evaluate.cuts names {cut!r}; what can be cut is {CUTS}.')
  functions, layout = language_model.transform(model), partitioner()
  params, step = restored_params(functions, layout, checkpoints, model_dir)
  measure = evaluator(functions, layout)
  found = {}
  for cut in (None, *cuts):
    what = 'validation' if cut is None else f'validation, {cut} carry cut between chunks'
    found[what] = metrics = measure(params, whole=True, cut=cut)
    with create_writers(model_dir, name='eval' if cut is None else f'eval_cut_{cut}') as writer:
      writer.write_scalars(step, metrics)
    if jax.process_index() == 0:
      print(f'step {step}, {what}: ' + ', '.join(describe(metrics)))
  if jax.process_index() == 0:
    plot.write_loss_by_position(pathlib.Path(model_dir), found)
