"""One step: what it computes, what it refuses, and what it leaves."""

import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.declarations import Kind
from valkyrie.models.features import Features
from valkyrie.training import losses, train_step
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step

PHASE = Phase(chunk_size=6, chunks=4, backprop_chunks=2)


@functools.cache
def built():
  model = tiny.model()
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=2, train_steps=20)
  take_step = make_train_step(
    model, optimizer, Curriculum([PHASE]), PHASE, seed=0, remat_chunks=True
  )

  @jax.jit
  @chex.assert_max_traces(n=1)
  def step(state, batch):
    return take_step(state, batch)

  start = functools.partial(initial_state, model, optimizer, 0, 2)
  return model, step, start


def test_one_step_golden():
  """The numbers of the first step: a change here is a change of the model, or a bug."""
  _, step, start = built()
  state, metrics = step(start(), tiny.batch((7, 15, 2)))
  loss = float(metrics.sums.loss / metrics.sums.weight)
  assert metrics.sums.weight == 2 * (24 - 2)  # two documents end inside each of two rows
  np.testing.assert_allclose(loss, GOLDEN['loss'], rtol=1e-4)
  np.testing.assert_allclose(metrics.grad_norm, GOLDEN['grad_norm'], rtol=1e-3)
  assert sorted(metrics.part_norms) == PARTS
  squares = sum(float(norm) ** 2 for norm in metrics.part_norms.values())
  np.testing.assert_allclose(squares, float(metrics.grad_norm) ** 2, rtol=1e-5)
  np.testing.assert_allclose(metrics.learning_rate, 0.005, rtol=1e-6)
  assert (int(state.step), int(state.skipped)) == (1, 0)


GOLDEN = {'loss': 4.60735, 'grad_norm': 1.34969}
PARTS = ['embedding', 'longformer_attention', 'mlp', 'norms', 's5']


def test_steps_lower_the_loss_and_carry_memory_on():
  _, step, start = built()
  state, first = step(start(), batch := tiny.batch((24,)))
  for n in range(1, 15):
    again = batch._replace(positions=batch.positions + 24 * n)
    state, last = step(state, again)
  assert last.sums.loss < 0.8 * first.sums.loss
  assert int(state.step) == 15
  carry = state.carry['model']['carry'][0][1]
  assert np.abs(carry.re).max() > 0


@pytest.mark.invariant(5)
@pytest.mark.parametrize('poison', ['parameters', 'carry'])
def test_a_step_that_is_not_finite_is_refused_whole(poison):
  _, step, start = built()
  state, _ = step(start(), tiny.batch((24,)))
  sound = jax.device_get(state)
  if poison == 'carry':
    state = state._replace(
      carry=jax.tree.map(
        lambda x: x.at[..., 0].set(jnp.nan) if x.dtype == jnp.float32 else x, state.carry
      )
    )
    kept = sound
  else:
    params = dict(state.params)
    params['model/final_norm'] = {'scale': params['model/final_norm']['scale'] * jnp.inf}
    state = state._replace(params=params)
    kept = sound._replace(params=jax.device_get(params))
  batch = tiny.batch((24,))
  after, metrics = step(state, batch._replace(positions=batch.positions + 24))
  for old, new in ((kept.params, after.params), (kept.optimizer_state, after.optimizer_state)):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(new), old)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(after.carry))  # as at a document start
  assert (int(after.step), int(after.skipped), int(metrics.skipped)) == (2, 1, 1)


def dropping_step(seed=0):
  """(a step of a layer of S5 with dropout, its initial state)."""
  model = tiny.model((functools.partial(tiny.s5, dropout=0.5),), layers=1)
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=2, train_steps=20)
  step = make_train_step(model, optimizer, Curriculum([PHASE]), PHASE, seed=seed, remat_chunks=True)
  return step, initial_state(model, optimizer, 0, 2)


def test_dropout_is_a_function_of_seed_and_step():
  batch = tiny.batch((7, 15, 2))

  def losses(seed, *steps):
    step, state = dropping_step(seed)
    # The loss alone, so that no gradient is compiled.
    loss = jax.jit(lambda number: step(state._replace(step=number), batch)[1].sums.loss)
    return [float(loss(jnp.int32(number))) for number in steps]

  first, again, second = losses(0, 0, 0, 1)
  (other,) = losses(1, 0)
  assert first == again
  assert len({first, second, other}) == 3


def test_without_dropout_a_step_makes_no_keys():
  def makes_keys(step, state):
    return 'random_' in str(jax.make_jaxpr(step)(state, tiny.batch((24,))))

  _, step, start = built()
  assert not makes_keys(step, start())
  assert makes_keys(*dropping_step())


