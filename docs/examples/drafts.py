"""Drafts: predictions from only the plans of a planner, and their losses, a term of the objective.

StepSettings.objective = (@Prediction, @DraftLoss)
"""

import dataclasses
from typing import NamedTuple

import gin
import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.training.losses import token_scores
from valkyrie.training.objective import Chunk, Term
from valkyrie.types import Array


class Drafts(NamedTuple):
  """The drafts of the M segments of the plans, `Features.auxiliary` of a model with a planner."""

  hidden: Array  # [M, B, T, D], to be unembedded as `Features.hidden` is
  values: Array  # [M, B, T, 2] float32, logits: of halting at this segment, and of continuing
  has_plan: Array  # [B, T] bool, whether the token reads a plan


@gin.configurable
@dataclasses.dataclass(frozen=True)
class DraftLoss(Term):
  """The losses of the drafts of all segments, which add up.

  From the plan at the end of each segment alone, the tokens that read it are predicted (Wang et al.
  2025, arXiv 2506.21734, section 2, "Deep supervision"; the paper steps the optimizer after each
  segment):

      L = sum over m of  -log p_m(target) + BCE(q_m(halt), r_m) + BCE(q_m(continue), best_m+1)

  The value of halting is r_m = 1 if the likeliest token is the target, else 0. The value of
  continuing is the larger value of the next segment; the last segment can only halt ("Adaptive
  computational time"). The values of a plan are learned token by token: the head learns the share
  of the interval that the draft predicts.

  Attributes:
    weight: a factor on the losses.
  """

  weight: float = 0.1

  def values(self, chunk: Chunk) -> dict[str, Array]:
    """The losses in nats, float32 [B, T]; zero where a phase leaves the planner out."""
    drafts: Drafts | None = chunk.features.auxiliary
    targets = chunk.batch.targets
    if drafts is None:
      return {'draft_loss': jnp.zeros(targets.shape, jnp.float32)}
    scores = []
    for hidden in drafts.hidden:
      features = chunk.features._replace(hidden=hidden)
      scores.append(token_scores(features, targets, chunk.model.about.vocabulary_size))
    losses = jnp.stack([score.loss for score in scores])
    right = jnp.stack([score.right for score in scores])
    halt = drafts.values[..., 0]
    proceed = drafts.values[..., 1]
    offers = jnp.concatenate([jnp.maximum(halt, proceed)[:-1], halt[-1:]])
    total = jnp.sum(losses + _cross_entropy(halt, right), axis=0)
    total += jnp.sum(_cross_entropy(proceed[:-1], jax.nn.sigmoid(offers[1:])), axis=0)
    weights = jnp.where(drafts.has_plan, self.weight, 0.0).astype(total.dtype)
    return {'draft_loss': weights * total}


def _cross_entropy(logit: Array, target: Array) -> Array:
  """BCE of a logit with a constant probability: -p log σ(x) - (1 - p) log(1 - σ(x))."""
  return jax.nn.softplus(logit) - lax.stop_gradient(target) * logit
