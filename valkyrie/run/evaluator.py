"""Evaluation of a split: the chunks and carries of training, without gradients."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import functools
import json
import math
import pathlib
from typing import Any, NamedTuple, Protocol

import chex
import gin
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie import edges, foreign
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import PositiveInt
from valkyrie.data.mixture import mean_tokens_per_byte
from valkyrie.data.read_ahead import prefetch
from valkyrie.errors import ConfigurationError, Preempted
from valkyrie.models.carry_cuts import cut_carry
from valkyrie.models.model import Model
from valkyrie.monitoring.metrics import Metrics, position_metrics, text_metrics
from valkyrie.monitoring.patience import PATIENCE, may_pass_when_opened, patiently, tell
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.training.data_parallel import gather_params, shard_map_step
from valkyrie.training.losses import TokenScores, token_scores
from valkyrie.training.objective import Terms, visit
from valkyrie.training.setup import check_documents, check_feed
from valkyrie.types import Array, Batch, Carry, Params, TaskFeed

_BINS = 31  # powers of two below the largest int32 position


class TokenMetric(Protocol):
  """A user-defined metric: a named function that returns a value and a weight for each target."""

  __name__: str

  def __call__(self, scores: TokenScores, chunk: Batch) -> tuple[Array, Array]:
    """The values and the weights of the targets, [B, C] each, from their scores."""
    ...


class Scores(NamedTuple):
  """Sums over tokens, float32: they add up over chunks.

  loss, weight: [_BINS], the weighted nats and the weight of the targets at the positions 2^k to
    2^(k+1) - 1 of their document; position 0, a document's first token, is never a target.
  right: the weight of the targets with the largest logit.
  metrics: {name: (weighted values, their weight)} of the user's metrics.
  terms: {name of a term: its sums}.
  """

  loss: Array
  weight: Array
  right: Array
  metrics: dict[str, tuple[Array, Array]]
  terms: dict[str, Mapping[str, Array]]


def chunk_scores(
  model: Model,
  params: Params,
  carry: Carry,
  chunk: Batch,
  *,
  metrics: Sequence[TokenMetric] = (),
  terms: Terms = (),
) -> tuple[Scores, Carry]:
  """Reads one chunk [B, C] of every row -> (its scores, the carry after it)."""
  features, carry, parts = visit(terms, model, params, carry, chunk)
  tokens = token_scores(features, chunk.targets, model.about.vocabulary_size)
  floor_log2 = 31 - lax.clz(chunk.positions + 1)  # a target is one position after its input
  bins = jnp.arange(_BINS)
  in_bin = floor_log2[..., None] == bins[None, None]

  def by_position(values):
    values_in_bin = jnp.where(in_bin, values[..., None], 0.0)
    return jnp.sum(values_in_bin, axis=(0, 1))

  weights = chunk.weights
  loss = by_position(weights * tokens.loss)
  right = jnp.sum(weights * tokens.right)
  users = {metric.__name__: _sums(metric, tokens, chunk) for metric in metrics}
  terms_sums = {name: part.sums for name, part in parts.items()}
  weight = by_position(weights)
  scores = Scores(loss, weight, right, users, terms_sums)
  return scores, carry


def _sums(metric: TokenMetric, scores: TokenScores, chunk: Batch) -> tuple[Array, Array]:
  """The sum of the weighted values of a metric, and of their weights."""
  returned: Any = metric(scores, chunk)
  shape = chunk.targets.shape

  def message() -> str:
    shapes = jax.tree.map(jnp.shape, returned)
    return f'Evaluator.metrics has {metric.__name__}, which returned {shapes}'

  expected = f'It has to return a pair: the values and the weights of the targets, {shape} each.'
  with edges.asserted(message, expected):
    chex.assert_shape(returned, [shape, shape])
  values, weights = returned
  weighted = jnp.sum(values * weights, dtype=jnp.float32)
  weight = jnp.sum(weights, dtype=jnp.float32)
  return weighted, weight


@may_change_on_resume()
@gin.configurable(denylist=['model', 'partitioner', 'terms'])  # pyright: ignore  (gin has no types)
class Evaluator:
  """Reads a split, whose tokenizer is `vocabulary`, with rows and chunks of its own."""

  def __init__(
    self,
    model: Model,
    partitioner: Partitioner,
    feed: Callable[[], TaskFeed],
    batch_size: PositiveInt,
    chunk_size: PositiveInt,
    chunks: PositiveInt | None = None,
    metrics: Sequence[TokenMetric] = (),
    terms: Terms = (),
  ):
    """Configures the evaluation; `open`, or the first call, opens the split.

    Args:
      feed: the class of the split's feed, which ends (`epochs=1`).
      batch_size, chunk_size: rows of the feed, and tokens of one forward call.
      chunks: chunks of each row that a quick evaluation reads, or more up to one with a target;
        None reads all.
      terms: of `objective.evaluations`.
    """
    tokens = feed()
    check_feed(model, tokens, batch_size)
    self.vocabulary = tokens.vocabulary
    # A mixture is evaluated source by source.
    self.sources: Mapping[str, TaskFeed] = getattr(tokens, 'sources', {'': tokens})
    self._weights: Mapping[str, float] = getattr(tokens, 'weights', {'': 1.0})
    self.chunk_size = chunk_size
    self._quick = chunks
    names = [metric.__name__ for metric in metrics]
    for name in names:
      if names.count(name) > 1:
        raise ConfigurationError(
          f'Evaluator.metrics has {names.count(name)} functions with the name {name!r}, and a log '
          'can have one. Give each a name of its own.'
        )
    for term in terms:
      model = term.extended(model)
    self.model = model
    self._partitioner = partitioner
    self._terms = terms
    self.batch_size = batch_size
    partitioner.check_batch(batch_size, chunk_size, owner='Evaluator.', feed='validation/TaskFeed')

    def initial_carry():
      return model.initial_carry(batch_size)

    def read(params, carry, chunk, cut):
      def of_device(
        params,
        carry,
        batch,
        *_,
        **__,
      ):
        measured = () if cut else terms  # they measure the whole memory
        scores, carry = chunk_scores(model, params, carry, batch, metrics=metrics, terms=measured)
        return (), carry, scores

      if cut:
        empty = initial_carry()
        model_carry = cut_carry(carry['model'], empty['model'], cut)
        carry = {**carry, 'model': model_carry}
      size = chunk.inputs.shape[1]
      _, carry, scores = shard_map_step(
        of_device,
        model,
        params,
        carry,
        chunk,
        chunk_size=size,
        learns=None,
      )
      return carry, scores

    shapes = jax.eval_shape(initial_carry)
    axes = model.carry_axes(shapes)
    shardings = partitioner.shardings(shapes, axes)
    self._initial_carry = partitioner.jit(initial_carry, out_shardings=shardings)
    self._gather = partitioner.jit(lambda params: gather_params(model, params))
    self._read = partitioner.jit(
      read,
      donate_argnums=1,
      static_argnums=3,
      out_shardings=(shardings, None),
    )

  def open(self) -> None:
    """Opens the stores of the split, and builds those that are missing.

    Raises a DataError if the model cannot read the longest document.
    """
    for feed in self.sources.values():
      check_documents(self.model, feed)
      if self._quick is not None:  # prompts may fill it, and a loss without a target is none
        first = self._first_chunk_with_target(feed)
        self._quick = max(self._quick, first + 1)

  def _first_chunk_with_target(self, feed: TaskFeed) -> int:
    """The number of the first chunk in which a row has a target; 0 if none has."""
    for number, (position, length) in enumerate(self.spans(feed, whole=True)):
      chunk = feed.read(position, length)
      if chunk.weights.any():
        return number
    return 0

  def record_data(
    self,
    model_dir: str,
    stream: str,
    *,
    may_differ: bool,
    patience: float = PATIENCE,
    say: Callable[[str], None] = tell,
  ) -> None:
    """Writes the fingerprint of each source's store to model_dir/STREAM/data.json.

    Raises a ConfigurationError if the stream has evaluations of other data, unless it `may_differ`,
    and a StorageError if the file system refuses the file for longer than the patience.
    """
    path = pathlib.Path(model_dir, stream, 'data.json')
    fingerprints = {name: feed.fingerprint for name, feed in self.sources.items()}
    recorded = fingerprints
    with contextlib.suppress(OSError, ValueError):
      content = foreign.content(path)
      recorded = foreign.json_value(content)
    if recorded != fingerprints and not may_differ:
      raise ConfigurationError(
        f'{model_dir}/{stream} has evaluations of other data, which numbers of these would be '
        'mixed with. Give this data a name of its own, such as --gin.evaluate.name=\'"mine"\': its '
        'numbers then go to eval_mine and loss_by_position_mine.png.'
      )
    if jax.process_index() == 0:
      text = json.dumps(fingerprints)
      write = functools.partial(whole_file.write, path, f'{text}\n')
      patiently(write, patience, say, passes=may_pass_when_opened)

  def spans(self, feed: TaskFeed, whole: bool) -> list[tuple[int, int]]:
    """(position, length) of the chunks of a source, or of its quick part."""
    count = -(-feed.row_tokens // self.chunk_size)  # of the longest row
    spans = []
    for number in range(count):
      position = number * self.chunk_size
      spans.append((position, self.chunk_size))
    if whole:
      return spans
    return spans[: self._quick]

  def __call__(
    self,
    params: Params,
    *,
    whole: bool,
    cut: str | None = None,
    stop: Callable[[], bool] = lambda: False,
  ) -> Metrics:
    """Evaluates the parameters on the split.

    Args:
      whole: read the whole split, or its quick part.
      cut: the part of the carry that is reset before every chunk: 'state' for the recurrent states,
        or 'all'. The increase of the loss shows the use of that memory.
      stop: called before each chunk; True abandons the evaluation by Preempted.

    Returns:
      what `text_metrics` returns; accuracy, the share of targets with the largest logit;
      loss_by_position/P and targets_by_position/P, the loss and the number of the targets at
      positions P to 2 P - 1 of a document; metrics/NAME, a user-defined metric; what terms report;
      for the whole split also quick_loss and quick_bits_per_byte, of its quick part. For a mixture
      these are means by its weights, and loss/NAME and others are the metrics of each source.
    """
    params = self._gather(self.model.own(params))
    rows = self._partitioner.local_rows(self.batch_size)

    def scores(feed: TaskFeed) -> list[Scores]:
      """The scores of the chunks of a feed, on the host."""
      carry = self._initial_carry()
      chunk_scores = []
      spans = self.spans(feed, whole)
      for chunk in prefetch(feed, spans, rows=rows):
        if stop():
          raise Preempted('stopped during an evaluation, which was abandoned')
        batch = self._partitioner.place_batch(chunk, self.batch_size)
        carry, latest = self._read(params, carry, batch, cut)
        chunk_scores.append(latest)
        before_latest = chunk_scores[-2:-1]
        chunk_scores[-2:-1] = jax.device_get(before_latest)  # two chunks in flight, as in training
      return jax.device_get(chunk_scores)

    chunks = {name: scores(feed) for name, feed in self.sources.items()}
    quick_sums = {}
    for name, parts in chunks.items():
      quick_parts = parts[: self._quick]
      quick_sums[name] = _sum(quick_parts)
    quick = self._metrics(quick_sums)
    if not whole:
      return quick
    sums = {name: _sum(parts) for name, parts in chunks.items()}
    metrics = self._metrics(sums)
    if self._quick is not None:
      for name in ('loss', 'bits_per_byte'):
        metrics[f'quick_{name}'] = quick[name]
    return metrics

  def _metrics(self, scores: Mapping[str, Scores]) -> Metrics:
    """The metrics of the sums of each source."""
    # The ratio of the whole split, also for its quick part: a store knows only the bytes of all.
    ratios = {name: feed.tokens_per_byte for name, feed in self.sources.items()}
    if len(scores) == 1:
      ((name, only),) = scores.items()
      metrics = _metrics(only, ratios[name])
      return self._with_terms(metrics, only)
    shares = []
    for name in scores:
      weight = scores[name].weight.sum()
      shares.append(self._weights[name] / weight)

    def weighted(*parts):
      weighted_parts = zip(shares, parts, strict=True)
      return sum(share * part for share, part in weighted_parts if share)

    mean = jax.tree.map(weighted, *scores.values())
    ratio = mean_tokens_per_byte(self._weights, ratios)
    metrics = _metrics(mean, ratio)
    metrics = self._with_terms(metrics, mean)
    targets = [float(source.weight.sum()) for source in scores.values()]
    metrics['targets'] = sum(targets)
    for name, source in scores.items():
      for metric, value in _metrics(source, ratios[name]).items():
        if '_by_position/' not in metric:
          metrics[f'{metric}/{name}'] = value
    return metrics

  def _with_terms(self, metrics: Metrics, scores: Any) -> Metrics:
    """The metrics and those of terms; raises a ConfigurationError if two have one name."""
    found = dict(metrics)
    for term in self._terms:
      if term.name in scores.terms:
        of_term = term.metrics(self.model, scores.terms[term.name])
        for name in of_term:
          if name in found:
            raise ConfigurationError(
              f'{term.name}.metrics returned {name!r}, which an evaluation has already. Return it '
              f'under another name, such as {f"{term.name}/{name}"!r}.'
            )
        found |= of_term
    return found


def _sum(parts: Sequence[Scores]) -> Scores:
  """The sum of the scores of chunks, float64."""

  def total(*leaves):
    return np.sum(leaves, axis=0, dtype=float)

  return jax.tree.map(total, *parts)


def _metrics(scores: Any, tokens_per_byte: float | None) -> Metrics:
  loss = float(scores.loss.sum())
  weight = float(scores.weight.sum())
  metrics = text_metrics(loss, weight, tokens_per_byte)
  metrics['accuracy'] = _mean(scores.right, scores.weight.sum())
  for name, (total, total_weight) in scores.metrics.items():
    metrics[f'metrics/{name}'] = _mean(total, total_weight)
  metrics |= position_metrics(scores.loss, scores.weight)
  return metrics


def _mean(total: Any, weight: Any) -> float:
  """The mean from a weighted sum and its weight; NaN without a weight."""
  if not weight:
    return math.nan
  return float(total / weight)
