"""A diagonal linear state space in discrete time, over a chunk: two matrix products around a scan.

    x' = Λx + Bu,  y = Cx + Du            learned, in continuous time
    x_t = (1 + g) x_{t-1} + γ ∘ (B u_t)   complex state of each row, as pairs of float32
    y_t = 2 Re(C x_t) + D ∘ u_t           the factor 2 accounts for the implied conjugate states

A chunk starts from the last state of the chunk before, and a document from zero. Both are one line
of the scan, so the cuts between chunks change nothing.

The growth g is computed directly: Λ̄ = 1 + g would lose the digits of long time constants. With a
the real and θ the imaginary part of ΛΔ, a float32 growth gives the time constant 1/|a| to a few
roundings plus θ²/|a| times one: 10^7 tokens to 1% where the state turns by less than 0.1 radians a
token, and 10^6 tokens to about 8% at any angle.

  zoh          Λ̄ = exp(ΛΔ)                        γ = g/Λ           (S5 eq. 6)
  bilinear     Λ̄ = (1 + ΛΔ/2)/(1 - ΛΔ/2)          γ = Δ/(1 - ΛΔ/2)
  normalized   Λ̄ = exp(ΛΔ)                        γ = min(sqrt(1 - |Λ̄|²), |1 - Λ̄|)
"""

import functools
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from valkyrie.models.layers import broadcast
from valkyrie.models.matrices import Layout, Matrix, unchanged
from valkyrie.models.precision import matmul, wide
from valkyrie.models.recurrence import scan, sharded_scan
from valkyrie.models.recurrence.scan import Complex, Number
from valkyrie.models.recurrence.time_constants import root
from valkyrie.sharding.split_products import split_product
from valkyrie.types import Array


class StateSpace(NamedTuple):
  """The learned continuous system x' = Λx + Bu, float32. P stored states, D channels."""

  eigenvalues: Complex  # Λ [P]
  b: Matrix  # of any kind; as stored, the real and the imaginary part of B [P, D]
  c: Matrix  # the same of C [D, P], or of [D, 2P] with a second, backward scan
  d: Array  # D [D]
  log_step: Array  # log Δ [P]


def _exponential(eigenvalues: Complex, step: Array) -> tuple[Complex, Array]:
  """(exp(z) - 1, exp(Re z) - 1) for z = ΛΔ."""
  # exp(a + iθ) - 1 without a difference of close numbers: 1 - cos θ = 2 sin²(θ/2), `turned`.
  z = _times(eigenvalues, step)
  shrink = jnp.expm1(z.re)
  half = z.im / 2
  sine = jnp.sin(half)
  cosine = jnp.cos(half)
  turned = 2 * sine * sine
  real = shrink * (1 - turned) - turned
  radius = shrink + 1
  imaginary = radius * 2 * sine * cosine
  return Complex(real, imaginary), shrink


def _times(eigenvalues: Complex, step: Array) -> Complex:
  """ΛΔ of eigenvalues [P] and steps [P] or [T, B, P]."""
  return eigenvalues.map(lambda part: broadcast(part, step) * step)


def _square(z: Complex) -> Array:
  """|z|²."""
  real_square = z.re * z.re
  imaginary_square = z.im * z.im
  return real_square + imaginary_square


def _reciprocal(z: Complex) -> Complex:
  """1 / z."""
  scale = 1 / _square(z)
  real = z.re * scale
  imaginary = -z.im * scale
  return Complex(real, imaginary)


def _zoh(eigenvalues: Complex, step: Array) -> tuple[Complex, Number]:
  growth, _ = _exponential(eigenvalues, step)
  inverse = _reciprocal(eigenvalues)
  gain = growth * inverse.map(lambda part: broadcast(part, step))
  return growth, gain


def _bilinear(eigenvalues: Complex, step: Array) -> tuple[Complex, Number]:
  z = _times(eigenvalues, step)
  half_real = z.re / 2
  half_imaginary = z.im / 2
  denominator = Complex(1 - half_real, -half_imaginary)
  inverse = _reciprocal(denominator)
  # Λ̄ is near -1 for large z, and its small distance from there must keep its digits.
  small = z * inverse
  large_real = 2 * inverse.re - 2
  large_imaginary = 2 * inverse.im
  is_small = _square(z) < 4
  real = jnp.where(is_small, small.re, large_real)
  imaginary = jnp.where(is_small, small.im, large_imaginary)
  growth = Complex(real, imaginary)
  gain = inverse.map(lambda part: part * step)
  return growth, gain


