"""The toys of decompose_toys: its measures, its data, and a toy decomposed by hand."""

import dataclasses
import functools

import decompose_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.errors import DataError
from valkyrie.lab.decomposition import draws, importance
from valkyrie.lab.decomposition.faithfulness import faithful, unfaithfulness


@pytest.fixture
def planted():
  """(W, V, U): five rows of norm 1, 2, 3, 4, 5, component 6 - j for row j, and four dead ones."""
  angles = np.arange(5) * 2 * np.pi / 5
  rows = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.arange(1, 6)[:, None]
  v, u = np.zeros((5, 9)), np.zeros((9, 2))
  v[np.arange(5), 6 - np.arange(5)] = 2.0
  u[6 - np.arange(5)] = rows / 2
  return rows, v, u


def test_components_that_are_the_rows_match_them(planted):
  assert decompose_toys.match(*planted) == pytest.approx((1.0, 1.0, 5))


def test_the_ratio_of_norms_is_that_of_the_best_match(planted):
  rows, v, u = planted
  u[6] *= 0.5
  assert decompose_toys.match(rows, v, u) == pytest.approx((1.0, 0.9, 5))


def test_a_vanishing_component_matches_nothing(planted):
  rows, v, u = planted
  turn = np.pi / 6
  turned = u[6] @ np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
  u[6], u[0] = turned, rows[0] / 2
  v[0, 0] = 2 * 0.029  # 0.029 of a mean row of 3
  assert decompose_toys.match(rows, v, u) == pytest.approx((0.8 + np.cos(turn) / 5, 1.0, 5))
  v[0, 0] = 2 * 0.031
  assert decompose_toys.match(rows, v, u) == pytest.approx((1.0, 0.8 + 0.031 / 5, 5))


def test_one_component_of_two_rows_is_not_distinct(planted):
  rows, v, u = planted
  rows[1] = rows[0]
  v[:, 5], v[1, 6] = 0, 2.0
  assert decompose_toys.match(rows, v, u) == pytest.approx((1.0, 1.0, 4))


def test_identity_errors():
  """Rows are features; more components than features may be there, at any place."""
  found = np.zeros((4, 7), np.float32)
  found[np.arange(4), [6, 0, 3, 2]] = 1, 0.95, 1, 1
  assert decompose_toys.identity_errors(found) == 0
  found[0, 1] = 0.2
  assert decompose_toys.identity_errors(found) == 1
  found[1, 0] = 0.85
  assert decompose_toys.identity_errors(found) == 2
  found[:, 0], found[:, 4] = 0, 1  # no component for the second feature, but one for all
  assert decompose_toys.identity_errors(found) == 1 + 3


def test_the_weighted_rows_have_the_moments_of_independent_features():
  """On with probability p, uniform in [0, 1]: each statistic within five standard errors."""
  toy, rows = decompose_toys.TOYS['5-2'], 100_000
  x, weights = (np.asarray(a[:, 0], np.float64) for a in toy.batch(jax.random.key(3), rows))
  assert x.shape == (rows + 1, 5) and not x[-1].any() and x[:-1].any(axis=1).all()
  assert weights.sum() == pytest.approx(1) and weights[-1] == pytest.approx(0.95**5)
  p = toy.probability
  for value, expected in (
    *((x[:, j] > 0, p) for j in range(5)),
    *((x[:, j], p / 2) for j in range(5)),
    *((x[:, j] ** 2, p / 3) for j in range(5)),
    *((x[:, j] * x[:, k], p * p / 4) for j in range(5) for k in range(j)),
    ((x > 0).sum(axis=1) == 2, 10 * p**2 * (1 - p) ** 3),
  ):
    mean = weights @ value
    error = np.std(value[:-1].astype(float)) * (1 - weights[-1]) / np.sqrt(rows)
    assert abs(mean - expected) < 5 * error


@pytest.fixture(scope='module')
def tiny():
  """(the model of a tiny toy with an identity, parameters of a target and of a decomposition)."""
  toy = dataclasses.replace(decompose_toys.TOYS['5-2-identity'], components=6, rows=7, steps=1)
  model = decompose_toys.model_of(toy)
  params = model.init(jax.random.key(0))
  params |= decompose_toys.FUNCTIONS.created(model.sites)[0](jax.random.key(1))
  return model, toy.tied(params)


