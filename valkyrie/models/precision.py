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
  rows = x.reshape(-1, x.shape[-1])
  out = jnp.matmul(rows, w.astype(x.dtype), preferred_element_type=out_dtype or x.dtype)
  return out.reshape(*x.shape[:-1], w.shape[-1])