# Public report salesforce/jaxformer#28: decay of stacked norm scales.
def test_the_groups_of_s5_and_of_vectors():
  """Λ, B, log Δ: a quarter of the learning rate, no weight decay. Vectors, embedding: no decay."""
  model, _, _ = built()
  params, _ = tiny.init(model, 2)
  optimizer = Optimizer(1.0, 0, 10, algorithm=functools.partial(optax.adamw, weight_decay=0.5))
  zero, kinds = jax.tree.map(jnp.zeros_like, params), model.kinds(params)
  start = optimizer.init(params, kinds)

  @jax.jit
  def update(gradient, params):
    updated, _ = optimizer.update(gradient, start, params, jnp.float32(0.1), kinds)
    return updated

  decayed = update(zero, params)
  s5 = 'model/layers/block_0/~/s5'
  for name in ('lambda_re', 'lambda_im', 'b', 'log_step'):
    np.testing.assert_array_equal(decayed[s5][name], params[s5][name])
  np.testing.assert_allclose(decayed[s5]['c'], 0.95 * params[s5]['c'], rtol=1e-6)
  for module, names in params.items():  # nor has any other vector, or the embedding
    for name, leaf in names.items():
      own = leaf.ndim - module.startswith('model/layers/')
      if own == 1 or name == 'embedding':
        np.testing.assert_array_equal(decayed[module][name], leaf)
      elif not module.endswith('/s5'):
        np.testing.assert_allclose(decayed[module][name], 0.95 * leaf, rtol=1e-6)

  ones = jax.tree.map(jnp.ones_like, params)
  moved = update(ones, zero)
  np.testing.assert_allclose(moved[s5]['log_step'], -0.025, rtol=1e-3)
  np.testing.assert_allclose(moved[s5]['c'], -0.1, rtol=1e-3)


def test_the_gradient_is_clipped_by_its_global_norm():
  optimizer = Optimizer(1.0, 0, 10, algorithm=optax.sgd, vector_algorithm=optax.sgd, clip_norm=2.0)
  params = {'w': jnp.zeros(4), 'v': jnp.zeros(4)}
  gradient, kinds = jax.tree.map(lambda x: x + 100.0, params), {'w': Kind(True), 'v': Kind(False)}
  moved, _ = optimizer.update(
    gradient, optimizer.init(params, kinds), params, jnp.float32(1.0), kinds
  )
  np.testing.assert_allclose(optax.tree.norm(moved), 2.0, rtol=1e-5)


# Public report google-research/bert#1293: a warm-up that begins at 0.
def test_the_schedule_warms_up_and_decays():
  optimizer = Optimizer(1.0, warmup_steps=10, train_steps=110, final_learning_rate_scale=0.1)
  rates = [float(optimizer.learning_rate(jnp.int32(n))) for n in (0, 5, 10, 60, 110, 500)]
  np.testing.assert_allclose(rates, [0.1, 0.55, 1.0, 0.55, 0.1, 0.1], rtol=1e-5)


def test_curriculum():
  curriculum = Curriculum(
    [Phase(8, 2, 1, steps=3, learning_rate_scale=0.5), Phase(16, 4, 2, steps=2), Phase(32, 1, 1)]
  )
  assert [curriculum.index(n) for n in range(7)] == [0, 0, 0, 1, 1, 2, 2]
  assert [curriculum.position(n) for n in range(7)] == [0, 16, 32, 48, 112, 176, 208]
  scales = [float(curriculum.learning_rate_scale(jnp.int32(n))) for n in range(7)]
  assert scales == [0.5, 0.5, 0.5, 1, 1, 1, 1]
  with pytest.raises(ConfigurationError, match='backprop_chunks=3 must divide chunks=4'):
    Phase(8, 4, 3)
  for long in ((2, None), (None, 4), (2, 2), (2, 3)):
    with pytest.raises(ConfigurationError, match='Phase has long_every='):
      Phase(8, 4, 2, long_every=long[0], long_backprop_chunks=long[1])
  with pytest.raises(ConfigurationError, match='chunk_size = 0 is out of range'):
    Phase(0, 1, 1)
  with pytest.raises(ConfigurationError, match=r'Phase\.steps to every phase but the last'):
    Curriculum([Phase(8, 1, 1), Phase(8, 1, 1)])


def test_long_unrolls_come_every_so_many_steps_of_their_phase():
  rare = Phase(8, 4, 1, steps=5, long_every=3, long_backprop_chunks=4)
  curriculum = Curriculum([rare, Phase(8, 4, 2, long_every=1, long_backprop_chunks=4)])
  assert [curriculum.phase(n).backprop_chunks for n in range(8)] == [1, 1, 4, 1, 1, 4, 4, 4]
  assert [curriculum.position(n) for n in range(4)] == [0, 32, 64, 96]  # as without
  assert {form.shape for form in curriculum.forms} == {
    (8, 4, 1, True), (8, 4, 2, True), (8, 4, 4, True)
  }  # fmt: skip


def test_only_phases_to_come_are_compiled():
  near = Phase(8, 1, 1, steps=5)
  rare = Phase(8, 4, 1, steps=5, long_every=3, long_backprop_chunks=4)
  last = Phase(16, 1, 1)
  curriculum = Curriculum([near, rare, last])
  assert curriculum.forms_from(4) == curriculum.forms == [near, rare, last, rare.long]
  assert curriculum.forms_from(5) == [rare, last, rare.long]
  assert curriculum.forms_from(10) == curriculum.forms_from(11) == [last]


