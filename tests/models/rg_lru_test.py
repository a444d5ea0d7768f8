"""The RG-LRU against its equations in float64, one token after the other."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.recurrence import rg_lru, scan
from valkyrie.models.recurrence.rg_lru import RGLRU

WIDTH, HEADS = 6, 2


@functools.cache
def build(width=WIDTH, heads=HEADS, **options):
  return tiny.mixer(functools.partial(RGLRU, width, heads, **options))


def stream(time, rows=2, seed=0):
  """(x, carry, positions, segment_ids): documents of 1 to 6 tokens, the first begun before."""
  random = np.random.default_rng(seed)
  positions, segment_ids = tiny.documents(random, rows, time)
  return (
    random.normal(size=(rows, time, WIDTH)),
    random.normal(size=(rows, WIDTH)),
    positions,
    segment_ids,
  )


def parameters():
  random = np.random.default_rng(3)
  params = build().init(jax.random.key(0), *stream(1))
  return jax.tree.map(lambda p: random.normal(size=p.shape), params)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def by_token(params, x, carry, positions):
  """The equations, for one token and row at a time."""
  own = {name: np.asarray(value, np.float64) for name, value in params['rglru'].items()}
  dense = {name: np.zeros((x.shape[-1],) * 2) for name in ('recurrence_gate', 'input_gate')}
  for name, weights in dense.items():
    block = own[name].shape[1]
    for head, values in enumerate(own[name]):
      weights[head * block : (head + 1) * block, head * block : (head + 1) * block] = values
  state, y = np.array(carry, np.float64), np.zeros(x.shape)
  for row, t in np.ndindex(x.shape[:2]):
    now = x[row, t]
    r = sigmoid(now @ dense['recurrence_gate'] + own['recurrence_bias'])
    i = sigmoid(now @ dense['input_gate'] + own['input_bias'])
    log_a = -8 * r * np.log1p(np.exp(own['lambda']))
    if positions[row, t] == 0:
      state[row] = i * now
    else:
      state[row] = np.exp(log_a) * state[row] + np.sqrt(-np.expm1(2 * log_a)) * i * now
    y[row, t] = state[row]
  return y, state


@pytest.mark.parametrize('form', scan.FORMS)
@pytest.mark.parametrize('time', [1, 13])
def test_values_are_those_of_the_equations(form, time):
  x, carry, positions, segment_ids = stream(time)
  params = parameters()
  with jax.enable_x64(True):
    found = build(scan_form=form).apply(params, x, carry, positions, segment_ids)
  for array, expected in zip(found, by_token(params, x, carry, positions), strict=True):
    np.testing.assert_allclose(array, expected, rtol=0, atol=1e-9)


def test_the_gradient_is_that_of_the_equations():
  """Along random directions of parameters, inputs and carry, by central differences."""
  x, carry, positions, segment_ids = stream(11)
  point = parameters(), x, carry
  random = np.random.default_rng(5)
  weights = random.normal(size=x.shape), random.normal(size=carry.shape)

  def weighted(y, after):
    return jnp.sum(weights[0] * y) + jnp.sum(weights[1] * after)

  def at(step, direction):
    moved = jax.tree.map(lambda a, d: a + step * d, point, direction)
    return weighted(*by_token(*moved, positions))

  with jax.enable_x64(True):
    gradient = jax.jit(
      jax.grad(lambda *a: weighted(*build().apply(*a, positions, segment_ids)), argnums=(0, 1, 2))
    )(*point)
    tiny.check_slopes(gradient, point, at, random)


@pytest.mark.parametrize('form', scan.FORMS)
def test_long_memories_in_float32(form):
  """8192 tokens, from a carry, of time constants from 19 to 10^7: a decay near 1 that was rounded
  to float32 would be wrong by up to 30% of its distance to 1."""
  random = np.random.default_rng(0)
  x = random.normal(size=(1, 8192, WIDTH)).astype(np.float32)
  carry = random.normal(size=(1, WIDTH)).astype(np.float32)
  positions = np.arange(5, 8197, dtype=np.int32)[None]
  params = build().init(jax.random.key(0), x[:, :1], carry, positions[:, :1], positions[:, :1])
  rates = 1 / np.geomspace(19, 1e7, WIDTH)
  params['rglru']['lambda'] = np.log(np.expm1(rates / 4)).astype(np.float32)
  expected, state = by_token(params, x, carry, positions)
  y, after = build(scan_form=form).apply(params, x, carry, positions, np.ones_like(positions))
  scale = np.linalg.norm(expected, axis=1)
  assert np.max(np.linalg.norm(y - expected, axis=1) / scale) < 1e-5
  assert np.max(np.abs(after - state) / np.sqrt(scale**2 / 8192)) < 3e-5


def test_gates_that_close_in_float32_have_finite_gradients():
  x, carry, positions, segment_ids = stream(5)
  x, carry = x.astype(np.float32), carry.astype(np.float32)
  params = jax.tree.map(lambda p: p.astype(np.float32), parameters())
  params['rglru']['recurrence_bias'] = np.array([-200, -87, -50, 0, 50, 200], np.float32)

  def loss(*arguments):
    y, after = build().apply(*arguments, positions, segment_ids)
    return jnp.sum(y**2) + jnp.sum(after**2)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(params, x, carry)
  assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))


def test_the_factor_of_an_input():
  log_decay = jnp.asarray([0.0, -1e-10, -1e-4, -1.0, -1000.0], jnp.float32)[:, None, None]
  expected = np.sqrt(-np.expm1(2 * np.float64(log_decay)))
  starts = np.zeros((5, 1), bool)
  np.testing.assert_allclose(rg_lru.gain(log_decay, starts), expected, rtol=1e-6, atol=1e-14)
  np.testing.assert_array_equal(rg_lru.gain(log_decay, ~starts), np.ones((5, 1, 1)))


@pytest.mark.parametrize(
  ('options', 'shortest', 'horizon', 'median'),
  [
    # a^c from 0.9 to 0.999, uniformly: at r = 1/2, a = sqrt(0.9495) in the middle.
    ({}, 18.98, 1999, -2 / np.log(0.9495)),
    ({'shortest': 10.0, 'horizon': 1e6, 'spread': 'log'}, 10, 1e6, 10**3.5),
    ({'shortest': 50.0, 'horizon': 50.0}, 50, 50, 50),
  ],
)
def test_time_constants_at_initialization(options, shortest, horizon, median):
  """Of an input of zero, where the gates are half open."""
  width = 2048
  layer = build(width, 512, **options)
  zero, positions = np.zeros((1, 1, width), np.float32), np.ones((1, 1), np.int32)
  params = layer.init(jax.random.key(0), zero, zero[:, 0], positions, positions)
  own = params['rglru']
  found = 1 / (4 * np.logaddexp(0, np.float64(own['lambda'])))
  assert shortest * 0.999 <= found.min() < shortest * 1.05
  assert horizon * 0.8 < found.max() <= horizon * 1.001
  np.testing.assert_allclose(np.median(found), median, rtol=0.25)
  np.testing.assert_allclose(np.std(own['input_gate']), 0.5, rtol=0.05)
  decayed, _ = layer.apply(params, zero, zero[:, 0] + 1, positions, positions)
  np.testing.assert_allclose(decayed[0, 0], np.exp(-1 / found), rtol=1e-6)


@pytest.mark.invariant(8)
def test_dtypes_under_bfloat16():
  x, carry, *where = stream(7)
  params = jax.tree.map(lambda p: p.astype(np.float32), parameters())
  y, after = build().apply(params, jnp.asarray(x, jnp.bfloat16), carry.astype(np.float32), *where)
  assert (y.dtype, after.dtype) == (jnp.bfloat16, jnp.float32)
  expected, state = by_token(params, x, carry, where[0])
  assert np.linalg.norm(np.asarray(y, np.float64) - expected) < 1e-2 * np.linalg.norm(expected)
  assert np.linalg.norm(after - state) < 1e-2 * np.linalg.norm(state)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'heads': 4}, 'RGLRU.width=6 must be a multiple of RGLRU.heads=4'),
    ({'width': 0}, 'RGLRU.width = 0 is out of range'),
    ({'shortest': 3000.0}, r'RGLRU.shortest=3000 and RGLRU.horizon=1999:'),
    ({'spread': 'even'}, r"RGLRU.spread='even' is unknown. Use one of \['decay', 'log'\]"),
    ({'scan_form': 'fft'}, "RGLRU.scan_form='fft' is unknown"),
  ],
)
def test_options_that_cannot_be_are_refused_when_the_layer_is_made(options, message):
  with pytest.raises(ConfigurationError, match=message):
    hk.transform(lambda: RGLRU(**{'width': WIDTH, 'heads': HEADS, **options})).init(None)


def test_an_input_of_another_width_is_refused():
  zero, where = np.zeros((1, 1, WIDTH)), np.ones((1, 1), np.int32)
  with pytest.raises(ConfigurationError, match=r'RGLRU.width=8 differs from its input, of width 6'):
    build(8).init(jax.random.key(0), zero, np.zeros((1, 8)), where, where)
