"""The loss of a planner's drafts (Wang et al. 2025, arXiv 2506.21734, section 2).

Every segment ends with a plan, and each plan by itself predicts the tokens that read it. The losses
of all segments add up ("Deep supervision"); the paper steps the optimizer after each segment, here
the sum is one loss:

    L = sum over m of  -log p_m(target) + BCE(q_m(halt), r_m) + BCE(q_m(continue), best_m+1)

The value of halting is r_m = 1 if the likeliest token is the target, else 0. The value of
continuing is the larger value of the next segment; the last segment can only halt ("Adaptive
computational time"). A plan serves a whole interval, but its values are learned token by token: the
head learns the share of the interval that the draft predicts, and an interval that a chunk or a
document cuts counts by its tokens.
"""

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.features import Features
from valkyrie.training.losses import token_scores
from valkyrie.types import Array


def _cross_entropy(logit: Array, target: Array) -> Array:
  """BCE of a logit with a constant probability."""
  return jax.nn.softplus(logit) - lax.stop_gradient(target) * logit


def draft_losses(features: Features, targets: Array, vocabulary_size: int) -> Array:
  """The weighted sum over segments, in nats, float32 [B, T]; zero without drafts."""
  drafts = features.drafts
  if drafts is None:
    return jnp.zeros(targets.shape, jnp.float32)
  scores = [
    token_scores(Features(hidden, features.unembedding), targets, vocabulary_size)
    for hidden in drafts.hidden
  ]
  losses = jnp.stack([score.loss for score in scores])
  right = jnp.stack([score.right for score in scores])
  halt, proceed = drafts.values[..., 0], drafts.values[..., 1]
  offers = jnp.concatenate([jnp.maximum(halt, proceed)[:-1], halt[-1:]])
  total = jnp.sum(losses + _cross_entropy(halt, right), axis=0)
  total += jnp.sum(_cross_entropy(proceed[:-1], jax.nn.sigmoid(offers[1:])), axis=0)
  return drafts.weights * total
