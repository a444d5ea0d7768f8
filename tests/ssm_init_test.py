"""HiPPO-LegS and the discretisations against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from valkyrie.models import ssm_init
from valkyrie.models.scan import Complex


def test_eigenpairs_rebuild_the_normal_part_of_hippo_legs():
  size = 16
  n = np.arange(size)
  legs = -np.sqrt(np.outer(2 * n + 1, 2 * n + 1))
  legs = np.tril(legs, -1) - np.diag(n + 1)
  normal = legs + np.outer(np.sqrt(n + 0.5), np.sqrt(n + 0.5))
  eigenvalues, vectors = ssm_init.hippo_legs_normal(size)
  assert eigenvalues.shape == (size // 2,)
  assert np.all(eigenvalues.imag > 0)
  np.testing.assert_allclose(eigenvalues.real, -0.5, atol=1e-12)
  rebuilt = 2 * (vectors * eigenvalues @ vectors.conj().T).real
  np.testing.assert_allclose(rebuilt, normal, atol=1e-10)


def test_blocks_are_copies_on_the_diagonal():
  one, vectors_of_one = ssm_init.block_diagonal(4, 1)
  three, vectors = ssm_init.block_diagonal(12, 3)
  np.testing.assert_array_equal(three, np.tile(one, 3))
  np.testing.assert_array_equal(vectors, np.kron(np.eye(3), vectors_of_one))
  with pytest.raises(ValueError, match='12 stored states cannot be divided into 5'):
    ssm_init.block_diagonal(12, 5)


def test_zoh_is_the_exact_solution_for_a_held_input():
  """x(Δ) for x' = λx + u, u constant: the matrix exponential of the augmented system."""
  with jax.enable_x64(True):
    eigenvalue, step = -0.5 + 3.0j, 0.07
    decay, gain = ssm_init.discretise(
      Complex(jnp.array([-0.5]), jnp.array([3.0])), jnp.log(jnp.array([step])), method='zoh'
    )
    exact = scipy.linalg.expm(np.array([[eigenvalue, 1], [0, 0]]) * step)[0]
    got = [complex(z.re[0], z.im[0]) for z in (decay, gain)]
    np.testing.assert_allclose(got, exact, rtol=1e-12)


def test_bilinear_is_the_trapezoidal_rule():
  with jax.enable_x64(True):
    eigenvalue, step = -0.5 + 3.0j, 0.07
    decay, gain = ssm_init.discretise(
      Complex(jnp.array([-0.5]), jnp.array([3.0])), jnp.log(jnp.array([step])), method='bilinear'
    )
    decay, gain = (complex(z.re[0], z.im[0]) for z in (decay, gain))
    x, u = 0.3 - 0.2j, 1.7
    after = decay * x + gain * u
    np.testing.assert_allclose(after - x, step * (eigenvalue * (after + x) / 2 + u), rtol=1e-12)


def test_small_steps_keep_their_digits():
  """In float32, exp(z) - 1 would lose all but three digits of the gain at Δ = 1e-5."""
  _, gain = ssm_init.discretise(
    Complex(jnp.array([-0.5]), jnp.array([3.0])), jnp.log(jnp.array([1e-5])), method='zoh'
  )
  np.testing.assert_allclose(gain.re[0], 1e-5 * (1 - 0.25e-5), rtol=3e-6)


def test_an_unknown_method_is_named():
  one = jnp.ones(1)
  with pytest.raises(ValueError, match="'foh' is not known"):
    ssm_init.discretise(Complex(one, one), one, method='foh')


def test_steps_lie_in_their_range():
  steps = np.exp(ssm_init.log_steps(jax.random.key(0), 1000, 0.001, 0.1))
  assert 0.001 <= steps.min() < 0.0012
  assert 0.08 < steps.max() <= 0.1
