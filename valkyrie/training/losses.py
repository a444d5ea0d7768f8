"""Logits and next-token cross-entropy of a model's features, in float32.

Of many tokens the logits never stand whole: they are computed in slices of time. Training computes
the gradient of a slice with its loss, while its logits are there (`weighted_loss`), where the
backward pass follows at once; otherwise the backward pass computes them a second time.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models import slices
from valkyrie.models.features import Features
from valkyrie.models.layers import matmul
from valkyrie.sharding import split_products
from valkyrie.types import Array

# The logits held at once; the loss of more is computed in slices of time. 2^25 float32 are 128 MiB,
# all logits of 8192 tokens of a 50k vocabulary would be 1.6 GiB.
_LOGITS_AT_ONCE = 2**25


class TokenScores(NamedTuple):
  """What a prediction is worth, [B, T] each.

  loss: -log p(target) in nats, float32.
  right: whether the target has the largest logit, bool.
  log_normalizer: the logarithm of the sum of exp(logit), float32.
  """

  loss: Array
  right: Array
  log_normalizer: Array


class WeightedSums(NamedTuple):
  """Sums over tokens by their weights, float32 scalars.

  loss: of the losses, in nats; squares: of the squared logarithms of the normalizers.
  """

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


def token_losses(features: Features, targets: Array, vocabulary_size: int) -> Array:
  """-log p(target) in nats, float32 [B, T]."""
  return token_scores(features, targets, vocabulary_size).loss


def token_scores(features: Features, targets: Array, vocabulary_size: int) -> TokenScores:
  """The scores of the predictions of targets [B, T]."""
  time = features.hidden.shape[1]

  def of_slice(hidden, targets):
    scores = logits(Features(hidden, features.unembedding), vocabulary_size)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    log_normalizer = jax.nn.logsumexp(scores, axis=-1)
    right = jnp.argmax(scores, axis=-1) == targets
    return TokenScores(log_normalizer - picked, right, log_normalizer)

  size = _slice_length(features)
  if size >= time:
    return of_slice(features.hidden, targets)

  scores = lax.map(
    jax.checkpoint(lambda now: of_slice(*now)),
    (slices.cut(features.hidden, size), slices.cut(targets, size)),
  )
  return TokenScores(*(slices.join(part, time) for part in scores))


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
  """The loss of predictions, with which a model learns, and the sums in it.

  Args:
    features: of a model; targets: [B, T]; weights: [B, T] float32, without a gradient.
    vocabulary_size: V without padding.
    total: the weight of all tokens of a step, a scalar.
    z_loss: the factor of `WeightedSums.squares`.
    in_one_pass: compute the gradient of each slice with its loss. The gradient of the unembedding,
      [V, D] float32, is then held from the forward pass to the backward pass.

  Returns:
    ((loss + z_loss x squares) / total, the sums, which have no gradient).
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
  size, time = _slice_length(features), features.hidden.shape[1]
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
  """The tokens of a row whose logits stand at once."""
  batch, time, _ = features.hidden.shape
  logits = batch * time * features.unembedding.shape[0]
  slices_needed = -(-logits // (_LOGITS_AT_ONCE * split_products.devices()))
  return -(-time // min(time, slices_needed))
