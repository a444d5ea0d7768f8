"""HiPPO-LegS, what is drawn, and the discretizations, against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from valkyrie.models.recurrence.scan import Complex
from valkyrie.models.s5 import init
from valkyrie.models.s5.state_space import DISCRETIZATIONS


def hippo_legs(size):
  """Entry by entry (Gu et al. 2020, theorem 2): A_nk for n, k counted from 0."""
  a = np.zeros((size, size))
  for n in range(size):
    for k in range(size):
      if n > k:
        a[n, k] = -np.sqrt((2 * n + 1) * (2 * k + 1))
      elif n == k:
        a[n, k] = -(n + 1)
  return a


def normal_part(size):
  p = np.sqrt(np.arange(size) + 0.5)
  return hippo_legs(size) + np.outer(p, p)


@pytest.mark.parametrize('size', [1, 7, 16, 64])
def test_eigenpairs_are_those_of_the_dense_matrix(size):
  dense = normal_part(size)
  eigenvalues, vectors = init.hippo_legs_normal(size)
  np.testing.assert_allclose(vectors.conj().T @ vectors, np.eye(size), atol=1e-12)
  np.testing.assert_allclose(dense @ vectors, vectors * eigenvalues, atol=1e-10 * size)
  general = scipy.linalg.eigvals(dense)
  general = general[np.argsort(general.imag)]
  np.testing.assert_allclose(eigenvalues, general, atol=1e-10 * size)


@pytest.mark.parametrize('conj_sym', [True, False])
def test_blocks_are_copies_on_the_diagonal(conj_sym):
  """With V the eigenvectors, V diag(λ) Vᴴ and its conjugate are the matrix of three blocks."""
  states, blocks = 6, 3
  eigenvalues, vectors = init.block_diagonal(states, blocks, conj_sym=conj_sym)
  vectors = np.kron(np.eye(blocks), vectors)
  dense = scipy.linalg.block_diag(*[normal_part(4 if conj_sym else 2)] * blocks)
  rebuilt = vectors * eigenvalues @ vectors.conj().T
  np.testing.assert_allclose(2 * rebuilt.real if conj_sym else rebuilt, dense, atol=1e-12)
  assert eigenvalues.shape == (states,)


@pytest.mark.parametrize('conj_sym', [True, False])
def test_b_is_a_real_matrix_in_the_basis_of_eigenvectors(conj_sym):
  _, vectors = init.block_diagonal(64, 4, conj_sym=conj_sym)
  b = init.input_matrix(jax.random.key(0), vectors, 4, 300)
  back = np.kron(np.eye(4), vectors) @ (
    np.asarray(b.re, np.float64) + 1j * np.asarray(b.im, np.float64)
  )
  if conj_sym:
    back = 2 * back.real
  np.testing.assert_allclose(back.imag, 0, atol=1e-6)
  published = jax.nn.initializers.lecun_normal()(jax.random.key(1), back.shape)
  np.testing.assert_allclose(np.std(back), np.std(published), rtol=0.02)
  np.testing.assert_allclose(np.abs(back).max(), np.abs(published).max(), rtol=0.02)


def test_c_has_the_distributions_of_the_reference_implementation():
  """As published: an array [D, N, 2] of real and imaginary parts, whose fan-in JAX works out."""
  states, width = 64, 300
  _, vectors = init.block_diagonal(states, 4, conj_sym=False)
  lecun_normal, key = jax.nn.initializers.lecun_normal(), jax.random.key(1)
  row = lecun_normal(key, (1, states, 2))
  published = {
    'trunc_standard_normal': np.stack(
      [lecun_normal(k, row.shape) for k in jax.random.split(key, 100)]
    ),
    'lecun_normal': lecun_normal(key, (width, states, 2)),
    'complex_normal': jax.nn.initializers.normal(0.5**0.5)(key, (width, states, 2)),
  }
  for method in init.OUTPUT_INITS:
    drawn = init.output_matrix(jax.random.key(0), vectors, 4, width, method=method)
    c = np.asarray(drawn.re) + 1j * np.asarray(drawn.im)
    if method != 'complex_normal':
      c = c @ np.kron(np.eye(4), vectors).conj().T
    expected = np.std(published[method])
    np.testing.assert_allclose([np.std(c.real), np.std(c.imag)], expected, rtol=0.03)
    if method != 'complex_normal':
      limit = np.abs(published[method]).max()
      np.testing.assert_allclose(np.abs(c.real).max(), limit, rtol=0.02)


def test_under_conjugate_symmetry_c_has_a_column_for_each_stored_state():
  _, vectors = init.block_diagonal(6, 3)
  for method in init.OUTPUT_INITS:
    c = init.output_matrix(jax.random.key(0), vectors, 3, 5, method=method)
    assert c.re.shape == c.im.shape == (5, 6)


def discretized(eigenvalues, step, method):
  growth, gain = DISCRETIZATIONS[method](
    Complex(jnp.asarray(eigenvalues.real), jnp.asarray(eigenvalues.imag)),
    jnp.full(eigenvalues.shape, step),
  )
  gain = gain if isinstance(gain, Complex) else Complex(gain, 0 * gain)
  decay, gain = (np.asarray(z.re) + 1j * np.asarray(z.im) for z in (growth, gain))
  return 1 + decay, gain


@pytest.mark.parametrize('step', [0.007, 0.7])
@pytest.mark.parametrize('method', ['zoh', 'bilinear'])
def test_discretizations_are_those_of_the_dense_system(method, step):
  """ZOH by the exponential of [[A, B], [0, 0]], the trapezoidal rule by solving for x_t."""
  size = 8
  a, b = normal_part(size), np.random.default_rng(0).normal(size=(size, 3))
  if method == 'zoh':
    augmented = np.zeros((size + 3, size + 3))
    augmented[:size] = np.concatenate([a, b], axis=1)
    a_bar, b_bar = np.split(scipy.linalg.expm(step * augmented)[:size], [size], axis=1)
  else:
    implicit = np.eye(size) - step * a / 2
    a_bar = np.linalg.solve(implicit, np.eye(size) + step * a / 2)
    b_bar = np.linalg.solve(implicit, step * b)
  eigenvalues, vectors = init.hippo_legs_normal(size)
  with jax.enable_x64(True):
    decay, gain = discretized(eigenvalues, step, method)
  np.testing.assert_allclose(vectors * decay @ vectors.conj().T, a_bar, atol=1e-12)
  np.testing.assert_allclose(vectors * gain @ vectors.conj().T @ b, b_bar, atol=1e-12)


def test_small_steps_keep_their_digits():
  """In float32, exp(z) - 1 would lose all but three digits of the gain at Δ = 1e-5."""
  _, gain = discretized(np.array([-0.5 + 3j], np.complex64), np.float32(1e-5), 'zoh')
  np.testing.assert_allclose(gain.real, 1e-5 * (1 - 0.25e-5), rtol=3e-6)


def test_normalized_states_are_as_large_as_their_inputs():
  """For white inputs or for a constant one, whichever makes them larger, at any time constant."""
  eigenvalues = np.array([-0.5 + 3j, -0.5 + 40j, -2.0, -0.5 + 4000j])
  with jax.enable_x64(True):
    for step in (1e-7, 1e-3, 0.5):
      decay, gain = discretized(eigenvalues, step, 'normalized')
      np.testing.assert_allclose(decay, np.exp(eigenvalues * step), rtol=1e-12)
      energy = np.abs(gain) ** 2 / -np.expm1(2 * eigenvalues.real * step)
      mean = np.abs(gain / np.expm1(eigenvalues * step))
      np.testing.assert_allclose(np.maximum(energy, mean**2), 1, rtol=1e-9)


def test_the_gradient_of_an_endless_memory_is_finite():
  """A selective step of softplus(-7 + s), from steps whose growth underflows to ones near 1."""
  eigenvalues = Complex(jnp.array([-0.5, -0.5, -2.0]), jnp.array([3.0, 400.0, 0.0]))

  def read(s, eigenvalues):
    growth, gain = DISCRETIZATIONS['normalized'](eigenvalues, jax.nn.softplus(-7 + s))
    return jnp.sum(gain) + jnp.sum(growth.re) + jnp.sum(growth.im)

  for s in (-200.0, -40.0, -34.0, -20.0, 0.0, 8.0):
    for leaf in jax.tree.leaves(jax.grad(read, (0, 1))(jnp.float32(s), eigenvalues)):
      assert np.all(np.isfinite(leaf)), s


def test_time_constants_spread_from_the_shortest_to_the_longest():
  rates = np.full(1000, 0.5)
  constants = np.exp(-init.log_steps(jax.random.key(0), rates, 20.0, 2e6)) / rates
  assert 20 <= constants.min() < 21
  assert 1.9e6 < constants.max() <= 2e6 * (1 + 1e-6)
  np.testing.assert_allclose(np.median(constants), (20 * 2e6) ** 0.5, rtol=0.4)
