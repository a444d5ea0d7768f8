"""A diagonal linear state space over a chunk: pure functions, two matrix products around a scan.

    x_t = Λ̄ x_{t-1} + B̄ u_t              a state per row, complex, kept as pairs of float32
    y_t = 2 Re(C x_t) + D ∘ u_t           the factor 2 stands for the conjugate states not stored

A chunk starts from the state that the last chunk ended with, and a document from zero: both are
one line of the scan, so where chunks are cut changes nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp

from valkyrie.models.layers import matmul
from valkyrie.models.s5 import chunk_scan, init, scan
from valkyrie.models.s5.scan import Complex
from valkyrie.types import Array


class StateSpace(NamedTuple):
  """The continuous system x' = Λx + Bu as it is learnt, float32. P stored states, D channels."""

  eigenvalues: Complex  # Λ [P]
  b: Complex  # B [P, D]
  c: Complex  # C [D, P], or [D, 2P] where a second scan reads backwards
  d: Array  # D [D]
  log_step: Array  # log Δ [P]


class Recurrence(NamedTuple):
  """The discrete system, float32."""

  decay: Complex  # Λ̄ [P]
  b: Complex  # B̄ [P, D]
  c: Complex
  d: Array


def discretised(
  system: StateSpace, *, method: str, step_rescale: float = 1.0, clip_eigenvalues: bool = False
) -> Recurrence:
  """The recurrence whose step is Δ.

  Args:
    system: the parameters.
    method: see `init.discretise`.
    step_rescale: by which every Δ is multiplied: 2 for a signal sampled at half the rate.
    clip_eigenvalues: see `init.clip_eigenvalues`.
  """
  eigenvalues = system.eigenvalues
  if clip_eigenvalues:
    eigenvalues = init.clip_eigenvalues(eigenvalues)
  step = step_rescale * jnp.exp(system.log_step)
  decay, gain = init.discretise(eigenvalues, step, method=method)
  return Recurrence(decay, gain.map(lambda part: part[:, None]) * system.b, system.c, system.d)


def run(
  system: Recurrence,
  u: Array,
  initial: Complex,
  starts: Array,
  length: Array,
  ends: Array | None = None,
  *,
  form: str,
  conj_sym: bool = True,
) -> tuple[Array, Complex]:
  """Reads a chunk.

  Args:
    system: the recurrence.
    u: inputs [B, T, D] in the compute dtype.
    initial: the state [B, P] before the first step.
    starts: bool [B, T], true where a document starts.
    length: int32 [B], the steps before the padding at the chunk's end, which leaves no trace.
    ends: None, or bool [B, T], true where one ends. A second scan with the same Λ̄ and B̄ then reads
      the chunk backwards, from zero, and the last P columns of C read what it finds.
    form: a form of the scan, see `scan.FORMS`.
    conj_sym: the conjugates of the states are implied: y_t = 2 Re(C x_t), else Re(C x_t).

  Returns:
    (y [B, T, D] float32, the state [B, P] float32 after the chunk, read forwards).
  """
  wide = jnp.promote_types(u.dtype, jnp.float32)
  driven = matmul(jnp.swapaxes(u, 0, 1), jnp.concatenate(system.b).T, wide)
  inputs = Complex(*jnp.split(driven, 2, -1))
  states, after = chunk_scan.scan_chunk(system.decay, inputs, initial, starts.T, length, form=form)
  if ends is not None:
    backwards = scan.diagonal_scan(
      system.decay,
      inputs.map(_reverse),
      initial.map(jnp.zeros_like),
      _reverse(ends.T),
      form=form,
    ).map(_reverse)
    states = Complex(*(jnp.concatenate(p, axis=-1) for p in zip(states, backwards, strict=True)))
  pairs = jnp.swapaxes(jnp.concatenate(states, axis=-1), 0, 1)
  scale = 2 if conj_sym else 1
  out_of = scale * jnp.concatenate([system.c.re, -system.c.im], axis=1)
  y = matmul(pairs.astype(u.dtype), out_of.T, wide) + system.d[None, None] * u.astype(wide)
  return y, after


def _reverse(x: Array) -> Array:
  return jnp.flip(x, axis=0)
