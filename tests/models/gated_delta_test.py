"""Gated DeltaNet against its equations in float64, one token after the other."""

import functools

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.recurrence import gated_delta, lower_inverse
from valkyrie.models.recurrence.convolution import ConvolvedCarry, Tail
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.sharding import ambient, sequence_parallel

WIDTH, HEADS, KEYS, VALUES, TAPS = 6, 2, 4, 3, 3


def layer(**options):
  sizes = {'heads': HEADS, 'key_width': KEYS, 'value_width': VALUES, 'taps': TAPS, 'slice_size': 4}
  return GatedDeltaNet(**{**sizes, **options})


@functools.cache
def build(**options):
  return tiny.mixer(functools.partial(layer, **options))


def stream(time, rows=2, seed=0, value_heads=HEADS):
  """(x, carry, positions, segment_ids): documents of 1 to 6 tokens, the first begun before."""
  random = np.random.default_rng(seed)
  positions, segment_ids = tiny.documents(random, rows, time)
  carry = ConvolvedCarry(
    Tail(random.normal(size=(rows, TAPS - 1, 2 * HEADS * KEYS + value_heads * VALUES))),
    random.normal(size=(rows, value_heads, KEYS, VALUES)),
  )
  return random.normal(size=(rows, time, WIDTH)), carry, positions, segment_ids


def drawn(params, seed=3):
  """Parameters of every size, in float64."""
  random = np.random.default_rng(seed)
  return jax.tree.map(lambda p: random.normal(size=p.shape) * (1 if p.ndim == 1 else 0.7), params)


def parameters(**options):
  x, carry, *where = stream(1, value_heads=options.get('value_heads', HEADS))
  return drawn(build(**options).init(jax.random.key(0), x, carry, *where))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def hard(x):
  return np.clip(2 * x - 0.5, 0, 1)


def by_token(params, x, carry, positions, write=sigmoid, epsilon=1e-6):
  """The equations, for one token, row and head at a time."""
  own = params['gated_delta_net']
  filters = params['gated_delta_net/~/causal_convolution']['filters']
  scale = params['gated_delta_net/norm']['scale']
  tail, state = np.array(carry.tail.inputs), np.array(carry.state)
  y, value_heads = np.zeros_like(x), len(own['log_rate'])
  for row, t in np.ndindex(x.shape[:2]):
    now = x[row, t]
    if positions[row, t] == 0:
      state[row] = 0
    mixed = np.concatenate([now @ own[name] for name in ('query', 'key', 'value')])
    recent = [*tail[row], mixed]
    taps = min(TAPS, positions[row, t] + 1)
    convolved = sum(filters[lag] * recent[-1 - lag] for lag in range(taps))
    tail[row] = recent[1:]
    convolved = convolved * sigmoid(convolved)
    queries, keys, values = np.split(convolved, (HEADS * KEYS, 2 * HEADS * KEYS))
    gates, read = now @ own['gate'], []
    for head in range(value_heads):
      key_head = head // (value_heads // HEADS)
      q, k = (part.reshape(HEADS, KEYS)[key_head] for part in (queries, keys))
      q, k = (part / np.sqrt(part @ part + 1e-6) for part in (q, k))
      v, gate = (part.reshape(value_heads, VALUES)[head] for part in (values, gates))
      beta = write(now @ own['beta'])[head]
      step = np.log1p(np.exp(now @ own['step'] + own['step_bias']))[head]
      decayed = np.exp(-np.exp(own['log_rate'][head]) * step) * state[row, head]
      state[row, head] = decayed + beta * np.outer(k, v - k @ decayed)
      out = q @ state[row, head] / np.sqrt(KEYS)
      out = out / np.sqrt(np.mean(out**2) + epsilon) * scale
      read.append(out * gate * sigmoid(gate))
    y[row, t] = np.concatenate(read) @ own['out']
  return y, ConvolvedCarry(Tail(tail), state)


@pytest.mark.parametrize(('time', 'slice_size'), [(1, 4), (3, 4), (13, 1), (13, 4), (13, 32)])
def test_values_are_those_of_the_equations(time, slice_size):
  x, carry, positions, segment_ids = stream(time, seed=time)
  params = parameters()
  with jax.enable_x64(True):
    found = build(slice_size=slice_size).apply(params, x, carry, positions, segment_ids)
  expected = by_token(params, x, carry, positions)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9), found, expected)


