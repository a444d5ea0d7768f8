"""Slices of time: overlapping ones against their definition, and their inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models import slices


@pytest.mark.parametrize('time', [6, 11, 12, 13])
@pytest.mark.parametrize('size, width', [(1, 2), (2, 3), (3, 2), (2, 1), (1, 6)])
def test_overlapping_slices_are_those_of_the_definition(time, size, width):
  x = jnp.arange(2.0 * time * 3).reshape(2, time, 3) + 1
  found = slices.overlapping(x, size, width)
  count = -(-time // size)
  padded = np.zeros((2, count * size, 3))
  padded[:, :time] = x
  expected = [padded[:, n * size : (n + width) * size] for n in range(count - width + 1)]
  np.testing.assert_array_equal(found, expected)


def test_few_slices_of_a_wide_window_are_traced_as_few_operations():
  """A decoder reads one token with a window of thousands."""
  jaxpr = jax.make_jaxpr(lambda x: slices.overlapping(x, 1, 5000))(jnp.zeros((1, 5001, 2)))
  assert len(jaxpr.eqns) < 20


@pytest.mark.parametrize('time', [5, 6])
def test_join_is_the_inverse_of_cut(time):
  x = jnp.arange(2.0 * time).reshape(2, time)
  np.testing.assert_array_equal(slices.join(slices.cut(x, 3), time), x)
