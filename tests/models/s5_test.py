"""The S5 layer against its equations in complex128, one step after the other."""

import functools

import haiku as hk
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import s5_reference

from valkyrie.errors import ConfigurationError
from valkyrie.models.matrices import Matrix
from valkyrie.models.recurrence import scan
from valkyrie.models.recurrence.scan import Complex
from valkyrie.models.s5 import init, state_space
from valkyrie.models.s5 import layer as s5

WIDTH, STATES, BLOCKS = 12, 8, 2


@functools.cache
def build(states=STATES, hippo_blocks=BLOCKS, **options):
  """(init, apply) of a layer, compiled."""

  def f(x, carry, positions, segment_ids=None):
    layer = s5.S5(states, hippo_blocks=hippo_blocks, **{'horizon': 200.0, **options})
    if segment_ids is None:
      segment_ids = jnp.ones_like(positions)
    return layer(x, carry, positions=positions, segment_ids=segment_ids)

  pure = hk.transform(f)
  return hk.Transformed(jax.jit(pure.init), jax.jit(pure.apply))


def zero(rows, states=STATES):
  return Complex(jnp.zeros((rows, states)), jnp.zeros((rows, states)))


def inputs(rows, time, seed=0):
  return np.random.default_rng(seed).normal(size=(rows, time, WIDTH)).astype(np.float32)


def gelu(x):
  """The form that the reference implementation takes: with tanh."""
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def distance(found, expected):
  """The relative 2-norm."""
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize('form', scan.FORMS)
@pytest.mark.parametrize('method', state_space.DISCRETIZATIONS)
def test_16k_steps_in_float32_against_float64(method, form):
  """P = 64 in J = 2 blocks: HiPPO matrices of 64 states, as in the largest model.

  Fast states have a bilinear Λ̄ near -1 and last long. Their growth is near -2, where half a unit of
  the last place is 2^-24.
  """
  states = 64
  u, positions = inputs(1, 16384), np.arange(5, 16389, dtype=np.int32)[None]
  x0 = np.random.default_rng(1).normal(size=(2, 1, states)).astype(np.float32)
  layer = build(states, discretization=method, horizon=2000.0, scan_form=form)
  carry = Complex(jnp.asarray(x0[0]), jnp.asarray(x0[1]))
  params = layer.init(jax.random.key(0), u[:, :4], carry, positions[:, :4])
  # Without optimization, XLA contracts other products, whose roundings alone reach the bound.
  options = {'xla_backend_optimization_level': 1} if method == 'bilinear' else None
  compiled = layer.apply.lower(params, None, u, carry, positions).compile(options)
  y, after = compiled(params, None, u, carry, positions)
  system = s5_reference.system_of(params['s5'])
  expected, x = s5_reference.layer(
    system, u.astype(np.float64), x0[0] + 1j * x0[1], positions, method=method
  )
  assert distance(y, gelu(expected)) < 2e-4
  bound = 16384 * 2**-24 if method == 'bilinear' else 2e-5
  assert distance(after.re + 1j * after.im, x) < bound


@pytest.mark.parametrize('form', scan.FORMS)
@pytest.mark.parametrize('method', state_space.DISCRETIZATIONS)
def test_time_constants_of_ten_million_tokens_are_right_to_one_percent(method, form):
  """The decay of a state over 65,536 tokens in chunks of 4,096, from the layer's own parameters."""
  states, chunk = 64, 4096
  layer = build(states, discretization=method, shortest=1e5, horizon=1e7, scan_form=form)
  u, positions = np.zeros((1, chunk, WIDTH), np.float32), np.arange(1, chunk + 1)[None]
  params = layer.init(jax.random.key(0), u, zero(1, states), positions)
  system = s5_reference.system_of(params['s5'])
  decay, _ = s5_reference.discretized(system['eigenvalues'], np.exp(system['log_step']), method)
  carry = Complex(jnp.ones((1, states)), jnp.zeros((1, states)))
  for _ in range(16):
    _, carry = layer.apply(params, None, u, carry, positions)
  modulus = np.hypot(*np.float64(carry))[0]
  np.testing.assert_allclose(np.log(modulus), 16 * chunk * np.log(np.abs(decay)), rtol=0.01)
  assert -1 / np.log(np.abs(decay)).max() > 8e6


