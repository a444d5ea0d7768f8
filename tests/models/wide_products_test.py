"""Products that accumulate in float32, and their backward passes."""

import jax
import jax.numpy as jnp
from jaxprs import equations
import numpy as np
import pytest

from valkyrie.models.precision import einsum, matmul


def _product(w_dtype):
  """(a bfloat16 product with float32 results, its gradients of x and w, the cotangent)."""
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (2, 5, 8), jnp.bfloat16)
  w = jax.random.normal(keys[1], (8, 3), w_dtype)
  cotangent = jax.random.normal(keys[2], (2, 5, 3))
  y, pull_back = jax.vjp(lambda x, w: matmul(x, w, jnp.float32), x, w)
  return (x, w), y, pull_back(cotangent), cotangent


def test_gradients_of_wide_results_are_those_of_rounded_factors():
  (x, w), y, (d_x, d_w), cotangent = _product(jnp.float32)
  rounded = np.asarray(cotangent.astype(jnp.bfloat16), np.float64)
  rows = np.asarray(x, np.float64)
  columns = np.asarray(w.astype(jnp.bfloat16), np.float64)
  assert y.dtype == jnp.float32 and d_x.dtype == jnp.bfloat16 and d_w.dtype == jnp.float32
  np.testing.assert_allclose(y, rows @ columns, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(d_x.astype(jnp.float32), rounded @ columns.T, rtol=2**-8, atol=1e-5)
  # The gradient of a float32 matrix is never rounded to bfloat16.
  np.testing.assert_allclose(d_w, np.einsum('btd,bte->de', rows, rounded), rtol=1e-5, atol=1e-5)


def test_an_einsum_has_the_gradients_of_rounded_factors():
  keys = jax.random.split(jax.random.key(0), 3)
  scores = jax.random.normal(keys[0], (2, 3, 5, 7), jnp.bfloat16)
  values = jax.random.normal(keys[1], (2, 7, 4), jnp.bfloat16)
  cotangent = jax.random.normal(keys[2], (2, 3, 5, 4))
  equation = 'bhij,bjk->bhik'
  y, pull_back = jax.vjp(lambda a, b: einsum(equation, a, b, jnp.float32), scores, values)
  gradients = pull_back(cotangent)
  a, b, rounded = (
    np.asarray(array.astype(jnp.bfloat16), np.float64) for array in (scores, values, cotangent)
  )
  assert y.dtype == jnp.float32
  np.testing.assert_allclose(y, np.einsum(equation, a, b), rtol=1e-5, atol=1e-5)
  expected = np.einsum('bhik,bjk->bhij', rounded, b), np.einsum('bhij,bhik->bjk', a, rounded)
  for gradient, value in zip(gradients, expected, strict=True):
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient.astype(jnp.float32), value, rtol=2**-8, atol=1e-5)


def _einsum(x, w, dtype):
  return einsum('td,de->te', x, w, dtype)


@pytest.mark.parametrize('product', [matmul, _einsum])
def test_every_product_of_narrow_factors_has_narrow_factors(product):
  x = jnp.zeros((2, 8), jnp.bfloat16)
  w = jnp.zeros((8, 3), jnp.bfloat16)

  def loss(x, w):
    return jnp.sum(jnp.sin(product(x, w, jnp.float32)))

  program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)
  dots = [
    equation for equation in equations(program.jaxpr) if equation.primitive.name == 'dot_general'
  ]
  assert len(dots) == 3
  for dot in dots:
    assert {factor.aval.dtype for factor in dot.invars} == {jnp.dtype(jnp.bfloat16)}


def test_a_gradient_of_a_gradient_of_wide_results():
  _, _, (d_x, _), _ = _product(jnp.bfloat16)

  def square(x):
    return jnp.sum(matmul(x, jnp.eye(8, dtype=x.dtype), jnp.float32) ** 2)

  second = jax.grad(lambda x: jnp.sum(jax.grad(square)(x)))(d_x)
  np.testing.assert_array_equal(second, jnp.full_like(d_x, 2))
