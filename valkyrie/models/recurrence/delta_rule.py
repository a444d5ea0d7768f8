"""The gated delta rule over slices of time, as functions of arrays.

    S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ          S [K, Z] of each head
    y_t = S_tᵀ q_t

A token decays the memory, erases a share β of the value stored at its key, and stores its own
(Yang, Kautz & Hatamizadeh 2024, Gated DeltaNet, section 3.1). In a slice of Q tokens (section 3.3,
the WY form by the UT transform of Joffrain et al. 2006), every token stores u_t at k_t, and

    (I + L) U = β (V - e K S_0)            L_ij = β_i D_ij k_i·k_j for j < i
    Y = e Q S_0 + (D ∘ Q Kᵀ) U             D_ij = α_{j+1} .. α_i      e_i = α_1 .. α_i

where S_0 is the state before the slice. With I + L inverted once, the state after the slice is an
affine function of S_0, S_0 + E S_0 + B. Only that runs slice after slice; all else is products over
all slices at once. E, like the growth of `scan`, is small where memories are long, so neither the
decay of a slice nor a product of low precision rounds the state away. A document that starts inside
a slice is a mask on D and e, since a decay of zero has no logarithm; the state after it is B.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array

_HIGHEST = lax.Precision.HIGHEST  # an accelerator's default would add its rounding at every join
_ROWS = 16  # of a block that is inverted by substitution


@jax.named_scope('scan')
def gated_delta_rule(
  q: Array,
  k: Array,
  v: Array,
  log_decay: Array,
  beta: Array,
  initial: Array,
  reset: Array,
  *,
  slice_size: int,
) -> tuple[Array, Array]:
  """Reads a chunk, or this device's piece of one, in float32 -> (y [B, T, H, Z], the state after).

  Args:
    q, k: [B, T, H, K], keys of length 1.
    v: [B, T, H, Z].
    log_decay, beta: log α <= 0 and β in [0, 2], [B, T, H]; both 0 at padding.
    initial: [B, H, K, Z], the state before the chunk; like the one after, correct on device 0.
    reset: bool [B, T], true where the state before the token is replaced by zero.
    slice_size: Q, a power of two; a shorter chunk is one slice.
  """
  time = q.shape[1]
  size = min(slice_size, 1 << (time - 1).bit_length())
  q, k, v, log_decay, beta, reset = (  # [N, B, H, Q, ...]
    jnp.swapaxes(slices.cut(x, size), 2, 3) for x in (q, k, v, log_decay, beta, reset[..., None])
  )
  decays = _decays(log_decay, reset)
  values, across = v.shape[-1], jnp.swapaxes(k, -1, -2)

  # (I + L) U = β (V - e K S_0): solved for V and for e K at once, before S_0 is known.
  lower = jnp.tril(beta[..., None] * decays.within * (k @ across), -1)
  right = jnp.concatenate([v, decays.entering[..., None] * k], axis=-1)
  solved = unit_lower_inverse(lower) @ (beta[..., None] * right)
  # The state after a slice is (1 + growth) S_0 + Kᵀ D U, with D to the slice's end.
  stored = jnp.swapaxes(decays.within[..., -1, :, None] * k, -1, -2) @ solved
  identity = jnp.eye(k.shape[-1], dtype=k.dtype)[None, None, None]
  change = decays.growth[..., None, None] * identity - stored[..., values:]
  starts = jnp.any(reset, axis=-1)[..., None, None]
  effects = _Effect(starts, change, stored[..., :values])
  states, after = _states(effects, initial.astype(v.dtype))

  u = solved[..., :values] - solved[..., values:] @ states
  y = (decays.entering[..., None] * q) @ states + (decays.within * (q @ across)) @ u
  return slices.join(jnp.swapaxes(y, 2, 3), time), after


class _Decays(NamedTuple):
  """Products of decays in each slice, 0 across the start of a document."""

  within: Array  # D [N, B, H, Q, Q]: from after the second token to the first one
  entering: Array  # e [N, B, H, Q]: from before the slice
  growth: Array  # [N, B, H]: the decay of the whole slice, less 1


def _decays(log_decay: Array, reset: Array) -> _Decays:
  """Of log α [N, B, H, Q] and resets [N, B, 1, Q]."""
  # Every exponent is a sum of logarithms, none a difference of two sums: those would lose the
  # digits of a weak decay behind a strong one, and could be above zero.
  log_decay = jnp.where(reset, 0, log_decay)  # no decay crosses a start
  document = jnp.cumsum(reset, axis=-1)
  size = log_decay.shape[-1]
  causal = np.tril(np.ones((size, size), bool))
  sums = jnp.einsum(
    '...ik,kj->...ij',
    jnp.where(causal[None, None, None], log_decay[..., None, :], 0),
    np.tril(np.ones((size, size), log_decay.dtype), -1),
    precision=_HIGHEST,
  )
  total = jnp.cumsum(log_decay, axis=-1)
  seen = causal[None, None, None] & (document[..., None] == document[..., None, :])
  return _Decays(
    jnp.where(seen, jnp.exp(sums), 0),
    jnp.where(document == 0, jnp.exp(total), 0),
    jnp.expm1(total[..., -1]),
  )


class _Effect(NamedTuple):
  """The effect of a span of time on the state S before it: S + change S + state, or `state`."""

  starts: Array  # bool [..., 1, 1, 1]: a document starts in the span, so S is dropped
  change: Array  # [..., H, K, K]
  state: Array  # [..., H, K, Z]


def _after(state: Array, effect: _Effect) -> Array:
  """The state after a span."""
  return jnp.where(effect.starts, effect.state, state + (effect.change @ state + effect.state))


def _then(first: _Effect, second: _Effect) -> _Effect:
  return _Effect(
    first.starts | second.starts,
    first.change + second.change + second.change @ first.change,
    _after(first.state, second),
  )


def _states(effects: _Effect, initial: Array) -> tuple[Array, Array]:
  """(the state before each slice [N, B, H, K, Z], the state after the chunk); see the module."""

  def step(state, effect):
    return _after(state, effect), state

  if not sequence_parallel.axes():
    after, states = lax.scan(step, initial, effects)
    return states, after

  def compose(before, effect):
    return _then(before, effect), before

  is_first = sequence_parallel.index() == 0
  known = _Effect(
    jnp.zeros_like(effects.starts[0]),
    jnp.zeros_like(effects.change[0]),
    jnp.where(is_first, initial, 0),
  )
  piece, reached = lax.scan(compose, known, effects)
  before, ended = sequence_parallel.device_prefix_scan(piece, _then)
  entering = jnp.where(is_first, 0, before.state)
  return _after(entering[None], reached), ended.state


@jax.custom_vjp
def unit_lower_inverse(lower: Array) -> Array:
  """(I + L)⁻¹ of a strictly lower triangular L [..., Q, Q], where Q is a power of two.

  Blocks on the diagonal are inverted by substitution, all at once, and joined in pairs by products.
  On a CPU this takes a quarter of the time of a triangular solve, and its gradient is two products.

      [A   ]⁻¹   [ A⁻¹             ]
      [C  D]   = [-D⁻¹ C A⁻¹   D⁻¹ ]
  """
  size = lower.shape[-1]
  if size <= _ROWS:

    def substitute(row, inverse):
      known = jnp.einsum('...j,...jk->...k', lower[..., row, :], inverse, precision=_HIGHEST)
      return inverse.at[..., row, :].add(-known)

    identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    return lax.fori_loop(1, size, substitute, identity)
  half = size // 2
  blocks = jnp.stack([lower[..., :half, :half], lower[..., half:, half:]])
  first, second = unit_lower_inverse(blocks)
  corner = jnp.matmul(second, lower[..., half:, :half], precision=_HIGHEST)
  corner = jnp.matmul(corner, first, precision=_HIGHEST)
  return jnp.block([[first, jnp.zeros_like(first)], [-corner, second]])


def _inverse_forward(lower):
  inverse = unit_lower_inverse(lower)
  return inverse, inverse


def _inverse_backward(inverse, cotangent):
  """d(I + L)⁻¹ = -(I + L)⁻¹ dL (I + L)⁻¹."""
  transposed = jnp.swapaxes(inverse, -1, -2)
  return (jnp.tril(-transposed @ cotangent @ transposed, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