@pytest.mark.parametrize('method', state_space.DISCRETIZATIONS)
@pytest.mark.parametrize('bidirectional', [False, True])
def test_selective_steps_are_those_of_the_equations(method, bidirectional):
  layer = build(
    discretization=method, selective=True, activation='linear', bidirectional=bidirectional
  )
  u, start = inputs(2, 12), np.random.default_rng(2).normal(size=(2, 2, STATES)).astype(np.float32)
  positions = np.stack([np.r_[3:9, 0:6], np.r_[0:12]]).astype(np.int32)
  carry = () if bidirectional else Complex(*map(jnp.asarray, start))
  params = layer.init(jax.random.key(0), u, carry, positions)
  weights = np.random.default_rng(3).normal(size=(WIDTH, STATES)).astype(np.float32)
  params['s5']['step'] = weights
  y, after = layer.apply(params, None, u, carry, positions)
  expected, x = s5_reference.layer(
    s5_reference.system_of(params['s5']),
    u.astype(np.float64),
    np.zeros((2, STATES)) if bidirectional else start[0] + 1j * start[1],
    positions,
    method=method,
    step_weights=weights,
    bidirectional=bidirectional,
  )
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
  if not bidirectional:
    np.testing.assert_allclose(after.re + 1j * after.im, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('activation', s5.ACTIVATIONS)
def test_activations_are_those_of_the_reference_implementation(activation):
  random = np.random.default_rng(0)
  y = random.normal(size=(2, 3, WIDTH))
  gate, value = random.normal(size=(2, WIDTH, WIDTH))
  masks = [random.integers(0, 2, (2, 1, WIDTH)) for _ in range(2)]
  g = gelu(y) * masks[0]
  expected = {
    'linear': lambda: y * masks[0],
    'gelu': lambda: g,
    'half_glu1': lambda: masks[1] * g * sigmoid(g @ gate),
    'half_glu2': lambda: masks[1] * y * sigmoid(g @ gate),
    'full_glu': lambda: masks[1] * (g @ value) * sigmoid(g @ gate),
  }[activation]()
  draws = iter(masks)
  names = {'gate': gate, 'value': value}
  weights = [jnp.asarray(names[name], jnp.float32) for name in s5.ACTIVATIONS[activation]]
  found = s5.activate(
    jnp.asarray(y, jnp.float32), weights, activation=activation, drop=lambda x: x * next(draws)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.invariant(1)
@hypothesis.given(
  lengths=st.lists(st.sampled_from((1, 3, 8)), min_size=1, max_size=4),
  documents=st.lists(st.integers(1, 12), min_size=1, max_size=4),
  padding=st.integers(0, 2),
  options=st.sampled_from(
    [
      {'activation': 'gelu', 'conj_sym': True, 'clip_eigenvalues': False},
      {'activation': 'full_glu', 'conj_sym': False, 'clip_eigenvalues': True},
    ]
  ),
  dtype=st.sampled_from(['float32', 'bfloat16']),
)
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_chunked_equals_whole(lengths, documents, padding, options, dtype):
  """In chunks of these lengths, whatever documents they cut, the equations of the whole row.

  The first document began before the row, and the last chunk ends in padding.
  """
  time = sum(lengths)
  padding = min(padding, lengths[-1] - 1)
  counts = np.concatenate([np.arange(n) for n in (*documents, time)])[:time]
  counts[: documents[0]] += 9
  positions = np.where(np.arange(time) < time - padding, counts, 0)[None].astype(np.int32)
  segment_ids = (np.arange(time) < time - padding)[None].astype(np.int32)
  u = inputs(1, time).astype(jnp.dtype(dtype))
  start = Complex(*np.random.default_rng(2).normal(size=(2, 1, STATES)).astype(np.float32))
  layer = build(**options)
  params = layer.init(jax.random.key(0), jnp.ones((1, 1, WIDTH)), start, positions[:, :1])
  own = params['s5'] = {**params['s5'], 'lambda_re': jnp.linspace(-0.5, 0.3, STATES)}

  carry, out, begin = start, [], 0
  for length in lengths:
    piece = slice(begin, begin + length)
    arrays = (u[:, piece], carry, positions[:, piece], segment_ids[:, piece])
    y, carry = layer.apply(params, None, *arrays)
    out.append(np.asarray(y, np.float64))
    begin += length
  whole = np.concatenate(out, axis=1)[:, : time - padding]

  expected, last = s5_reference.layer(
    s5_reference.system_of(own),
    u[:, : time - padding].astype(np.float64),
    start.re + 1j * start.im,
    positions[:, : time - padding],
    conj_sym=options['conj_sym'],
    clip=options['clip_eigenvalues'],
  )
  expected = gelu(expected)
  if options['activation'] == 'full_glu':
    expected = (expected @ own['value']) * sigmoid(expected @ own['gate'])
  tolerance = {'float32': 1e-5, 'bfloat16': 2e-2}[dtype]
  assert distance(whole, expected) < tolerance
  assert distance(carry.re + 1j * carry.im, last) < tolerance


def test_bidirectional_reads_each_document_from_both_ends_and_carries_nothing():
  layer = build(bidirectional=True)
  positions = np.stack([np.r_[0:4, 0:1, 0:7], np.r_[0:12]]).astype(np.int32)
  segment_ids = np.ones_like(positions)
  segment_ids[0, 10:] = 0
  u = inputs(2, 12)
  params = layer.init(jax.random.key(0), u, (), positions, segment_ids)
  y, carry = layer.apply(params, None, u, (), positions, segment_ids)
  assert carry == ()
  expected, _ = s5_reference.layer(
    s5_reference.system_of(params['s5']),
    u.astype(np.float64),
    np.zeros((2, STATES), complex),
    np.where(segment_ids == 0, 0, positions),  # no document reads the padding
    bidirectional=True,
  )
  real = segment_ids > 0
  np.testing.assert_allclose(y[real], gelu(expected)[real], rtol=1e-4, atol=1e-5)


def test_parameters_begin_as_the_options_say():
  layer = build(64, 4, conj_sym=False, shortest=2 / 0.3, horizon=10.0, output_init='complex_normal')
  params = layer.init(jax.random.key(0), inputs(1, 1), zero(1, 64), np.zeros((1, 1), np.int32))[
    's5'
  ]
  eigenvalues, _ = init.block_diagonal(64, 4, conj_sym=False)
  np.testing.assert_allclose(params['lambda_re'], eigenvalues.real, rtol=1e-6)
  np.testing.assert_allclose(params['lambda_im'], eigenvalues.imag, rtol=1e-6, atol=1e-6)
  np.testing.assert_allclose(np.exp(params['log_step']), 0.25, atol=0.051)
  np.testing.assert_allclose(np.std(params['c']), 0.5**0.5, rtol=0.1)


def test_step_rescale_reads_a_signal_at_half_its_rate():
  """Each input held for two steps, and the same at twice the step: a held input is what ZOH means.

  So every second state of the one is a state of the other.
  """
  held, positions = np.repeat(inputs(1, 8), 2, axis=1), np.arange(1, 17, dtype=np.int32)[None]
  fast, slow = build(), build(step_rescale=2.0)
  params = fast.init(jax.random.key(0), held, zero(1), positions)
  _, expected = fast.apply(params, None, held, zero(1), positions)
  _, found = slow.apply(params, None, held[:, ::2], zero(1), positions[:, ::2])
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_draw_of_dropout_holds_for_all_tokens_of_a_chunk():
  layer = build(dropout=0.5)
  u, positions = inputs(2, 9), np.arange(18, dtype=np.int32).reshape(2, 9)
  params = layer.init(jax.random.key(0), u, zero(2), positions)
  y, carry = layer.apply(params, jax.random.key(1), u, zero(2), positions)
  plain, plain_carry = layer.apply(params, None, u, zero(2), positions)
  dropped = np.all(y == 0, axis=1)
  assert 0 < dropped.sum() < dropped.size
  assert np.any(dropped[0] != dropped[1])
  np.testing.assert_allclose(y, np.where(dropped[:, None], 0, 2 * plain), rtol=1e-4)
  jax.tree.map(np.testing.assert_array_equal, carry, plain_carry)


@pytest.mark.invariant(8)
def test_dtypes_under_bfloat16():
  u = jnp.ones((1, 9, WIDTH), jnp.bfloat16)
  positions = jnp.arange(9)[None]
  layer = build(activation='full_glu')
  params = layer.init(jax.random.key(0), u, zero(1), positions)
  y, carry = layer.apply(params, None, u, zero(1), positions)
  names = {'lambda_re', 'lambda_im', 'b', 'c', 'd', 'log_step', 'gate', 'value'}
  assert params['s5'].keys() == names
  p = params['s5']
  system = state_space.StateSpace(
    Complex(p['lambda_re'], p['lambda_im']),
    Matrix(p['b']),
    Matrix(p['c']),
    p['d'],
    p['log_step'],
  )
  discrete = state_space.discretized(system, method='zoh')
  before, after = state_space.read_chunk(
    system, discrete, u, zero(1), positions == 0, jnp.array([9]), form='sequential'
  )
  of_float32 = (params, carry, discrete, before, after)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(of_float32)} == {'float32'}
  assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'discretization': 'foh'}, r"S5.discretization='foh' is unknown.*'zoh', 'bilinear'"),
    ({'output_init': 'hippo'}, "S5.output_init='hippo' is unknown"),
    ({'activation': 'relu'}, "S5.activation='relu' is unknown"),
    ({'scan_form': 'fft'}, "S5.scan_form='fft' is unknown"),
    ({'hippo_blocks': 5}, 'S5.state_size=8 must be a multiple of S5.hippo_blocks=5'),
    ({'shortest': 30, 'horizon': 20}, 'S5.shortest=30 and S5.horizon=20'),
    ({'step_rescale': 0.0}, 'S5.step_rescale = 0.0 is out of range'),
    ({'dropout': 1.0}, 'S5.dropout = 1.0 is out of range'),
  ],
)
def test_options_that_cannot_be_are_refused_when_the_layer_is_made(options, message):
  with pytest.raises(ConfigurationError, match=message):
    hk.transform(lambda: s5.S5(**{'state_size': STATES, **options})).init(None)


def test_operations_are_counted():
  def flops(**options):
    counted = []
    hk.transform(lambda: counted.append(s5.S5(8, **options).forward_flops(12))).init(None)
    return counted[0]

  one_way = 2 * 12 * 16 + 8 * 8 + 2 * 16 * 12  # B, the recurrence, C
  assert flops() == one_way
  assert flops(activation='full_glu') == one_way + 2 * 2 * 12 * 12
  assert flops(bidirectional=True) == one_way + 8 * 8 + 2 * 16 * 12
