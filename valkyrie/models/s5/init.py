"""Initialization of S5's parameters: pure functions of arrays.

Sources: Smith, Warrington & Linderman 2023 (S5), and its published code for details that the paper
leaves out. N counts the states before one of each conjugate pair is dropped, P the stored ones, in
J = `blocks` blocks on the diagonal. `basis` is V [n, p] of one block.
"""

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models.recurrence.scan import Complex
from valkyrie.types import Array

# The standard deviation of a standard normal distribution truncated at ±2.
_TRUNCATED_DEVIATION = 0.87962566103423978


def hippo_legs_normal(size: int) -> tuple[np.ndarray, np.ndarray]:
  """The normal part of the HiPPO-LegS matrix, diagonalized (S5 appendix B.1.1).

  A_LegS = A_normal - p pᵀ with p_n = sqrt(n + 1/2); A_normal = V diag(λ) Vᴴ. Returns λ [size] and V
  [size, size], complex128, in ascending order of the imaginary part.
  """
  n = np.arange(size, dtype=np.float64)
  root = np.sqrt(2 * n + 1)
  outer = np.outer(root, root)
  below = np.tril(outer, -1)
  diagonal = np.diag(n + 1)
  a = -(below + diagonal)
  p = np.sqrt(n + 0.5)
  normal = a + np.outer(p, p)
  # normal = -I/2 + a skew-symmetric matrix, and -i times a skew matrix is Hermitian: `eigh` is
  # exact, a general eigenvalue routine is not.
  normal_diagonal = np.diagonal(normal)
  real = np.mean(normal_diagonal)
  identity = np.eye(size)
  skew = normal - real * identity
  hermitian = -1j * skew
  imaginary, vectors = np.linalg.eigh(hermitian)
  eigenvalues = real + 1j * imaginary
  return eigenvalues, vectors


def block_diagonal(
  states: int,
  blocks: int,
  *,
  conj_sym: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
  """HiPPO-LegS in J blocks on the diagonal (S5 section 4.3), for P states, which J divides.

  With `conj_sym`, only the eigenvalue of each conjugate pair with a positive imaginary part stays.
  Returns λ [P] and V [n, p] of one block, complex128, with p = P / J, and n = 2p under conjugate
  symmetry, else p.
  """
  # V of all J blocks, [N, P], is never made: it is mostly zeros.
  size = states // blocks
  pairs = 2 if conj_sym else 1
  eigenvalues, vectors = hippo_legs_normal(pairs * size)
  # The eigenvalues ascend by their imaginary parts: the positive ones are last.
  kept = eigenvalues[-size:]
  basis = vectors[:, -size:]
  all_kept = np.tile(kept, blocks)
  return all_kept, basis


def _lecun_normal(key: Array, shape: tuple[int, ...], fan_in: int) -> Array:
  """Truncated normal numbers of variance 1 / fan_in, cut at two standard deviations."""
  wanted = fan_in**-0.5
  deviation = wanted / _TRUNCATED_DEVIATION
  normal = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32)
  return deviation * normal


def input_matrix(key: Array, basis: np.ndarray, blocks: int, width: int) -> Complex:
  """B̃ = Vᴴ B [P, D] with B real, LeCun-normal with fan-in N (S5 appendix B.1.2)."""
  block_states = basis.shape[0]
  states = blocks * block_states
  real = _lecun_normal(key, (states, width), states)
  real_blocks = real.reshape(blocks, -1, width)
  complex_blocks = real_blocks.astype(jnp.complex64)
  conjugate = jnp.asarray(basis, jnp.complex64).conj()
  b_blocks = jnp.einsum('np,jnd->jpd', conjugate, complex_blocks)
  b = b_blocks.reshape(-1, width)
  return Complex(b.real, b.imag)


OUTPUT_INITS = ('trunc_standard_normal', 'lecun_normal', 'complex_normal')


def output_matrix(
  key: Array,
  basis: np.ndarray,
  blocks: int,
  width: int,
  *,
  method: str,
) -> Complex:
  """C̃ [D, P] (S5 appendix B.1.2), with the method names of the reference implementation.

  'complex_normal' draws C̃ directly, with variance 1. The others draw C [D, N], and C̃ = C V:
  'trunc_standard_normal' with fan-in N, and 'lecun_normal' with fan-in D·N.
  """
  block_states, block_stored = basis.shape
  states = blocks * block_states
  stored = blocks * block_stored
  if method == 'complex_normal':
    shape = (2, width, stored)
    normal = jax.random.normal(key, shape, jnp.float32)
    real, imaginary = normal * 0.5**0.5
    return Complex(real, imaginary)
  fan_ins = {'trunc_standard_normal': states, 'lecun_normal': width * states}
  shape = (2, width, states)
  real, imaginary = _lecun_normal(key, shape, fan_ins[method])
  drawn = jax.lax.complex(real, imaginary)
  drawn_blocks = drawn.reshape(width, blocks, -1)
  v = jnp.asarray(basis, jnp.complex64)
  c_blocks = drawn_blocks @ v[None]
  c = c_blocks.reshape(width, stored)
  return Complex(c.real, c.imag)


def log_steps(key: Array, rates: np.ndarray, shortest: float, longest: float) -> Array:
  """log Δ [P] with time constants 1 / (rate · Δ) uniform in the logarithm (S5 appendix B.1.3).

  The rates are -Re Λ [P], above zero; the time constants are in tokens.
  """
  low = np.log(shortest)
  high = np.log(longest)
  log_time_constants = jax.random.uniform(key, rates.shape, jnp.float32, low, high)
  log_rates = np.float32(np.log(rates))
  return -log_time_constants - log_rates
