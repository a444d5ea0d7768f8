"""Evaluation of a split: the chunks and carries of training, without gradients."""

from collections.abc import Callable
import math
from typing import NamedTuple

import gin
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.computation import may_change_on_resume
from valkyrie.data.prefetch import prefetch
from valkyrie.errors import Preempted
from valkyrie.models.attention.kv_cache import AttentionCarry
from valkyrie.models.language_model import Model
from valkyrie.models.recurrence.convolution import Tail
from valkyrie.monitoring.metrics import Metrics, position_metrics, text_metrics
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.data_parallel import gather_params, shard_map_step
from valkyrie.training.losses import token_scores
from valkyrie.training.setup import check_vocabulary
from valkyrie.types import Array, Batch, Carry, Params, TaskFeed

# The parts of the carry that an evaluation can cut between chunks.
CUTS = ('state', 'all')
_BINS = 31  # powers of two below the largest int32 position


class Scores(NamedTuple):
  """Sums over tokens, float32: they add up over chunks.

  loss, weight: [_BINS], the weighted nats and the weight of the targets at the positions 2^k to
    2^(k+1) - 1 of their document; position 0, a document's first token, is never a target.
  right: the weight of the targets with the largest logit.
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
  losses, right = token_scores(features, chunk.targets, model.about.vocabulary_size)
  floor_log2 = 31 - lax.clz(chunk.positions + 1)  # a target is one position after its input
  in_bin = floor_log2[..., None] == jnp.arange(_BINS)[None, None]

  def by_position(values):
    return jnp.sum(jnp.where(in_bin, values[..., None], 0.0), axis=(0, 1))

  weights = chunk.weights
  scores = Scores(by_position(weights * losses), by_position(weights), jnp.sum(weights * right))
  return scores, carry


def cut_carry(carry: Carry, initial: Carry, cut: str | None) -> Carry:
  """The carry with its recurrent 'state', 'all' of it or none of it (None) reset to `initial`.

  The caches of attention and the tails of convolutions stay with 'state': they hold a bounded
  number of tokens. A planner's carry is reset with the states of the layers.
  """

  def holds_tokens(part: Carry) -> bool:
    return isinstance(part, AttentionCarry | Tail)

  if cut == 'state':
    return jax.tree.map(
      lambda now, start: now if holds_tokens(now) else start, carry, initial, is_leaf=holds_tokens
    )
  return initial if cut == 'all' else carry


@may_change_on_resume()
@gin.configurable
class Evaluator:
  """Reads a split from its start, with rows and chunks of its own.

  Attributes:
    vocabulary: that of the split.
  """

  def __init__(
    self,
    model: Model,
    partitioner: Partitioner,
    feed: Callable[[], TaskFeed],
    batch_size: int,
    chunk_size: int,
    chunks: int | None = None,
  ):
    """Configures the evaluation; `open`, or the first call, opens the split.

    Args:
      model: the pure functions of the model.
      partitioner: the mesh.
      feed: the class of the split's feed, which ends (`epochs=1`).
      batch_size: rows of the split.
      chunk_size: tokens of one forward call.
      chunks: chunks of each row that a quick evaluation reads; None reads all.
    """
    self._feed = feed()
    check_vocabulary(model, self._feed)
    self.vocabulary = self._feed.vocabulary
    self._chunk_size = chunk_size
    self._quick = chunks
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
      return shard_map_step(
        of_device, model, params, carry, chunk, chunk_size=size, backward=False
      )[1:]

    shapes = jax.eval_shape(initial_carry)
    shardings = partitioner.shardings(shapes, model.carry_axes(shapes))
    self._initial_carry = partitioner.jit(initial_carry, out_shardings=shardings)
    self._gather = partitioner.jit(lambda params: gather_params(model, params))
    self._read = partitioner.jit(
      read, donate_argnums=1, static_argnums=(3, 4), out_shardings=(shardings, None)
    )

  def open(self) -> int:
    """Opens the split's store, and builds it if it is missing -> the chunks of its longest row."""
    return -(-self._feed.row_tokens // self._chunk_size)

  def __call__(
    self,
    params: Params,
    *,
    whole: bool,
    cut: str | None = None,
    plan: bool = True,
    stop: Callable[[], bool] = lambda: False,
  ) -> Metrics:
    """Evaluates the parameters on the split.

    Args:
      params: the parameters.
      whole: read the whole split, or its quick part.
      cut: the part of the carry that is reset before every chunk: 'state' for the recurrent states,
        or 'all'. The increase of the loss shows the use of that memory.
      plan: whether a planner takes part, as in the phase of training.
      stop: called before each chunk; True abandons the evaluation.

    Returns:
      loss, bits_per_token, bits_per_byte; accuracy, the share of targets with the largest logit;
      loss_by_position/P, the loss of the targets at positions P to 2 P - 1 of a document.

    Raises:
      Preempted: `stop` returned True.
    """
    chunks = self.open()
    if not whole:
      chunks = min(self._quick or chunks, chunks)
    spans = ((n * self._chunk_size, self._chunk_size) for n in range(chunks))
    params = self._gather(params)
    carry, sums = self._initial_carry(), []
    rows = self._partitioner.local_rows(self._batch_size)
    for chunk in prefetch(self._feed, spans, rows=rows):
      if stop():
        raise Preempted('stopped during an evaluation, which was abandoned')
      batch = self._partitioner.place_batch(chunk, self._batch_size)
      carry, scores = self._read(params, carry, batch, cut, plan)
      sums.append(scores)
      jax.block_until_ready(sums[-2:-1])  # two chunks in flight, as in training
    total = jax.tree.map(lambda *parts: np.sum(parts, axis=0, dtype=float), *jax.device_get(sums))
    loss, weight = total.loss.sum(), total.weight.sum()
    return {
      **text_metrics(loss, weight, self._feed.tokens_per_byte),
      'accuracy': total.right / weight if weight else math.nan,
      **position_metrics(total.loss, total.weight),
    }
