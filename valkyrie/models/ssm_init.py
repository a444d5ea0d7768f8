"""HiPPO-LegS initialisation and discretisation of a diagonal state space: pure functions."""

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.models.scan import Complex
from valkyrie.types import Array


def hippo_legs_normal(size: int) -> tuple[np.ndarray, np.ndarray]:
  """The normal part of the HiPPO-LegS matrix, diagonalised (S5, Smith et al. 2023, appendix B.1.1).

  A_LegS = A_normal - p pᵀ with p_n = sqrt(n + 1/2); A_normal = V diag(λ) Vᴴ. Computed in float64.

  Args:
    size: states of one HiPPO block; even, since only one of each conjugate pair is returned.

  Returns:
    (λ [size/2], V [size, size/2]) complex128: the eigenvalues with positive imaginary part and
    their eigenvectors.
  """
  n = np.arange(size, dtype=np.float64)
  root = np.sqrt(2 * n + 1)
  a = -(np.tril(np.outer(root, root), -1) + np.diag(n + 1))
  p = np.sqrt(n + 0.5)
  normal = a + np.outer(p, p)
  # normal = -I/2 + a skew-symmetric matrix, and -i times a skew matrix is Hermitian: `eigh` is
  # exact where a general eigenvalue routine is not.
  real = np.mean(np.diagonal(normal))
  imaginary, vectors = np.linalg.eigh(-1j * (normal - real * np.eye(size)))
  upper = imaginary > 0
  return real + 1j * imaginary[upper], vectors[:, upper]


def block_diagonal(states: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
  """HiPPO-LegS in J blocks on the diagonal (S5 section 4.3): λ [P] and V [2P, P], P = `states`."""
  if states % blocks:
    raise ValueError(
      f'S5: {states} stored states cannot be divided into {blocks} HiPPO blocks of equal size.'
    )
  size = states // blocks
  eigenvalues, vectors = hippo_legs_normal(2 * size)
  stacked = np.zeros((2 * states, states), np.complex128)
  for j in range(blocks):
    stacked[2 * j * size : 2 * (j + 1) * size, j * size : (j + 1) * size] = vectors
  return np.tile(eigenvalues, blocks), stacked


def log_steps(key: Array, states: int, smallest: float, largest: float) -> Array:
  """log Δ [P], uniform in the logarithm between two step sizes (S5 appendix B.1.3)."""
  low, high = np.log(smallest), np.log(largest)
  return jax.random.uniform(key, (states,), jnp.float32, low, high)


def discretise(eigenvalues: Complex, log_step: Array, *, method: str) -> tuple[Complex, Complex]:
  """From continuous to discrete time: x' = Λx + Bu becomes x_t = Λ̄ x_{t-1} + g (B u)_t.

  Args:
    eigenvalues: Λ [P].
    log_step: log Δ [P].
    method: 'zoh', Λ̄ = exp(ΛΔ) and g = (Λ̄ - 1)/Λ (S5 eq. 6), or 'bilinear',
      Λ̄ = (1 + ΛΔ/2)/(1 - ΛΔ/2) and g = Δ/(1 - ΛΔ/2).

  Returns:
    (Λ̄ [P], the gain g [P] by which the rows of B are multiplied).
  """
  step = jnp.exp(log_step)
  eigenvalue = jax.lax.complex(*eigenvalues)
  if method == 'zoh':
    # expm1 keeps the digits that exp(z) - 1 loses for the small z of a small step.
    growth = jnp.expm1(eigenvalue * step)
    decay, gain = growth + 1, growth / eigenvalue
  elif method == 'bilinear':
    denominator = 1 - eigenvalue * step / 2
    decay, gain = (1 + eigenvalue * step / 2) / denominator, step / denominator
  else:
    raise ValueError(f"S5: discretisation {method!r} is not known; it is 'zoh' or 'bilinear'.")
  return Complex(decay.real, decay.imag), Complex(gain.real, gain.imag)
