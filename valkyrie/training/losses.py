"""Logits and next-token cross-entropy of a model's features, in float32."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models import slices
from valkyrie.models.features import Features
from valkyrie.models.layers import matmul
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


def logits(features: Features, vocabulary_size: int) -> Array:
  """The logits [B, T, V] float32; -1e30 at the padding of the vocabulary."""
  wide = jnp.promote_types(features.hidden.dtype, jnp.float32)
  scores = matmul(features.hidden, features.unembedding.T, wide)
  exists = jnp.arange(scores.shape[-1]) < vocabulary_size
  return jnp.where(exists[None, None], scores, -1e30)


def token_losses(features: Features, targets: Array, vocabulary_size: int) -> Array:
  """-log p(target) in nats, float32 [B, T]."""
  return token_scores(features, targets, vocabulary_size).loss


def token_scores(features: Features, targets: Array, vocabulary_size: int) -> TokenScores:
  """The scores of the predictions of targets [B, T]."""
  batch, time, _ = features.hidden.shape

  def of_slice(hidden, targets):
    scores = logits(Features(hidden, features.unembedding), vocabulary_size)
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    log_normalizer = jax.nn.logsumexp(scores, axis=-1)
    right = jnp.argmax(scores, axis=-1) == targets
    return TokenScores(log_normalizer - picked, right, log_normalizer)

  size = max(1, _LOGITS_AT_ONCE // (batch * features.unembedding.shape[0]))
  if size >= time:
    return of_slice(features.hidden, targets)

  scores = lax.map(
    jax.checkpoint(lambda now: of_slice(*now)),
    (slices.cut(features.hidden, size), slices.cut(targets, size)),
  )
  return TokenScores(*(slices.join(part, time) for part in scores))
