"""The drafts' losses against their sum, written out token by token."""

import types

from drafts import DraftLoss, Drafts
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models.features import Features
from valkyrie.training.objective import Chunk
from valkyrie.types import Batch

VOCABULARY = 50


def draft_losses(features, targets):
  """The values of the term for targets [B, T]."""
  model = types.SimpleNamespace(about=types.SimpleNamespace(vocabulary_size=VOCABULARY))
  batch = Batch(None, targets, None, None, None)
  chunk = Chunk(model, {}, features, batch, {}, None, 1.0, False)
  return DraftLoss(weight=0.1).values(chunk)['draft_loss']


def cross_entropy(logit, target):
  p = 1 / (1 + np.exp(-logit))
  return -target * np.log(p) - (1 - target) * np.log(1 - p)


@pytest.mark.parametrize('segments', [1, 3])
def test_it_is_the_weighted_sum_of_every_segments_losses(segments):
  random = np.random.default_rng(segments)
  hidden = random.normal(size=(segments, 2, 5, 8))
  values = random.normal(size=(segments, 2, 5, 2))
  has_plan = random.choice([False, True], size=(2, 5))
  weights = 0.1 * has_plan
  unembedding = random.normal(size=(128, 8))
  targets = random.integers(0, VOCABULARY, (2, 5))
  targets[0] = np.argmax(hidden[-1, 0] @ unembedding[:VOCABULARY].T, axis=-1)  # some are right

  expected = np.zeros((2, 5))
  d_values = np.zeros_like(values)
  for row, t in np.ndindex(2, 5):
    for m in range(segments):
      p = np.exp(unembedding[:VOCABULARY] @ hidden[m, row, t])
      right = float(np.argmax(p) == targets[row, t])
      halt, go_on = values[m, row, t]
      loss = -np.log(p[targets[row, t]] / p.sum()) + cross_entropy(halt, right)
      d_values[m, row, t, 0] = weights[row, t] * (1 / (1 + np.exp(-halt)) - right)
      if m < segments - 1:
        offers = values[m + 1, row, t]
        best = max(offers) if m + 1 < segments - 1 else offers[0]
        best = 1 / (1 + np.exp(-best))
        loss += cross_entropy(go_on, best)
        d_values[m, row, t, 1] = weights[row, t] * (1 / (1 + np.exp(-go_on)) - best)
      expected[row, t] += weights[row, t] * loss

  def losses(values):
    drafts = Drafts(jnp.asarray(hidden), values, jnp.asarray(has_plan))
    features = Features(jnp.zeros((2, 5, 8)), jnp.asarray(unembedding), drafts)
    return draft_losses(features, jnp.asarray(targets))

  with jax.enable_x64(True):
    found, backward = jax.vjp(losses, jnp.asarray(values))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    # The targets of the values are held fixed.
    np.testing.assert_allclose(backward(jnp.ones((2, 5)))[0], d_values, rtol=1e-8, atol=1e-12)


def test_where_the_planner_takes_no_part_there_is_nothing_to_add():
  features = Features(jnp.ones((2, 5, 8)), jnp.ones((128, 8)))
  assert not np.any(draft_losses(features, jnp.zeros((2, 5), jnp.int32)))
