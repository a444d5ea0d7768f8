"""Operations of functions, counted by hand."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest

from valkyrie.certificates import jaxpr_flops

N = 8
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
PRODUCT = 2 * N**3


def count(f, *shapes):
  return jaxpr_flops.of_jaxpr(jax.make_jaxpr(f)(*(shapes or (X,))))


def product(x):
  return x @ x


def repeated(f, length):
  return lambda x: lax.scan(lambda state, _: (f(state), None), x, length=length)[0]


def loss(x):
  """Two products of x, whose gradients have two products each."""
  return jnp.sum(jnp.sin(x @ x) @ x)


@pytest.mark.parametrize(
  'f, products',
  [
    (product, 1),
    (jax.jit(product), 1),
    (repeated(product, 7), 7),
    (repeated(repeated(product, 3), 5), 15),
    (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x), 2),
    (lambda x: jax.vmap(product)(jnp.stack([x, x, x])), 3),
    (loss, 2),
    (jax.grad(loss), 2 + 4),
    (jax.grad(lambda x: loss(repeated(product, 5)(x))), 3 * 5 + 6),
  ],
)
def test_products(f, products):
  assert count(f).products == products * PRODUCT


def test_recomputed_products_count_again():
  def by_segments(x):
    return jnp.sum(repeated(jax.checkpoint(lambda s: jnp.sin(s @ x)), 5)(x))

  def whole(x):
    return jnp.sum(repeated(lambda s: jnp.sin(s @ x), 5)(x))

  once, again = count(jax.grad(whole)).products, count(jax.grad(by_segments)).products
  assert once == 3 * 5 * PRODUCT
  assert again == once + 5 * PRODUCT


def test_a_shard_map_counts_once_per_device():
  mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ('a', 'b'))

  def f(x):
    spec = PartitionSpec('a')
    return jax.shard_map(product, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

  assert count(f, jax.ShapeDtypeStruct((2 * N, N), jnp.float32)).products == 8 * PRODUCT


def test_a_convolution():
  def f(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1,), 'VALID', feature_group_count=2)

  signal = jax.ShapeDtypeStruct((3, 4, 10), jnp.float32)  # batch, channels, time
  kernel = jax.ShapeDtypeStruct((6, 2, 5), jnp.float32)  # out, in of a group, time
  assert count(f, signal, kernel).products == 2 * (3 * 6 * 6) * (2 * 5)


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
  found = count(lambda x: lax.while_loop(lambda s: s[0, 0] < 1, product, x))
  assert (found.products, found.loops_once) == (PRODUCT, 1)


def test_elementwise_operations_are_separate():
  found = count(repeated(lambda x: jnp.sum(jnp.exp(x) + 1, keepdims=True) * x, 3))
  assert found.products == 0
  assert found.elementwise == 3 * 4 * N * N  # exp, +, the input of the sum, *