def _normalized(eigenvalues: Complex, step: Array) -> tuple[Complex, Number]:
  """As zoh, with a real gain that is large enough for long memories to be heard.

  With zoh, a state of time constant τ answers with an energy of order 1/τ. The first bound of γ
  gives all states the variance of inputs that are white (Orvieto et al. 2023, LRU, section 3.4).
  Features of a text have a mean as well, which would raise slow states to sqrt(τ) times it; the
  second bound keeps them at the mean.
  """
  growth, shrink = _exponential(eigenvalues, step)
  for_noise = -shrink * (shrink + 2)  # 1 - |Λ̄|²
  for_mean = _square(growth)  # |1 - Λ̄|²
  square_gain = jnp.minimum(for_noise, for_mean)
  return growth, root(square_gain)


DISCRETIZATIONS = {'zoh': _zoh, 'bilinear': _bilinear, 'normalized': _normalized}


def discretized(
  system: StateSpace,
  *,
  method: str,
  step_rescale: float = 1.0,
  clip_eigenvalues: bool = False,
  log_factor: Array | None = None,
) -> tuple[Complex, Number]:
  """The growth g = Λ̄ - 1 and the gain γ, [P] each, or [T, B, P] where steps depend on the input.

  Args:
    method: a key of `DISCRETIZATIONS`; 'normalized' needs real parts of Λ below zero.
    step_rescale: a factor on every Δ: 2 for a signal sampled at half the rate.
    clip_eigenvalues: keep Re Λ at most -1e-4, as the reference implementation does.
    log_factor: s [T, B, P], if every step depends on its input: Δ_t = log(1 + Δ exp(s_t)), which is
      the softplus of Mamba (Gu & Dao 2023, section 3.5), and Δ exp(s_t) where that is small.
  """
  eigenvalues = system.eigenvalues
  log_step = system.log_step
  if clip_eigenvalues:
    clipped = jnp.minimum(eigenvalues.re, -1e-4)
    eigenvalues = eigenvalues._replace(re=clipped)
  if log_factor is None:
    step = jnp.exp(log_step)
  else:
    log_steps = broadcast(log_step, log_factor) + log_factor
    step = jax.nn.softplus(log_steps)
  discretize = DISCRETIZATIONS[method]
  return discretize(eigenvalues, step_rescale * step)


def read_chunk(
  system: StateSpace,
  discrete: tuple[Complex, Number],
  u: Array,
  initial: Complex,
  starts: Array,
  length: Array,
  ends: Array | None = None,
  *,
  form: scan.Form = None,
  conj_sym: bool = True,
  first: Complex | None = None,
) -> tuple[Array, Complex]:
  """Reads a chunk, or this device's piece of one -> (y [B, T, D], the last state [B, P]), float32.

  Args:
    discrete: (g, γ), see `discretized`.
    u: inputs [B, T, D] in the compute dtype.
    initial: the state [B, P] before the first step.
    starts: bool [B, T], true at the first token of a document.
    length: int32 [B], the steps before the padding, which does not change the state.
    ends: None, or bool [B, T], true at the last token of a document. A second scan with the same g
      and γ then reads the chunk backwards, from zero; the last P columns of C read its states.
    conj_sym: the conjugates of the states are implied: y_t = 2 Re(C x_t), else Re(C x_t).
    first: the state [P] before each document; None is zero.
  """
  growth, gain = discrete
  inputs = _inputs(system.b, gain, u)
  reset = starts.T
  inputs = scan.begun(growth, inputs, first, reset)
  states, after = sharded_scan.scan_chunk(
    growth, inputs, initial, reset, length, u.dtype, form=form
  )
  if ends is not None:
    backwards = _scan_backwards(growth, inputs, initial, ends.T, form)
    backwards = backwards.map(lambda part: part.astype(u.dtype))
    real = jnp.concatenate([states.re, backwards.re], axis=-1)
    imaginary = jnp.concatenate([states.im, backwards.im], axis=-1)
    states = Complex(real, imaginary)
  y = _outputs(system.c, conj_sym, states)
  skip = broadcast(system.d, u) * u.astype(y.dtype)
  return y + skip, after