def test_heads_of_values_share_queries_and_keys_and_the_norm_has_an_epsilon():
  options = {'value_heads': 3 * HEADS, 'norm_epsilon': 0.1}
  x, carry, positions, segment_ids = stream(13, value_heads=3 * HEADS)
  params = parameters(**options)
  with jax.enable_x64(True):
    found = build(**options).apply(params, x, carry, positions, segment_ids)
  expected = by_token(params, x, carry, positions, epsilon=0.1)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9), found, expected)


def test_operations_are_counted_by_heads_of_values():
  def beyond_weights(value_heads):
    widths = (value_heads * VALUES, HEADS * KEYS)
    convolved = widths[0] + 2 * widths[1]
    weights = WIDTH * (convolved + 2 * widths[0] + 2 * value_heads)
    mixer = layer(value_heads=value_heads)
    return mixer.forward_flops(WIDTH) - 2 * weights - 2 * TAPS * convolved

  found = hk.transform(lambda: [beyond_weights(n * HEADS) for n in (1, 3)]).apply({}, None)
  assert found[1] == 3 * found[0] > 0


def test_a_double_gate_reaches_negative_eigenvalues():
  x, carry, positions, segment_ids = stream(40)
  params = parameters(write_gate='double')
  assert (2 * sigmoid(x @ params['gated_delta_net']['beta']) > 1).mean() > 0.3
  with jax.enable_x64(True):
    found = build(write_gate='double').apply(params, x, carry, positions, segment_ids)
  expected = by_token(params, x, carry, positions, lambda x: 2 * sigmoid(x))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9), found, expected)


def test_reflections_of_equal_keys_in_float32():
  """β of 2 at one key changes the sign of its value at half of 4,096 tokens, and nearly no size."""
  q, k, v, log_decay, beta, state = rule_inputs(1, 4096, 0)
  k[:], v[:], beta[:] = k[:, :1], 0, 2 * (beta > 0.5)
  reset = np.zeros((1, 4096), bool)
  narrow = [a.astype(np.float32) for a in (q, k, v, log_decay, beta, state)]
  expected, after = rule_by_token(*(a.astype(np.float64) for a in narrow), reset)
  y, found = in_slices_of_64(*narrow, reset)
  assert np.linalg.norm(found - after) < 1e-4 * np.linalg.norm(after)
  assert np.linalg.norm(y - expected) < 1e-4 * np.linalg.norm(expected)


def test_a_hard_gate_writes_nothing_at_all():
  x, carry, positions, segment_ids = stream(40)
  params = drawn(build(write_gate='hard').init(jax.random.key(0), x, carry, positions, segment_ids))
  closed = hard(x @ params['gated_delta_net']['beta']) == 0
  assert 0.4 < closed.mean() < 0.8
  with jax.enable_x64(True):
    found = build(write_gate='hard').apply(params, x, carry, positions, segment_ids)
  expected = by_token(params, x, carry, positions, hard)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9), found, expected)


# Public report fla-org/flash-linear-attention#1142: lengths that a kernel's chunk does not divide.
def test_the_gradient_is_that_of_the_equations():
  """Along random directions of parameters, inputs and carry, by central differences."""
  x, carry, positions, segment_ids = stream(11)
  point = parameters(), x, carry
  random = np.random.default_rng(5)
  weights = jax.tree.map(lambda a: random.normal(size=a.shape), (x, carry))

  def weighted(out):
    return sum(jnp.sum(w * o) for w, o in zip(*map(jax.tree.leaves, (weights, out)), strict=True))

  def at(step, direction):
    moved = jax.tree.map(lambda a, d: a + step * d, point, direction)
    return weighted(by_token(*moved, positions))

  with jax.enable_x64(True):
    gradient = jax.jit(
      jax.grad(lambda *a: weighted(build().apply(*a, positions, segment_ids)), argnums=(0, 1, 2))
    )(*point)
    tiny.check_slopes(gradient, point, at, random)


def rule_inputs(rows, time, decay, seed=0, keys=8, values=5):
  """Arguments of `gated_delta_rule`, float64, with log α about -`decay`."""
  random = np.random.default_rng(seed)
  q, k = random.normal(size=(2, rows, time, HEADS, keys))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v = random.normal(size=(rows, time, HEADS, values))
  log_decay = -decay * random.uniform(0.5, 1.5, (rows, time, HEADS))
  beta = random.uniform(0, 1, (rows, time, HEADS))
  return q, k, v, log_decay, beta, random.normal(size=(rows, HEADS, keys, values))


def rule_by_token(q, k, v, log_decay, beta, state, reset):
  y = np.zeros_like(v)
  for t in range(q.shape[1]):
    state = np.where(reset[:, t, None, None, None], 0, state)
    state = np.exp(log_decay[:, t, :, None, None]) * state
    missing = beta[:, t, :, None] * (v[:, t] - np.einsum('bhk,bhkv->bhv', k[:, t], state))
    state = state + np.einsum('bhk,bhv->bhkv', k[:, t], missing)
    y[:, t] = np.einsum('bhk,bhkv->bhv', q[:, t], state)
  return y, state


