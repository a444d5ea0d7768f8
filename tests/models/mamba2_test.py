"""Mamba-2 against its equations in float64, one token after the other, and against transformers."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.recurrence.convolution import ConvolvedCarry, Tail
from valkyrie.models.recurrence.mamba2 import Mamba2, ssd

WIDTH, HEADS, HEAD_WIDTH, STATES, TAPS = 6, 3, 4, 5, 4
INNER = HEADS * HEAD_WIDTH


def layer(**options):
  sizes = {'heads': HEADS, 'head_width': HEAD_WIDTH, 'state_size': STATES, 'slice_size': 4}
  return Mamba2(**{**sizes, **options})


@functools.cache
def build(**options):
  return tiny.mixer(functools.partial(layer, **options))


def zero(rows, heads=HEADS, groups=1):
  state = np.zeros((rows, heads, STATES, HEAD_WIDTH), np.float32)
  convolved = heads * HEAD_WIDTH + 2 * groups * STATES
  return ConvolvedCarry(Tail(np.zeros((rows, TAPS - 1, convolved), np.float32)), state)


def initial(width=WIDTH, **options):
  one = np.ones((1, 1), np.int32)
  return build(**options).init(jax.random.key(0), np.ones((1, 1, width)), zero(1), one, one)


def drawn():
  """(params, x [2, 13, D], a carry, positions): in float64, of every size."""
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), initial())
  carry = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), zero(2))
  positions = np.stack([np.r_[7:9, 0:1, 0:10], np.r_[0:13]]).astype(np.int32)
  return params, random.normal(size=(2, 13, WIDTH)), carry, positions


def silu(x):
  return x / (1 + np.exp(-x))


def by_token(params, x, carry, positions, groups=1):
  """The equations, for one token, row and head at a time."""
  own = params['mamba2']
  convolution = params['mamba2/~/causal_convolution']
  filters, bias = convolution['filters'], convolution.get('bias', 0)
  heads = len(own['log_rate'])
  width = heads * HEAD_WIDTH
  scale = params['mamba2/rms_norm']['scale']
  tail, state = np.array(carry.tail.inputs), np.array(carry.state)
  y = np.zeros_like(x)
  for row, t in np.ndindex(x.shape[:2]):
    now = x[row, t]
    recent = np.stack([*tail[row], now @ own['xbc']])
    tail[row] = recent[1:]
    taps = min(TAPS, positions[row, t] + 1)
    convolved = silu(sum(filters[lag] * recent[-1 - lag] for lag in range(taps)) + bias)
    inner, b, c = np.split(convolved, [width, width + groups * STATES])
    b, c = b.reshape(groups, STATES), c.reshape(groups, STATES)
    steps = np.log1p(np.exp(now @ own['dt'] + own['step_bias']))
    out = np.zeros((heads, HEAD_WIDTH))
    for head, value in enumerate(inner.reshape(heads, HEAD_WIDTH)):
      group = head // (heads // groups)
      decay = np.exp(-np.exp(own['log_rate'][head]) * steps[head]) if positions[row, t] else 0
      state[row, head] = decay * state[row, head] + steps[head] * np.outer(b[group], value)
      out[head] = c[group] @ state[row, head] + own['skip'][head] * value
    gated = (out.ravel() * silu(now @ own['z'])).reshape(groups, -1)
    normed = gated / np.sqrt(np.mean(gated**2, axis=1, keepdims=True) + 1e-6)
    y[row, t] = normed.ravel() * scale @ own['out']
  return y, ConvolvedCarry(Tail(tail), state)


@pytest.mark.parametrize('slice_size', [1, 4, 64])
def test_values_are_those_of_the_equations(slice_size):
  params, x, carry, positions = drawn()
  with jax.enable_x64(True):
    mixer = build(slice_size=slice_size)
    found = mixer.apply(params, x, carry, positions, np.ones_like(positions))
  expected = by_token(params, x, carry, positions)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9), found, expected)


def test_groups_of_heads_and_a_bias_of_the_convolution():
  options = {'heads': 6, 'groups': 2, 'convolution_bias': True}
  _, x, _, positions = drawn()
  random, fresh = np.random.default_rng(1), zero(2, heads=6, groups=2)
  ones, mixer = np.ones_like(positions), build(**options)
  shapes = mixer.init(jax.random.key(0), x, fresh, positions, ones)
  params, carry = jax.tree.map(lambda p: random.normal(size=p.shape), (shapes, fresh))
  with jax.enable_x64(True):
    found = mixer.apply(params, x, carry, positions, ones)
  expected = by_token(params, x, carry, positions, groups=2)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9), found, expected)


def test_gradients_in_bfloat16_are_those_of_float64_up_to_its_rounding():
  """States and their gradients are stored in bfloat16, but summed in float32."""
  random = np.random.default_rng(2)
  x, b, c = (
    jnp.asarray(np.float32(random.normal(size=(2, 13, *rest))), jnp.bfloat16)
    for rest in ((HEADS, HEAD_WIDTH), (STATES,), (STATES,))
  )
  log_decay = np.float32(-0.2 * random.random((2, 13, HEADS)))
  carry = np.float32(random.normal(size=(2, HEADS, STATES, HEAD_WIDTH)))
  reset = np.zeros((2, 13), bool)
  reset[0, [2, 6]] = True
  weights = [np.float32(random.normal(size=array.shape)) for array in (x, carry)]

  def loss(point):
    x, log_decay, b, c, carry = point
    y, after = ssd(x, log_decay, b, c, reset, carry, slice_size=4)
    return jnp.sum(weights[0] * y) + jnp.sum(weights[1] * after)

  point = x, log_decay, b, c, carry
  gradients = jax.grad(loss)(point)
  with jax.enable_x64(True):
    expected = jax.grad(loss)(jax.tree.map(np.float64, point))
  for gradient, start, value in zip(gradients, point, expected, strict=True):
    assert gradient.dtype == start.dtype
    error = np.linalg.norm(np.float64(gradient) - value) / np.linalg.norm(value)
    assert 0 < error < 2**-7


# Public report fla-org/flash-linear-attention#1142: lengths that a kernel's chunk does not divide.
def test_the_gradient_is_that_of_the_equations():
  """Along random directions of parameters, inputs and carry, by central differences."""
  *point, positions = drawn()
  random = np.random.default_rng(1)
  weights = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), (point[1], point[2]))

  def loss(out):
    return sum(jnp.sum(w * o) for w, o in zip(*map(jax.tree.leaves, (weights, out)), strict=True))

  def at(shift, direction):
    moved = jax.tree.map(lambda leaf, d: leaf + shift * d, point, direction)
    return float(loss(by_token(*moved, positions)))

  with jax.enable_x64(True):
    mixer, ones = build(), np.ones_like(positions)
    gradient = jax.grad(lambda point: loss(mixer.apply(*point, positions, ones)))(point)
    for _ in range(3):
      direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape) / 10, point)
      values = [at(shift, direction) for shift in (-2e-3, -1e-3, 1e-3, 2e-3)]
      slope = np.dot(values, [1, -8, 8, -1]) / 12e-3
      products = jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction)
      np.testing.assert_allclose(sum(jax.tree.leaves(products)), slope, rtol=1e-9)


def test_it_computes_what_transformers_computes():
  """Its block with one group, and without a bias in the convolution."""
  reason = 'a comparison with transformers needs torch and transformers'
  torch = pytest.importorskip('torch', reason=reason)
  modeling = pytest.importorskip('transformers.models.mamba2.modeling_mamba2', reason=reason)
  config = modeling.Mamba2Config(
    num_heads=HEADS,
    head_dim=HEAD_WIDTH,
    hidden_size=WIDTH,
    state_size=STATES,
    n_groups=1,
    num_hidden_layers=1,
    use_conv_bias=False,
    layer_norm_epsilon=1e-6,
    chunk_size=8,
  )
  theirs = modeling.Mamba2Mixer(config, layer_idx=0)
  params, x, _, _ = drawn()
  own, filters = params['mamba2'], params['mamba2/~/causal_convolution']['filters']
  weights = {
    'in_proj.weight': np.concatenate([own[name] for name in ('z', 'xbc', 'dt')], axis=1).T,
    'conv1d.weight': filters[::-1].T[:, None],
    'A_log': own['log_rate'],
    'dt_bias': own['step_bias'],
    'D': own['skip'],
    'norm.weight': params['mamba2/rms_norm']['scale'],
    'out_proj.weight': own['out'].T,
  }
  theirs.load_state_dict({name: torch.tensor(w.copy()) for name, w in weights.items()})
  with torch.no_grad():
    expected = theirs(torch.tensor(x, dtype=torch.float32)).numpy()
  positions = np.tile(np.arange(13, dtype=np.int32), (2, 1))
  y, _ = build().apply(
    *jax.tree.map(np.float32, (params, x, zero(2))), positions, np.ones_like(positions)
  )
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def begun(**options):
  """(the rates exp(log_rate), the steps Δ) of 4,000 heads at initialization."""
  sizes = {'heads': 4000, 'head_width': 1, 'state_size': 1}

  def f():
    mixer, one = layer(**sizes, **options), jnp.ones((1, 1), jnp.int32)
    carry = mixer.initial_carry(1, jnp.float32)
    return mixer(jnp.ones((1, 1, 1)), carry, positions=one, segment_ids=one)

  own = jax.jit(hk.transform(f).init)(jax.random.key(0))['mamba2']
  assert np.all(own['skip'] == 1)
  return np.exp(np.float64(own['log_rate'])), np.log1p(np.exp(np.float64(own['step_bias'])))


def test_rates_and_steps_begin_as_published():
  """Rates uniform in (1, 16), and steps uniform in the logarithm, in (0.001, 0.1)."""
  rates, steps = begun()
  for found, low, high in ((rates, 1, 16), (np.log(steps), np.log(0.001), np.log(0.1))):
    evenly = np.linspace(low, high, len(found))
    np.testing.assert_allclose(np.sort(found), evenly, atol=0.03 * (high - low))


def test_time_constants_lie_between_the_shortest_and_the_horizon():
  rates, steps = begun(shortest=100.0, horizon=1e7, largest_rate=1.0)
  constants = 1 / (rates * steps)
  assert 100 * 0.999 < constants.min() < 110 and 9e6 < constants.max() < 1e7 * 1.001


def test_a_state_of_a_long_time_constant_lasts():
  """4,096 tokens of a state that decays by 1e-7 a token, in float32."""
  params = jax.tree.map(np.array, initial())
  params['mamba2']['log_rate'][:], params['mamba2']['step_bias'][:] = 0, np.log(1e-7)
  params['mamba2']['dt'][:] = 0
  params['mamba2']['xbc'][:] = 0
  carry = zero(1)._replace(state=np.ones((1, HEADS, STATES, HEAD_WIDTH), np.float32))
  positions = np.arange(1, 4097, dtype=np.int32)[None]
  x = np.ones((1, 4096, WIDTH), np.float32)
  _, after = build(slice_size=64).apply(params, x, carry, positions, np.ones_like(positions))
  np.testing.assert_allclose(np.log(np.float64(after.state)), -4096e-7, rtol=0.01)


@pytest.mark.parametrize('strong', [-16.0, -160.0, -1600.0])
def test_strong_decays_cost_weak_ones_no_digit(strong):
  random = np.random.default_rng(0)
  time, heads = 128, 3
  weak = -0.01 * random.random((1, time, heads))
  log_decay = np.where(random.random(weak.shape) < 0.05, strong * random.random(weak.shape), weak)
  log_decay = np.float32(log_decay)
  x, b, c = (np.float32(random.normal(size=(1, time, n))) for n in (heads * 4, 5, 5))
  x = x.reshape(1, time, heads, 4)
  state, expected = np.zeros((heads, 5, 4)), np.zeros((time, heads, 4))
  for t in range(time):
    state = np.exp(np.float64(log_decay[0, t]))[:, None, None] * state
    state += b[0, t][None, :, None] * np.float64(x[0, t])[:, None]
    expected[t] = np.einsum('p,hpk->hk', c[0, t], state)
  before = jnp.zeros((1, heads, 5, 4))
  found, after = jax.jit(functools.partial(ssd, slice_size=64))(
    x, log_decay, b, c, np.zeros((1, time), bool), before
  )
  scale = np.abs(expected).max()
  np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-6 * scale)
  np.testing.assert_allclose(after[0], state, rtol=0, atol=1e-6 * np.abs(state).max())


def test_gradients_are_finite_under_any_decay():
  """Steps of 0 to 1e4, between which documents start, in float32."""
  params, x, carry, positions = jax.tree.map(np.float32, drawn())
  params['mamba2']['dt'] *= 1e3
  positions = positions.astype(np.int32)
  ones = np.ones_like(positions)

  def loss(*point):
    y, after = build().apply(*point, positions, ones)
    return jnp.sum(y) + jnp.sum(after.state)

  for leaf in jax.tree.leaves(jax.grad(loss, argnums=(0, 1, 2))(params, x, carry)):
    assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize('groups', [1, 3])
def test_operations_are_counted(groups):
  counted = []
  biased = groups > 1
  options = {'groups': groups, 'convolution_bias': biased}
  hk.transform(lambda: counted.append(layer(**options).forward_flops(WIDTH))).init(None)
  convolved = INNER + 2 * groups * STATES
  weights = WIDTH * (2 * INNER + convolved + HEADS)
  # The taps; B and C, to and from the state; the scores of a slice, and its values.
  mixing = TAPS * convolved + 2 * STATES * INNER + 4 * (groups * STATES + INNER)
  assert counted == [2 * (weights + mixing) + biased * convolved]


def test_options_that_cannot_be_are_refused():
  for options, message in (
    ({'heads': 0}, 'Mamba2.heads = 0 is out of range'),
    ({'groups': 2}, 'Mamba2.heads=3 must be a multiple of Mamba2.groups=2'),
    ({'slice_size': 0}, 'Mamba2.slice_size = 0 is out of range'),
    ({'shortest': 30, 'horizon': 20}, 'Mamba2.shortest=30 and Mamba2.horizon=20'),
    ({'shortest': 0}, 'Mamba2.shortest = 0 is out of range'),
    ({'largest_rate': 0.5}, 'Mamba2.largest_rate = 0.5 is out of range'),
  ):
    with pytest.raises(ConfigurationError, match=message):
      hk.transform(lambda options=options: layer(**options)).init(None)
