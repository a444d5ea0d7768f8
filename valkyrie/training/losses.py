"""Logits and next-token cross-entropy of a model's features, in float32.

The logits of many tokens are never held at once: they are computed in slices of time. Where the
backward pass follows at once, training computes the gradient of a slice with its loss, while its
logits are there (`weighted_loss`); otherwise the backward pass computes them a second time.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models import slices
from valkyrie.models.features import Features
from valkyrie.models.precision import matmul, wide
from valkyrie.sharding import split_products
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array

# The logits held at once: 2^27 float32 are 512 MiB. All logits of 8192 tokens of a 50k vocabulary
# are 1.6 GiB, for which GPUs have room: each slice reads and writes the whole gradient of the
# unembedding.
_LOGITS_AT_ONCE = {'gpu': 2**29, 'tpu': 2**27, 'cpu': 2**27}
# The logits that the forward pass keeps for the backward pass, which computes more a second time.
_LOGITS_KEPT = 2**27


class TokenScores(NamedTuple):
  """Losses in nats, whether the target is likeliest, and log Σ exp(logit), [B, T] each."""

  loss: Array
  right: Array
  log_normalizer: Array


class WeightedSums(NamedTuple):
  """Float32 sums of weighted losses, in nats, and of squared logarithms of the normalizers."""

  loss: Array
  squares: Array


def logits(features: Features, vocabulary_size: int) -> Array:
  """The logits [B, T, V] float32; -1e30 at the padding of the vocabulary."""
  dtype = wide(features.hidden.dtype)

  def unembed(hidden, unembedding):
    return matmul(hidden, unembedding.T, dtype)

  scores = split_products.split_product(
    unembed, features.hidden, features.unembedding, ('vocabulary', 'embed'), inputs=1
  )
  tokens = jnp.arange(scores.shape[-1])
  exists = tokens < vocabulary_size
  return jnp.where(exists[None, None], scores, -1e30)


def token_scores(features: Features, targets: Array, vocabulary_size: int) -> TokenScores:
  """The scores of the predictions of targets [B, T]."""
  score = functools.partial(_scores_at_once, vocabulary_size=vocabulary_size)
  return in_slices(score, features, targets)


def _scores_at_once(features: Features, targets: Array, vocabulary_size: int) -> TokenScores:
  """`token_scores`, with the logits of all tokens."""
  scores = logits(features, vocabulary_size)
  # Selected, since the gradient of a lookup is a scatter, which XLA fuses with nothing.
  tokens = jnp.arange(scores.shape[-1])
  is_target = tokens[None, None] == targets[..., None]
  of_target = jnp.where(is_target, scores, 0)
  target_scores = jnp.sum(of_target, axis=-1)
  if platform() == 'gpu':
    log_normalizer = _log_sum_exp_at_once(scores)
  else:
    log_normalizer = jax.nn.logsumexp(scores, axis=-1)
  loss = log_normalizer - target_scores
  likeliest = jnp.argmax(scores, axis=-1)
  right = likeliest == targets
  return TokenScores(loss, right, log_normalizer)


@jax.custom_jvp
def _log_sum_exp_at_once(scores: Array) -> Array:
  """log Σ exp(score) of the last axis, by one pass over the scores.

  A sum goes with its largest term so far (Milakov & Gimelshein 2018, algorithm 3). Otherwise a GPU
  reads the scores for the largest of all, and again for the sum.
  """

  def join(first, second):
    largest = jnp.maximum(first[0], second[0])
    first_sum = first[1] * jnp.exp(first[0] - largest)
    second_sum = second[1] * jnp.exp(second[0] - largest)
    return largest, first_sum + second_sum

  lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
  zero = jnp.zeros_like(lowest)
  terms = (scores, jnp.ones_like(scores))
  largest, total = lax.reduce(terms, (lowest, zero), join, (scores.ndim - 1,))
  return largest + jnp.log(total)


@_log_sum_exp_at_once.defjvp
def _log_sum_exp_at_once_jvp(scores, changes):
  (scores,) = scores
  (change,) = changes
  log_sum = _log_sum_exp_at_once(scores)
  probabilities = jnp.exp(scores - log_sum[..., None])
  return log_sum, jnp.sum(probabilities * change, axis=-1)


def divergences(
  target: Features,
  features: Features,
  vocabulary_size: int,
  temperature: float = 1.0,
  top_k: int | None = None,
) -> Array:
  """KL(p || q) of the next tokens in nats, [B, T], p by the target and q by the features.

  Logits are divided by the temperature. Only the `top_k` likeliest tokens by p are told apart, and
  all others are one outcome; None tells all apart. No gradient reaches the target.
  """
  target = jax.tree.map(lax.stop_gradient, target)

  def log_probabilities(features):
    scores = logits(features, vocabulary_size) / temperature
    return jax.nn.log_softmax(scores)

  def divergence(features, target_hidden):
    p = log_probabilities(Features(target_hidden, target.unembedding))
    q = log_probabilities(features)
    if top_k is not None and top_k < vocabulary_size:
      _, likeliest = lax.top_k(p, top_k)
      p = _with_rest(p, likeliest)
      q = _with_rest(q, likeliest)
    terms = jnp.exp(p) * (p - q)
    return jnp.sum(terms, axis=-1)

  return in_slices(divergence, features, target.hidden)


def _with_rest(logs: Array, chosen: Array) -> Array:
  """Logarithms of probabilities: of the chosen tokens [..., k], then of all others as one."""
  rest = jnp.put_along_axis(logs, chosen, -1e30, axis=-1, inplace=False)
  whole = jax.nn.logsumexp(rest, axis=-1, keepdims=True)
  kept = jnp.take_along_axis(logs, chosen, axis=-1)
  return jnp.concatenate([kept, whole], axis=-1)


def in_slices(function: Callable[..., Any], features: Features, *arrays: Array) -> Any:
  """A function that needs logits, called with slices of time whose logits fit into memory.

  The backward pass computes the logits of each slice again.

  Args:
    function: (the features of a slice, the slice [B, S, ...] of each array) -> leaves [B, S, ...].
      It computes its logits by `logits`.
    features: a model's features of all tokens, [B, T, D].
    arrays: what else the function reads of each token, such as targets, [B, T, ...].

  Returns:
    The results of all slices, joined over time: leaves [B, T, ...].
  """

  def of_slice(inputs):
    hidden, *parts = inputs
    return function(Features(hidden, features.unembedding), *parts)

  inputs = (features.hidden, *arrays)
  if _logits_per_device(features) <= _LOGITS_KEPT:
    return of_slice(inputs)
  size = _slice_length(features)
  time = features.hidden.shape[1]
  cut_inputs = jax.tree.map(lambda x: slices.cut(x, size), inputs)
  results = lax.map(jax.checkpoint(of_slice), cut_inputs)
  return jax.tree.map(lambda part: slices.join(part, time), results)


def weighted_loss(
  features: Features,
  targets: Array,
  weights: Array,
  vocabulary_size: int,
  total: Array | float,
  *,
  z_loss: float = 0.0,
  in_one_pass: bool = False,
) -> tuple[Array, WeightedSums]:
  """The loss from which a model learns, and the sums in it, which have no gradient.

  The loss is (loss + z_loss x squares) / total, see `WeightedSums`.

  Args:
    features: a model's features; targets: [B, T]; weights: [B, T] float32, without a gradient.
    vocabulary_size: V without padding.
    total: the weight of all tokens of a step, a scalar.
    in_one_pass: compute the gradient of each slice with its loss. The gradient of the unembedding,
      [V, D] float32, is then held from the forward pass to the backward pass.
  """

  def compute(
    score,
    hidden,
    unembedding,
    targets,
    weights,
    total,
  ):
    scores = score(Features(hidden, unembedding), targets, vocabulary_size)
    loss = jnp.sum(weights * scores.loss)
    squared_logs = jnp.square(scores.log_normalizer)
    squares = jnp.sum(weights * squared_logs)
    sums = WeightedSums(loss, squares)
    if z_loss:
      loss = loss + z_loss * squares
    return loss / total, lax.stop_gradient(sums)

  arguments = (features.hidden, features.unembedding, targets, weights, total)
  if not in_one_pass:
    return compute(token_scores, *arguments)
  size = _slice_length(features)
  time = features.hidden.shape[1]
  if size == time:
    return compute(_scores_at_once, *arguments)

  def with_gradient(
    hidden,
    unembedding,
    targets,
    weights,
    total,
  ):
    def slice_with_gradient(so_far, inputs):
      hidden, targets, weights = inputs

      def loss_of_slice(hidden, unembedding):
        return compute(_scores_at_once, hidden, unembedding, targets, weights, total)

      loss, pull_back, sums = jax.vjp(loss_of_slice, hidden, wide_unembedding, has_aux=True)
      d_hidden, d_unembedding = pull_back(jnp.ones_like(loss))
      so_far = so_far + d_unembedding
      results = (loss, sums)
      return so_far, (d_hidden, results)

    # Wide, so that the gradient of a slice is not rounded.
    wide_unembedding = unembedding.astype(wide(unembedding.dtype))
    zeros = jnp.zeros_like(wide_unembedding)
    inputs = tuple(slices.cut(x, size) for x in (hidden, targets, weights))
    d_unembedding, of_slices = lax.scan(slice_with_gradient, zeros, inputs)
    d_hidden, results = of_slices
    d_hidden = slices.join(d_hidden, time)
    d_unembedding = d_unembedding.astype(unembedding.dtype)
    totals = jax.tree.map(jnp.sum, results)
    return totals, (d_hidden, d_unembedding)

  def pull_back(gradients, cotangents):
    factor, _ = cotangents
    d_hidden, d_unembedding = gradients
    d_hidden = d_hidden * factor.astype(d_hidden.dtype)
    d_unembedding = d_unembedding * factor.astype(d_unembedding.dtype)
    return d_hidden, d_unembedding, None, None, None

  learned = jax.custom_vjp(functools.partial(compute, token_scores))
  learned.defvjp(with_gradient, pull_back)
  return learned(*arguments)


def _slice_length(features: Features) -> int:
  """The tokens of a row whose logits are held at once."""
  time = features.hidden.shape[1]
  slices_needed = -(-_logits_per_device(features) // _LOGITS_AT_ONCE[platform()])
  count = min(time, slices_needed)
  return -(-time // count)


def _logits_per_device(features: Features) -> int:
  batch, time, _ = features.hidden.shape
  logits = batch * time * len(features.unembedding)
  return -(-logits // split_products.devices())