in_slices_of_64 = jax.jit(functools.partial(gated_delta.gated_delta_rule, slice_size=64))


def test_long_memories_in_float32():
  """8192 tokens with time constants of 10^6 hardly erase anything: a decay that was rounded to
  float32 once a token would be wrong by 3% of itself, and the state by 2e-4."""
  *rest, beta, state = rule_inputs(1, 8192, 1e-6)
  arguments = *rest, 1e-4 * beta, state
  reset = np.zeros((1, 8192), bool)
  expected, after = rule_by_token(*arguments, reset)
  y, found = in_slices_of_64(*(a.astype(np.float32) for a in arguments), reset)
  assert y.dtype == found.dtype == np.float32
  assert np.linalg.norm(found - after) < 3e-6 * np.linalg.norm(after)
  assert np.linalg.norm(y - expected) < 3e-6 * np.linalg.norm(expected)


def test_a_weak_decay_behind_a_strong_one_keeps_its_digits():
  q, k, v, log_decay, beta, state = rule_inputs(1, 64, 1e-2)
  log_decay[:, ::7] = -5000
  reset = np.zeros((1, 64), bool)
  reset[:, 40] = True
  arguments = q, k, v, log_decay, beta, state
  expected, after = rule_by_token(*arguments, reset)
  y, found = in_slices_of_64(*(a.astype(np.float32) for a in arguments), reset)
  np.testing.assert_allclose(y, expected, rtol=0, atol=3e-6)
  np.testing.assert_allclose(found, after, rtol=0, atol=3e-6)


def test_gradients_are_finite_where_decays_underflow():
  """Also where a document starts at every second token, and for equal keys that erase all."""
  q, k, v, log_decay, beta, state = rule_inputs(2, 16, 1e4)
  k[:] = k[:, :1]
  log_decay[1, ::2], beta[:] = 0, 1
  reset = np.zeros((2, 16), bool)
  reset[0, ::2] = True

  def loss(*arguments):
    y, after = gated_delta.gated_delta_rule(*arguments, reset, slice_size=8)
    return jnp.sum(y**2) + jnp.sum(after**2)

  arguments = [jnp.asarray(a, jnp.float32) for a in (q, k, v, log_decay, beta, state)]
  for gradient in jax.jit(jax.grad(loss, argnums=range(6)))(*arguments):
    assert np.all(np.isfinite(gradient))


@pytest.mark.invariant(6)
def test_pieces_of_a_chunk_on_eight_devices():
  """Values, the carry after the chunk, and gradients, in pieces of 6 tokens: slices of 4, and 2."""
  random = np.random.default_rng(0)
  *arrays, state = rule_inputs(2, 48, 0.05)
  reset = random.random((2, 48)) < [[0.02], [0.3]]
  lengths = np.array([48, 29])
  real = np.arange(48)[None] < lengths[:, None]
  arrays[3], arrays[4] = (np.where(real[..., None], a, 0) for a in arrays[3:])
  reset &= real
  weights = random.normal(size=arrays[2].shape), random.normal(size=state.shape)

  def loss(arrays, state, weights, reset):
    y, after = gated_delta.gated_delta_rule(*arrays, state, reset, slice_size=4)
    counts = sequence_parallel.index() == 0 if sequence_parallel.axes() else True
    total = jnp.sum(weights[0] * y) + jnp.where(counts, jnp.sum(weights[1] * after), 0)
    return total, (y, after)

  def body(arrays, state, weights, reset):
    state = jnp.where(lax.axis_index('t') > 0, 77, state)
    with ambient.within(time=('t',)):
      (_, (y, after)), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        arrays, state, weights, reset
      )
    return y, after[None], (gradient[0], lax.psum(gradient[1], 't'))

  with jax.enable_x64(True):
    cut, whole = PartitionSpec(None, 't'), PartitionSpec()
    y, after, gradient = jax.jit(
      jax.shard_map(
        body,
        mesh=Mesh(np.array(jax.devices()), ('t',)),
        in_specs=(cut, whole, (cut, whole), cut),
        out_specs=(cut, PartitionSpec('t'), (cut, whole)),
        check_vma=False,
      )
    )(arrays, state, weights, reset)
    (_, expected), expected_gradient = jax.jit(
      jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    )(arrays, state, weights, reset)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-10),
    ((y, after[0]), gradient),
    (expected, expected_gradient),
  )


