"""The inverse of a unit lower triangular matrix by matrix products, with its gradient."""

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.precision import HIGHEST
from valkyrie.types import Array

_ROWS = 16  # of a block that is inverted by substitution


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
    return _substituted(lower)
  half = size // 2
  a = lower[..., :half, :half]
  c = lower[..., half:, :half]
  d = lower[..., half:, half:]
  blocks = jnp.stack([a, d])
  first, second = unit_lower_inverse(blocks)
  corner = jnp.matmul(second, c, precision=HIGHEST)
  corner = jnp.matmul(corner, first, precision=HIGHEST)
  zeros = jnp.zeros_like(first)
  upper_rows = [first, zeros]
  lower_rows = [-corner, second]
  return jnp.block([upper_rows, lower_rows])


def _substituted(lower: Array) -> Array:
  """(I + L)⁻¹ row by row."""
  size = lower.shape[-1]

  def substitute(row, inverse):
    coefficients = lower[..., row, :]
    known = jnp.einsum('...j,...jk->...k', coefficients, inverse, precision=HIGHEST)
    return inverse.at[..., row, :].add(-known)

  identity = jnp.eye(size, dtype=lower.dtype)
  identity = jnp.broadcast_to(identity, lower.shape)
  return lax.fori_loop(1, size, substitute, identity)


def _inverse_forward(lower):
  inverse = unit_lower_inverse(lower)
  return inverse, inverse


def _inverse_backward(inverse, cotangent):
  """d(I + L)⁻¹ = -(I + L)⁻¹ dL (I + L)⁻¹."""
  transposed = jnp.swapaxes(inverse, -1, -2)
  d_lower = -transposed @ cotangent @ transposed
  d_strictly_lower = jnp.tril(d_lower, -1)
  return (d_strictly_lower,)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
