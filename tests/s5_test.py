"""The S5 layer against its equations in complex128, one step after the other."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models import s5, scan
from valkyrie.models.scan import Complex

WIDTH, STATES, BLOCKS = 12, 8, 2


def system_of(params):
  """The parameters of `S5` as complex128: Λ, B, C, D, Δ."""
  p = {name: np.asarray(x, np.float64) for name, x in params['s5'].items()}
  return (
    p['lambda_re'] + 1j * p['lambda_im'],
    p['b'][0] + 1j * p['b'][1],
    p['c'][0] + 1j * p['c'][1],
    p['d'],
    np.exp(p['log_step']),
  )


def reference(params, u, initial, positions, method):
  """y_t = 2 Re(C x_t) + D u_t; the conjugate states are added explicitly, not by a factor."""
  eigenvalues, b, c, d, step = system_of(params)
  if method == 'zoh':
    decay = np.exp(eigenvalues * step)
    b_bar = ((decay - 1) / eigenvalues)[:, None] * b
  else:
    decay = (1 + eigenvalues * step / 2) / (1 - eigenvalues * step / 2)
    b_bar = (step / (1 - eigenvalues * step / 2))[:, None] * b
  x, out = initial, []
  for t in range(u.shape[1]):
    x = np.where(positions[:, t, None] == 0, 0, decay * x) + u[:, t] @ b_bar.T
    y = x @ c.T + x.conj() @ c.conj().T + d * u[:, t]
    assert np.abs(y.imag).max() < 1e-9
    out.append(y.real)
  return np.stack(out, axis=1), x


def build(**options):
  def f(x, carry, positions):
    layer = s5.S5(STATES, blocks=BLOCKS, step_range=(0.01, 0.1), **options)
    return layer(x, carry, positions=positions, segment_ids=jnp.ones_like(positions))

  pure = hk.transform(f)
  return hk.Transformed(jax.jit(pure.init), jax.jit(pure.apply))


def gelu(x):
  return np.asarray(jax.nn.gelu(jnp.asarray(x)))


@pytest.mark.parametrize('form', scan.FORMS)
@pytest.mark.parametrize('method', ['zoh', 'bilinear'])
def test_16k_steps_in_float32_against_float64(method, form):
  time = 16384 if form == 'sequential' else 4096
  random = np.random.default_rng(0)
  u = random.normal(size=(1, time, WIDTH)).astype(np.float32)
  x0 = random.normal(size=(2, 1, STATES)).astype(np.float32)
  positions = np.arange(5, time + 5, dtype=np.int32)[None]
  layer = build(discretisation=method, scan_form=form)
  carry = Complex(jnp.asarray(x0[0]), jnp.asarray(x0[1]))
  params = layer.init(jax.random.key(0), u[:, :4], carry, positions[:, :4])
  y, after = layer.apply(params, None, u, carry, positions)
  expected, x = reference(params, u.astype(np.float64), x0[0] + 1j * x0[1], positions, method)
  expected = gelu(expected)
  assert np.linalg.norm(y - expected) < 2e-4 * np.linalg.norm(expected)
  np.testing.assert_allclose(after.re + 1j * after.im, x, rtol=1e-3, atol=1e-3)


def test_resets_and_chunks_in_float64():
  with jax.enable_x64(True):
    random = np.random.default_rng(0)
    u = random.normal(size=(2, 30, WIDTH))
    positions = np.stack([np.r_[0:11, 0:19], np.r_[4:20, 0:14]]).astype(np.int32)
    layer = build()
    x0 = random.normal(size=(2, 2, STATES))
    carry = Complex(jnp.asarray(x0[0]), jnp.asarray(x0[1]))
    params = layer.init(jax.random.key(0), u, carry, positions)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    y = []
    for begin, end in ((0, 7), (7, 8), (8, 30)):
      out, carry = s5.state_space(
        s5.StateSpace(
          Complex(wide['s5']['lambda_re'], wide['s5']['lambda_im']),
          Complex(*wide['s5']['b']),
          Complex(*wide['s5']['c']),
          wide['s5']['d'],
          wide['s5']['log_step'],
        ),
        jnp.asarray(u[:, begin:end]),
        carry,
        jnp.asarray(positions[:, begin:end] == 0),
        method='zoh',
        form='sequential',
      )
      carry = carry.map(lambda part: part[:, -1])
      y.append(out)
    expected, x = reference(params, u, x0[0] + 1j * x0[1], positions, 'zoh')
    np.testing.assert_allclose(np.concatenate(y, axis=1), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(carry.re + 1j * carry.im, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('activation', ['gelu', 'half_glu1', 'half_glu2', 'full_glu'])
def test_activations_are_those_of_the_reference(activation):
  u = np.random.default_rng(0).normal(size=(1, 9, WIDTH)).astype(np.float32)
  positions = np.arange(9, dtype=np.int32)[None]
  zero = Complex(jnp.zeros((1, STATES)), jnp.zeros((1, STATES)))
  layer = build(activation=activation)
  params = layer.init(jax.random.key(0), u, zero, positions)
  y, _ = layer.apply(params, None, u, zero, positions)
  plain, _ = reference(params, u, np.zeros((1, STATES), complex), positions, 'zoh')
  active = gelu(plain)
  if activation == 'gelu':
    expected = active
  else:
    gate = jax.nn.sigmoid(active @ params['s5']['gate'])
    value = {
      'half_glu1': lambda: active,
      'half_glu2': lambda: plain,
      'full_glu': lambda: active @ params['s5']['value'],
    }[activation]()
    expected = value * gate
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_parameters_state_and_output_dtypes_under_bfloat16():
  u = jnp.ones((1, 9, WIDTH), jnp.bfloat16)
  positions = jnp.arange(9)[None]
  zero = Complex(jnp.zeros((1, STATES)), jnp.zeros((1, STATES)))
  layer = build()
  params = layer.init(jax.random.key(0), u, zero, positions)
  y, carry = layer.apply(params, None, u, zero, positions)
  assert {leaf.dtype.name for leaf in jax.tree.leaves((params, carry))} == {'float32'}
  assert y.dtype == jnp.bfloat16