def test_the_inverse_of_the_worst_triangle():
  """Equal keys that erase all: the powers of L reach 10^18, its inverse has entries of 1."""
  lower = np.tril(np.ones((64, 64), np.float32), -1)
  inverse = np.eye(64) - np.eye(64, k=-1)
  np.testing.assert_allclose(jax.jit(lower_inverse.unit_lower_inverse)(lower), inverse, atol=1e-6)


def test_steps_at_initialization():
  own = build(heads=512, shortest=10.0, horizon=1e6).init(
    jax.random.key(0),
    np.zeros((1, 1, WIDTH)),
    ConvolvedCarry(Tail(np.zeros((1, 2, 512 * 11))), np.zeros((1, 512, KEYS, VALUES))),
    *np.ones((2, 1, 1), np.int32),
  )['gated_delta_net']
  constants = -np.log(np.log1p(np.exp(np.float64(own['step_bias']))))
  assert np.log(10) <= constants.min() < np.log(11)
  assert np.log(0.9e6) < constants.max() <= np.log(1.00001e6)
  np.testing.assert_allclose(np.median(constants), np.log(1e7) / 2, rtol=0.1)
  rates = np.exp(own['log_rate'])
  assert 0.999 < rates.min() < 1.1
  assert 15 < rates.max() < 16.001


@pytest.mark.invariant(8)
def test_dtypes_under_bfloat16():
  x, carry, *where = stream(5)
  params = jax.tree.map(lambda p: p.astype(np.float32), parameters())
  carry = ConvolvedCarry(
    Tail(jnp.asarray(carry.tail.inputs, jnp.bfloat16)), carry.state.astype(np.float32)
  )
  y, after = build().apply(params, jnp.asarray(x, jnp.bfloat16), carry, *where)
  assert (y.dtype, after.tail.inputs.dtype) == (jnp.bfloat16, jnp.bfloat16)
  assert after.state.dtype == jnp.float32
  expected, (_, state) = by_token(params, x, carry, where[0])
  assert np.linalg.norm(np.asarray(y, np.float64) - expected) < 3e-2 * np.linalg.norm(expected)
  assert np.linalg.norm(after.state - state) < 1e-2 * np.linalg.norm(state)


@pytest.mark.invariant(8)
def test_gradients_in_bfloat16_are_those_of_float64_up_to_its_rounding():
  """States and their gradients are stored in bfloat16, but summed in float32."""
  random = np.random.default_rng(3)
  q, k, v, log_decay, beta, state = (np.float32(each) for each in rule_inputs(2, 16, 0.05))
  narrow = jnp.asarray(v, jnp.bfloat16)
  reset = np.zeros((2, 16), bool)
  reset[0, [2, 9]] = True
  weights = [np.float32(random.normal(size=array.shape)) for array in (v, state)]

  def loss(point):
    y, after = gated_delta.gated_delta_rule(*point, reset, slice_size=4)
    return jnp.sum(weights[0] * y) + jnp.sum(weights[1] * after)

  point = q, k, narrow, log_decay, beta, state
  gradients = jax.jit(jax.grad(loss))(point)
  with jax.enable_x64(True):
    expected = jax.jit(jax.grad(loss))(tuple(np.float64(each) for each in point))
  for gradient, start, value in zip(gradients, point, expected, strict=True):
    assert gradient.dtype == start.dtype
    error = np.linalg.norm(np.float64(gradient) - value) / np.linalg.norm(value)
    assert 0 < error < 2**-6


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'heads': 0}, 'GatedDeltaNet.heads = 0 is out of range'),
    ({'value_heads': 3}, 'value_heads=3 must be a multiple of GatedDeltaNet.heads=2'),
    ({'norm_epsilon': -1.0}, 'GatedDeltaNet.norm_epsilon = -1.0 is out of range'),
    ({'slice_size': 48}, 'GatedDeltaNet.slice_size=48 must be a power of two'),
    ({'horizon': 1.0}, r'GatedDeltaNet.shortest=10 and GatedDeltaNet.horizon=1:'),
    ({'largest_rate': 0.5}, 'GatedDeltaNet.largest_rate = 0.5 is out of range'),
    ({'shortest': 0.0}, 'GatedDeltaNet.shortest = 0.0 is out of range'),
    (
      {'write_gate': 'relu'},
      "write_gate='relu' is unknown. Use one of .'sigmoid', 'hard', 'double'.",
    ),
  ],
)
def test_options_that_cannot_be_are_refused_when_the_layer_is_made(options, message):
  with pytest.raises(ConfigurationError, match=message):
    hk.transform(lambda: layer(**options)).init(None)