def test_the_toy_of_superposition_is_its_formula(tiny):
  model, params = tiny
  own = {name: np.asarray(leaf[0]) for name, leaf in params[decompose_toys.MODULE].items()}
  x = np.asarray(model.toy.batch(jax.random.key(2), 6)[0])
  found, inputs = model.apply(params, x, {})
  expected = np.maximum(x @ own['first'] @ own['first'].T + own['bias'], 0)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert [site.name for site in model.sites.values()] == ['first', 'identity', 'second']
  np.testing.assert_allclose(
    inputs[f'{decompose_toys.MODULE}/second'][0], x @ own['first'], atol=1e-6
  )
  np.testing.assert_array_equal(
    own['second_v'] @ own['second_u'], (own['first_v'] @ own['first_u']).T
  )


def test_the_losses_of_a_toy(tiny):
  """With importances of 1, masks are 1; what reconstruction then has is the delta's part."""
  model, params = tiny
  functions = {
    name: jnp.full_like(leaf, 2.0) if name.endswith('b2') else jnp.zeros_like(leaf)
    for name, leaf in params[importance.NETS].items()
  }
  own = dict(params[decompose_toys.MODULE])
  # V U = W: five unit vectors and one component of nothing.
  own['first_v'] = jnp.eye(5, 6)[None]
  own['first_u'] = jnp.pad(own['first'], ((0, 0), (0, 1), (0, 0)))
  own['identity_v'], own['identity_u'] = jnp.eye(2, 6)[None], jnp.eye(6, 2)[None]
  exact = model.toy.tied({decompose_toys.MODULE: own, importance.NETS: functions})
  losses, zero = jax.jit(functools.partial(decompose_toys.losses, model)), jnp.array(0)
  found = losses(exact, zero, zero)
  # 3 sites of 6 importances of 1 + 0.01 each.
  expected = {'all': 0, 'each': 0, 'faithfulness': 0, 'minimality': 3e-3 * 18 * 1.01}
  assert found == pytest.approx(expected, abs=1e-12, rel=1e-5)
  # Without the identity's components the delta carries d of it, for a d of each row.
  lost = {**own, 'identity_v': jnp.zeros((1, 2, 6))}
  lost = model.toy.tied({decompose_toys.MODULE: lost, importance.NETS: functions})
  found = losses(lost, zero, zero)
  assert found['faithfulness'] == pytest.approx(2 / (5 * 2 + 2 * 2 + 2 * 5), rel=1e-6)
  x, weights = model.toy.batch(jax.random.fold_in(jax.random.key(0), 0), 7)
  d = draws.uniform(0, 2 * 1001 + 1, jnp.arange(8), jnp.zeros((8, 1), int), 7)[..., -1:]
  w = np.asarray(own['first'][0])
  difference = np.maximum(d * (x @ w) @ w.T, 0) - np.maximum(x @ w @ w.T, 0)
  expected = np.sum(weights * np.mean(difference**2, axis=-1)) / 3
  assert float(found['each']) == pytest.approx(float(expected), rel=1e-5) and expected > 1e-5


def test_faithful_steps_are_those_of_adam_on_the_factors(tiny):
  """D19, against numpy."""
  model, params = tiny
  after = faithful(params, model.sites, 3, 0.01)
  count = sum(site.target(params).size for site in model.sites.values())
  for site in model.sites.values():
    w = np.asarray(site.target(params)[0], np.float64)
    factors = [np.asarray(leaf[0], np.float64) for leaf in site.factors(params)]
    mean, square = [0.0, 0.0], [0.0, 0.0]
    for step in (1, 2, 3):
      v, u = factors
      d = -2 / count * (w - v @ u)
      for n, slope in enumerate((d @ u.T, v.T @ d)):
        mean[n] = 0.9 * mean[n] + 0.1 * slope
        square[n] = 0.999 * square[n] + 0.001 * slope**2
        direction = mean[n] / (1 - 0.9**step) / (np.sqrt(square[n] / (1 - 0.999**step)) + 1e-8)
        factors[n] = factors[n] - 0.01 * direction
    for leaf, expected in zip(site.factors(after), factors, strict=True):
      np.testing.assert_allclose(leaf[0], expected, atol=2e-6)
  changed = {n for m in params for n in params[m] if (params[m][n] != after[m][n]).any()}
  assert changed == {f'{site.name}{end}' for site in model.sites.values() for end in ('_v', '_u')}
  assert unfaithfulness(after, model.sites) < unfaithfulness(params, model.sites)


def test_features_that_the_target_has_not_learned_are_named():
  shares = np.array([0.9, 0.3, 0.8, 0.9, 0.9])
  decompose_toys.check_learned(shares)
  shares[1], shares[4] = 0.1, 0.0
  with pytest.raises(DataError, match=r'features \[1, 4\] of 5'):
    decompose_toys.check_learned(shares)
