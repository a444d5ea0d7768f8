"""How parameters meet activations: what a batch of one row costs a CPU, and layers that keep w."""

import types

import haiku as hk
import jax
import jax.numpy as jnp
from jaxprs import equations
import numpy as np
import platforms_test
import pytest

from valkyrie.models.layers import RMSNorm, broadcast
from valkyrie.sharding import ambient

TIME = 16
WIDTH = platforms_test.WIDTH
NAMES = [name for name in platforms_test.MIXERS if platforms_test.takes('cpu', name)]


@pytest.mark.parametrize('name', NAMES)
def test_gradients_by_channel_are_sums_of_arrays_without_an_axis_of_one_row(name):
  """On a CPU, XLA can take 25 times as long to sum [1, T, F] over its tokens as [T, F]."""
  make = platforms_test.MIXERS[name]

  def read(x, carry, positions, segments):
    y, after = make()(x, carry, positions=positions, segment_ids=segments)
    normed = RMSNorm(name='normed')(y)
    return normed, after

  carry = hk.transform(lambda: make().initial_carry(1, jnp.float32)).apply({}, None)
  positions = jnp.arange(TIME)[None]
  segments = jnp.ones((1, TIME), jnp.int32)
  x = jnp.ones((1, TIME, WIDTH))
  mixer = hk.transform(read)
  params = mixer.init(jax.random.key(0), x, carry, positions, segments)

  def loss(params):
    y, _ = mixer.apply(params, None, x, carry, positions, segments)
    return jnp.sum(y.reshape(TIME, WIDTH) ** 2)

  jaxpr = jax.make_jaxpr(jax.grad(loss))(params).jaxpr
  sums = [equation for equation in equations(jaxpr) if equation.primitive.name == 'reduce_sum']
  assert sums
  for equation in sums:
    shape = equation.invars[0].aval.shape
    axes = equation.params['axes']
    if shape[:2] == (1, TIME) and len(shape) - 1 not in axes:
      assert 1 not in axes, f'[1, T, ..] = {list(shape)} is summed over its tokens'


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_a_parameter_beside_activations(platform):
  """On accelerators no layer may keep it for each token."""
  w = jnp.arange(3.0)
  for leading in ((), (1,), (1, 1), (2, 1, 4), (0, 2)):
    x = jnp.ones((*leading, 3))
    with ambient.within(devices=[types.SimpleNamespace(platform=platform)]):
      found = broadcast(w, x)
    if platform == 'cpu':
      assert found.shape == x.shape
    else:
      assert found.shape == (*[1] * len(leading), 3)
    np.testing.assert_array_equal(found * x, np.broadcast_to(w, x.shape))
