"""Logits and next-token cross-entropy of a model's features, in float32.

The logits of many tokens are never held at once: they are computed in slices of time. Where the
backward pass follows at once, training computes the gradient of a slice with its loss, while its
logits are there (`weighted_loss`); otherwise the backward pass computes them a second time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models import slices
from valkyrie.models.features import Features
from valkyrie.models.precision import matmul
from valkyrie.sharding import split_products
from valkyrie.types import Array

# The logits held at once. 2^25 float32 are 128 MiB; all logits of 8192 tokens of a 50k vocabulary
# would be 1.6 GiB.
_LOGITS_AT_ONCE = 2**25


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
  wide = jnp.promote_types(features.hidden.dtype, jnp.float32)

  def unembed(hidden, unembedding):
    return matmul(hidden, unembedding.T, wide)

  scores = split_products.split_product(
    unembed, features.hidden, features.unembedding, ('vocabulary', 'embed'), inputs=1
  )
  exists = jnp.arange(scores.shape[-1]) < vocabulary_size
  return jnp.where(exists[None, None], scores, -1e30)


def token_scores(features: Features, targets: Array, vocabulary_size: int) -> TokenScores:
  """The scores of the predictions of targets [B, T]."""

  def of_slice(hidden, targets):
    scores = logits(Features(hidden, features.unembedding), vocabulary_size)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    log_normalizer = jax.nn.logsumexp(scores, axis=-1)
    right = jnp.argmax(scores, axis=-1) == targets
    return TokenScores(log_normalizer - picked, right, log_normalizer)

  return _in_slices(of_slice, features, features.hidden, targets)


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

  def log_probabilities(hidden, of):
    return jax.nn.log_softmax(
      logits(Features(hidden, of.unembedding), vocabulary_size) / temperature
    )

  def of_slice(hidden, others):
    p = log_probabilities(others, target)
    q = log_probabilities(hidden, features)
    if top_k is not None and top_k < vocabulary_size:
      likeliest = lax.top_k(p, top_k)[1]
      p = _with_rest(p, likeliest)
      q = _with_rest(q, likeliest)
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)

  return _in_slices(of_slice, features, features.hidden, target.hidden)


def _with_rest(logs: Array, chosen: Array) -> Array:
  """Logarithms of probabilities: of the chosen tokens [..., k], then of all others as one."""
  rest = jnp.put_along_axis(logs, chosen, -1e30, axis=-1, inplace=False)
  whole = jax.nn.logsumexp(rest, axis=-1, keepdims=True)
  return jnp.concatenate([jnp.take_along_axis(logs, chosen, axis=-1), whole], axis=-1)


def _in_slices(of_slice: Callable, features: Features, *arguments: Array) -> Any:
  """A function of activations [B, T, ...] in slices of time, whose logits fit into memory."""
  size = _slice_length(features)
  time = features.hidden.shape[1]
  if size >= time:
    return of_slice(*arguments)
  found = lax.map(
    jax.checkpoint(lambda now: of_slice(*now)), tuple(slices.cut(x, size) for x in arguments)
  )
  return jax.tree.map(lambda part: slices.join(part, time), found)


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

  def of(hidden, unembedding, targets, weights, total):
    scores = token_scores(Features(hidden, unembedding), targets, vocabulary_size)
    sums = WeightedSums(
      loss=jnp.sum(weights * scores.loss),
      squares=jnp.sum(weights * jnp.square(scores.log_normalizer)),
    )
    loss = sums.loss + z_loss * sums.squares if z_loss else sums.loss
    return loss / total, lax.stop_gradient(sums)

  arguments = (features.hidden, features.unembedding, targets, weights, total)
  size = _slice_length(features)
  time = features.hidden.shape[1]
  if size >= time or not in_one_pass:
    return of(*arguments)

  def with_gradient(hidden, unembedding, targets, weights, total):
    def of_slice(so_far, now):
      hidden, targets, weights = now
      loss, pull_back, sums = jax.vjp(
        lambda h, u: of(h, u, targets, weights, total), hidden, unembedding, has_aux=True
      )
      d_hidden, d_unembedding = pull_back(jnp.ones_like(loss))
      return so_far + d_unembedding.astype(so_far.dtype), (d_hidden, (loss, sums))

    wide = jnp.promote_types(unembedding.dtype, jnp.float32)
    d_unembedding, (d_hidden, out) = lax.scan(
      of_slice,
      jnp.zeros(unembedding.shape, wide),
      tuple(slices.cut(x, size) for x in (hidden, targets, weights)),
    )
    d_unembedding = d_unembedding.astype(unembedding.dtype)
    return jax.tree.map(jnp.sum, out), (slices.join(d_hidden, time), d_unembedding)

  def pull_back(gradients, cotangents):
    factor = cotangents[0]
    return *(gradient * factor.astype(gradient.dtype) for gradient in gradients), None, None, None

  learned = jax.custom_vjp(of)
  learned.defvjp(with_gradient, pull_back)
  return learned(*arguments)


def _slice_length(features: Features) -> int:
  """The tokens of a row whose logits are held at once."""
  batch, time, _ = features.hidden.shape
  logits = batch * time * features.unembedding.shape[0]
  slices_needed = -(-logits // (_LOGITS_AT_ONCE * split_products.devices()))
  return -(-time // min(time, slices_needed))
