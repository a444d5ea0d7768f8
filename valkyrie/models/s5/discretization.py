"""From continuous to discrete time: x' = Λx + Bu becomes x_t = (1 + g) x_{t-1} + γ (B u)_t.

Everything is computed from g, the growth, in pairs of real arrays: Λ̄ = 1 + g would lose the digits
of long time constants. With a the real and θ the imaginary part of ΛΔ, a float32 growth gives the
time constant 1/|a| to a few roundings plus θ²/|a| times one: 10^7 tokens to 1% where the state
turns by less than 0.1 radians a token, and 10^6 tokens to about 8% at any angle.

  zoh          Λ̄ = exp(ΛΔ)                        γ = g/Λ           (S5 eq. 6)
  bilinear     Λ̄ = (1 + ΛΔ/2)/(1 - ΛΔ/2)          γ = Δ/(1 - ΛΔ/2)
  normalized   Λ̄ = exp(ΛΔ)                        γ = min(sqrt(1 - |Λ̄|²), |1 - Λ̄|)

With zoh, a state of time constant τ answers with an energy of order 1/τ, so that long memories
start almost silent. The first bound of 'normalized' gives all states the variance of inputs that
are white (Orvieto et al. 2023, LRU, section 3.4). Features of a text have a mean as well, which
would raise slow states to sqrt(τ) times it. The second bound keeps them at the mean.
"""

import jax
import jax.numpy as jnp

from valkyrie.models.recurrence.scan import Complex, Number
from valkyrie.models.recurrence.time_constants import root
from valkyrie.types import Array


def _exponential(eigenvalues: Complex, step: Array) -> tuple[Complex, Array]:
  """(exp(z) - 1, exp(Re z) - 1) for z = ΛΔ."""
  shrink = jnp.expm1(eigenvalues.re * step)
  half = eigenvalues.im * step / 2
  sine, cosine = jnp.sin(half), jnp.cos(half)
  turned = 2 * sine * sine  # 1 - cos(Im z)
  growth = Complex(shrink * (1 - turned) - turned, (shrink + 1) * 2 * sine * cosine)
  return growth, shrink


def _reciprocal(z: Complex) -> Complex:
  scale = 1 / (z.re * z.re + z.im * z.im)
  return Complex(z.re * scale, -z.im * scale)


def _zoh(eigenvalues: Complex, step: Array) -> tuple[Complex, Number]:
  growth, _ = _exponential(eigenvalues, step)
  return growth, growth * _reciprocal(eigenvalues)


def _bilinear(eigenvalues: Complex, step: Array) -> tuple[Complex, Number]:
  z = eigenvalues.map(lambda part: part * step)
  inverse = _reciprocal(Complex(1 - z.re / 2, -z.im / 2))
  # Λ̄ is near -1 for large z, and its small distance from there must keep its digits.
  small, large = z * inverse, Complex(2 * inverse.re - 2, 2 * inverse.im)
  is_small = z.re * z.re + z.im * z.im < 4
  growth = jax.tree.map(lambda a, b: jnp.where(is_small, a, b), small, large)
  return growth, inverse.map(lambda part: part * step)


def _normalized(eigenvalues: Complex, step: Array) -> tuple[Complex, Number]:
  growth, shrink = _exponential(eigenvalues, step)
  of_noise = -shrink * (shrink + 2)
  of_mean = growth.re * growth.re + growth.im * growth.im
  return growth, root(jnp.minimum(of_noise, of_mean))


DISCRETIZATIONS = {'zoh': _zoh, 'bilinear': _bilinear, 'normalized': _normalized}


def discretize(eigenvalues: Complex, step: Array, *, method: str) -> tuple[Complex, Number]:
  """The discrete system.

  Args:
    eigenvalues: Λ [..., P], with real parts below zero where the method is 'normalized'.
    step: Δ [..., P].
    method: a key of `DISCRETIZATIONS`.

  Returns:
    (the growth g, the gain γ, real where the method is 'normalized'): [..., P].
  """
  return DISCRETIZATIONS[method](eigenvalues, step)