def _inputs(b: Matrix, gain: Number, u: Array) -> Complex:
  """γ ∘ (B u_t) [T, B, P], float32, of the inputs u [B, T, D]."""
  dtype = wide(u.dtype)
  real_gain = jax.tree.leaves(gain)[0]
  varies = real_gain.ndim > 1
  stored = Complex(*b.whole)
  scale = unchanged
  if not varies:  # γ multiplies the rows of B, and not all steps
    row_gain = jax.tree.map(lambda part: part[:, None], gain)
    stored = _scaled(row_gain, stored)
    scale = functools.partial(_scaled_pairs, gain)

  def drive(u, b):
    u_over_time = jnp.swapaxes(u, 0, 1)
    pairs = matmul(u_over_time, input_matrix(b), dtype)
    return _from_pairs(pairs)

  def time_first(pairs):
    pairs_over_time = jnp.swapaxes(pairs, 0, 1)
    return _from_pairs(pairs_over_time)

  axes = ('state', 'embed')
  driven = split_product(drive, u, stored, axes, inputs=1, rows=(0, 1))
  layout = Layout(results=_rows_first, from_rows=time_first)
  driven = b.adjust(u, driven, layout=layout, scale=scale)
  if varies:
    return _scaled(gain, driven)
  return driven


def _scan_backwards(
  growth: Complex,
  inputs: Complex,
  initial: Complex,
  ends: Array,
  form: scan.Form,
) -> Complex:
  """The states [T, B, P] of the documents that are read from their ends, bool [T, B]."""
  reverse = functools.partial(jnp.flip, axis=0)
  if growth.re.ndim > 1:
    growth = growth.map(reverse)
  inputs = inputs.map(reverse)
  zero = initial.map(jnp.zeros_like)
  reset = reverse(ends)
  states = scan.diagonal_scan(growth, inputs, zero, reset, form=form)
  return states.map(reverse)


def _outputs(c: Matrix, conj_sym: bool, states: Complex) -> Array:
  """2 Re(C x_t), or Re(C x_t), of the states [T, B, P] -> float32 [B, T, D]."""
  dtype = wide(states.re.dtype)

  def read_out(states, c):
    rows = checkpoint_name(_rows_first(states), 'states')
    matrix = output_matrix(c, conj_sym)
    return matmul(rows, matrix, dtype)

  stored = Complex(*c.whole)
  axes = ('embed', 'state')
  y = split_product(read_out, states, stored, axes, inputs=1, rows=(1, 0))
  layout = Layout(inputs=_rows_first)
  return c.adjust(states, y, layout=layout)


def input_matrix(b: Complex | Array) -> Array:
  """B, or its parts [2, P, D], as a real map [D, 2P] to the pairs of the states."""
  real, imaginary = b
  return jnp.concatenate([real, imaginary]).T


def output_matrix(c: Complex | Array, conj_sym: bool) -> Array:
  """C as a real map [2P, D] of the pairs of the states, with the conjugates that are implied."""
  real, imaginary = c
  states = 2 if conj_sym else 1  # a stored state, and its conjugate
  parts = jnp.concatenate([real, -imaginary], axis=1)
  return states * parts.T


def _rows_first(z: Complex) -> Array:
  """[T, B, P] -> the pairs [B, T, 2P]."""
  pairs = jnp.concatenate(z, axis=-1)
  return jnp.swapaxes(pairs, 0, 1)


def _from_pairs(pairs: Array) -> Complex:
  """The pairs [..., 2P] as complex numbers [..., P]."""
  real, imaginary = jnp.split(pairs, 2, -1)
  return Complex(real, imaginary)


def _scaled_pairs(gain: Number, pairs: Array) -> Array:
  """Pairs [B, T, 2P] times the gain [P]."""
  states = _from_pairs(pairs)
  token_gain = jax.tree.map(lambda part: broadcast(part, states.re), gain)
  scaled = _scaled(token_gain, states)
  return jnp.concatenate(scaled, axis=-1)


def _scaled(gain: Number, z: Complex) -> Complex:
  """γ z, of a complex or a real gain."""
  if isinstance(gain, Complex):
    return gain * z
  return z.map(lambda part: gain * part)
