"""Published ideas that scripts/experiments/words.args compares: each does what its paper says."""

import functools
import types

import gin
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from scripts.experiments import published_parts as parts
from valkyrie.models.declarations import Kind
from valkyrie.models.features import Features
from valkyrie.models.mixer_check import check_mixer
from valkyrie.training import losses
from valkyrie.training.algorithms import nature

WIDTH = 16


@pytest.fixture
def bindings():
  gin.parse_config(f"""
    LanguageModel.d_model = {WIDTH}
    LongformerAttention.heads = 2
    LongformerAttention.kv_heads = 1
    LongformerAttention.head_width = 8
    LongformerAttention.window = 4
    LongformerAttention.slice_size = 4
  """)


@pytest.mark.parametrize('name', ['HeadGated', 'Convolved', 'ValueEmbedded'])
@pytest.mark.usefixtures('bindings')
def test_each_attention_keeps_the_rules_of_mixers(name):
  check_mixer(getattr(parts, f'{name}Attention'), WIDTH)


def features_of(random, size, padded):
  hidden = random.normal(size=(2, 5, 4)).astype(np.float32)
  unembedding = 9 * random.normal(size=(padded, 4)).astype(np.float32)
  return Features(jnp.asarray(hidden), jnp.asarray(unembedding)), hidden @ unembedding[:size].T


def test_a_soft_cap_bounds_logits_in_all_losses(monkeypatch):
  monkeypatch.setattr(losses, 'logits', losses.logits)  # is put back
  random = np.random.default_rng(0)
  features, raw = features_of(random, 7, padded=8)
  targets = random.integers(7, size=(2, 5))
  parts.SoftCapped(cap=2.0)
  capped = 2 * np.tanh(raw / 2)
  assert np.abs(raw).max() > 9
  picked = np.take_along_axis(capped, targets[..., None], -1)[..., 0]
  loss = losses.token_scores(features, jnp.asarray(targets), 7).loss
  np.testing.assert_allclose(loss, np.log(np.exp(capped).sum(-1)) - picked, rtol=1e-5)


def test_the_second_token_is_the_one_after_the_target():
  random = np.random.default_rng(0)
  features, raw = features_of(random, 8, padded=8)
  targets, weights = random.integers(8, size=(2, 5)), np.ones((2, 5), np.float32)
  weights[1, 2] = 0  # padding: neither a target nor a second one
  chunk = types.SimpleNamespace(
    params={'second_token': {'w': jnp.zeros((4, 4)), 'b': jnp.zeros(4)}},
    features=features,
    batch=types.SimpleNamespace(targets=jnp.asarray(targets), weights=jnp.asarray(weights)),
    model=types.SimpleNamespace(about=types.SimpleNamespace(vocabulary_size=8)),
  )
  values = parts.SecondToken(weight=0.5).values(chunk)['second_token']
  expected = np.zeros((2, 5))
  for row, at in np.ndindex(2, 4):
    if weights[row, at] and weights[row, at + 1]:
      scores = raw[row, at]
      expected[row, at] = np.log(np.exp(scores).sum()) - scores[targets[row, at + 1]]
  np.testing.assert_allclose(values, 0.5 * expected, rtol=1e-4)


def test_decay_is_cautious():
  """Where the step leads away from zero, nothing decays."""
  params, gradient = jnp.array([2.0, 2.0]), jnp.array([1.0, -1.0])
  decayed, plain = (
    algorithm.update(gradient, algorithm.init(params), params)[0]
    for algorithm in (parts.cautious_adamw(0.1), optax.adamw(0.1, weight_decay=0.0))
  )
  np.testing.assert_allclose(decayed - plain, [-0.1 * 0.1 * 2, 0.0], atol=1e-6)


def test_columns_of_a_step_of_normuon_are_of_one_size():
  random = np.random.default_rng(0)
  params = jnp.asarray(random.normal(size=(8, 6)), jnp.float32)
  algorithm = parts.normuon(1.0, weight_decay=0.0)
  step, _ = algorithm.update(params, algorithm.init(params), params)
  np.testing.assert_allclose(jnp.linalg.norm(step, axis=0), 0.2 * 8**0.5, rtol=1e-4)
  assert jnp.sum(step * params) < 0
  assert nature(parts.normuon) == (True, True)
  assert nature(parts.cautious_adamw) == (False, True)


def test_the_average_takes_the_place_of_the_parameters_after_the_last_step():
  options = {'learning_rate': 0.1, 'warmup_steps': 0, 'train_steps': 3}
  averaged = parts.Averaged(last_step=3, horizon=4, **options)
  plain = parts.Optimizer(**options)
  kinds, params = {'w': Kind(False)}, {'w': jnp.ones(3)}
  ends = []
  for optimizer in (averaged, plain):
    step = functools.partial(optimizer.update, kinds=kinds)
    now, state, seen = params, optimizer.init(params, kinds), []
    for _ in range(3):
      now, state = step({'w': jnp.ones(3)}, state, now, jnp.float32(0.1))
      seen.append(now['w'])
    ends.append(seen)
  (*before, last), (*steps, end) = ends
  np.testing.assert_allclose(before, steps)
  average = params['w']
  for now in (*steps, end):
    average = 0.75 * average + 0.25 * now
  np.testing.assert_allclose(last, average, rtol=1e-6)