def test_the_steps_of_each_form_of_a_phase():
  phases = [Phase(8, 1, 1, steps=5), Phase(8, 4, 1, steps=7, long_every=3, long_backprop_chunks=4)]
  curriculum = Curriculum([*phases, Phase(16, 1, 1)])
  for steps in (1, 5, 9, 12, 20):
    taken = [curriculum.phase(step) for step in range(steps)]
    assert curriculum.counts(steps) == [taken.count(form) for form in curriculum.forms]


def test_losses_are_the_cross_entropy_and_slices_change_nothing(monkeypatch):
  random = np.random.default_rng(0)
  features = Features(
    jnp.asarray(random.normal(size=(2, 13, 8)), jnp.float32),
    jnp.asarray(random.normal(size=(128, 8)), jnp.float32),
  )
  targets = random.integers(0, 50, (2, 13))
  scores = np.asarray(features.hidden, np.float64) @ np.asarray(features.unembedding, np.float64).T
  scores = scores[..., :50]  # what only pads the vocabulary has no probability
  log_z = np.log(np.exp(scores).sum(axis=-1))
  expected = log_z - np.take_along_axis(scores, targets[..., None], -1)[..., 0]
  whole = losses.token_scores(features, targets, 50).loss
  np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5)
  monkeypatch.setitem(losses._LOGITS_AT_ONCE, 'cpu', 2 * 128 * 4)
  monkeypatch.setattr(losses, '_LOGITS_KEPT', 2 * 128 * 4)
  np.testing.assert_allclose(losses.token_scores(features, targets, 50).loss, whole, rtol=1e-5)


@pytest.mark.parametrize('at_once', [2 * 128 * 4, 2**27])
@pytest.mark.parametrize('z_loss', [0.0, 0.1])
def test_one_pass_over_the_logits_is_enough_for_their_gradients(z_loss, at_once, monkeypatch):
  """Of many slices, and of one whose logits are too many to be kept."""
  random = np.random.default_rng(0)
  hidden, unembedding = (
    jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((2, 13, 8), (128, 8))
  )
  targets, weights = random.integers(0, 50, (2, 13)), random.random((2, 13), np.float32)

  def gradient(in_one_pass):
    def loss(hidden, unembedding, factor):
      found, sums = losses.weighted_loss(
        Features(hidden, unembedding), targets, weights, 50, weights.sum(),
        z_loss=z_loss, in_one_pass=in_one_pass,
      )  # fmt: skip
      return factor * found, sums

    return jax.value_and_grad(loss, (0, 1), has_aux=True)

  def products(in_one_pass):
    """Those with a logit of the whole vocabulary in the result."""
    program = str(jax.make_jaxpr(gradient(in_one_pass))(hidden, unembedding, 3.0))
    assert 'scatter' not in program  # XLA fuses it with nothing
    return len(re.findall(r'f32\[\d+,128\] = dot_general', program))

  expected = gradient(False)(hidden, unembedding, 3.0)
  monkeypatch.setitem(losses._LOGITS_AT_ONCE, 'cpu', at_once)
  monkeypatch.setattr(losses, '_LOGITS_KEPT', 2 * 128 * 4)
  assert (products(False), products(True)) == (2, 1)
  for in_one_pass in (False, True):
    found = gradient(in_one_pass)(hidden, unembedding, 3.0)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected
    )


def test_log_sums_in_one_pass_are_those_of_the_definition():
  """Of scores up to 10^4, with those that only pad the vocabulary, and their gradients."""
  random = np.random.default_rng(0)
  scale = 10.0 ** np.arange(-2, 5)[:, None]
  scores = (scale * random.normal(size=(7, 300))).astype(np.float32)
  scores[:, 290:] = -1e30
  weights = random.normal(size=7).astype(np.float32)

  def loss(scores):
    log_sums = losses._log_sum_exp_at_once(scores)
    return jnp.sum(weights * log_sums), log_sums

  gradient, log_sums = jax.grad(loss, has_aux=True)(scores)
  largest = scores.max(axis=-1, keepdims=True)
  shifted = np.exp(np.float64(scores) - largest)
  total = shifted.sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(log_sums, (largest + np.log(total))[:, 0], rtol=1e-6)
  expected = weights[:, None] * shifted / total
  np.testing.assert_allclose(gradient, expected, rtol=2e-3, atol=1e-7)


def test_a_new_model_knows_nothing():
  """The first loss is that of the uniform distribution, within a nat."""
  _, step, start = built()
  _, metrics = step(start(), tiny.batch((24,)))
  assert abs(metrics.sums.loss / metrics.sums.weight - math.log(tiny.VOCABULARY)) < 1


def test_metrics_are_scalars_that_nobody_waited_for():
  _, step, start = built()
  _, metrics = step(start(), tiny.batch((24,)))
  assert isinstance(metrics, train_step.StepMetrics)
  assert all(leaf.shape == () for leaf in jax.tree.leaves(metrics))
