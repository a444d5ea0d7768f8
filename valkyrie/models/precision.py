"""The dtypes of arithmetic, and the matrix product that accumulates in float32."""

import jax.numpy as jnp

from valkyrie.types import Array, DType


def wide(dtype: DType) -> DType:
  """The dtype of states, norms and logits: float32, or their inputs' own if that is wider."""
  return jnp.promote_types(dtype, jnp.float32)


def matmul(x: Array, w: Array, out_dtype: DType | None = None) -> Array:
  """x [..., D_in] @ w [D_in, D_out] in x's dtype, accumulated in float32 -> `out_dtype` or x's.

  Leading axes are merged first: the gradient of w then contracts a single axis, for which a CPU
  does not transpose the activations.
  """
  *leading, d_in = x.shape
  d_out = w.shape[-1]
  rows = x.reshape(-1, d_in)
  matrix = w.astype(x.dtype)
  dtype = out_dtype or x.dtype
  out = jnp.matmul(rows, matrix, preferred_element_type=dtype)
  return out.reshape(*leading, d_out)
