"""The dtypes of arithmetic, and products that accumulate in float32."""

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, DType

# Of products whose results are joined: an accelerator's default would round at every join.
HIGHEST = lax.Precision.HIGHEST


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
  dtype = out_dtype or x.dtype
  out: Any
  if dtype == x.dtype:
    out = jnp.matmul(rows, w.astype(x.dtype), preferred_element_type=dtype)
  else:
    out = _widened(dtype, rows, w)
  return out.reshape(*leading, d_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widened(dtype: DType, x: Array, w: Array) -> Array:
  """x @ w of x's dtype, with results of a wider one.

  The backward pass multiplies in x's dtype, too. The gradient of the results is rounded to it, as a
  TPU rounds every factor of a product; a GPU would take two float32 matrices, twice the bytes.
  """
  out = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=dtype)
  if platform() == 'gpu':
    # Without the barrier, what is added to the product is written first, for cuBLAS to read.
    out = jax.lax.optimization_barrier(out)
  return out


def _widened_forward(dtype, x, w):
  return _widened(dtype, x, w), (x, w)


def _widened_backward(dtype, residuals, gradient):
  x, w = residuals
  narrow = gradient.astype(x.dtype)
  d_x = jnp.matmul(narrow, w.T.astype(x.dtype))
  d_w = jnp.matmul(x.T, narrow, preferred_element_type=w.dtype)
  return d_x, d_w


_widened.defvjp(_widened_forward, _widened_backward)


def einsum(equation: str, a: Array, b: Array, out_dtype: DType) -> Array:
  """The einsum of two arrays of one dtype, accumulated in `out_dtype`.

  Each index of a factor is one of the other or of the results. The backward pass multiplies in the
  dtype of the factors, see `_widened`.
  """
  if out_dtype == a.dtype:
    return jnp.einsum(equation, a, b)
  return _widened_einsum(equation, out_dtype, a, b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _widened_einsum(equation: str, dtype: DType, a: Array, b: Array) -> Array:
  return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _widened_einsum_forward(equation, dtype, a, b):
  return _widened_einsum(equation, dtype, a, b), (a, b)


def _widened_einsum_backward(equation, dtype, factors, gradient):
  del dtype
  a, b = factors
  inputs, out_axes = equation.split('->')
  a_axes, b_axes = inputs.split(',')
  narrow = gradient.astype(a.dtype)
  d_a = jnp.einsum(f'{out_axes},{b_axes}->{a_axes}', narrow, b)
  d_b = jnp.einsum(f'{a_axes},{out_axes}->{b_axes}', a, narrow)
  return d_a, d_b


_widened_einsum.defvjp(_widened_einsum_forward, _widened_einsum_backward)
