"""Rows of a table: the gradient of a GPU's form, beside the plain form's."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from valkyrie.models.tables import rows_of
from valkyrie.sharding import ambient


@pytest.mark.parametrize('tokens', [1, 2, 37])
@pytest.mark.parametrize('rows', [1, 5, 1000])
@pytest.mark.parametrize('dtype', ['float64', 'float32', 'bfloat16'])
def test_both_forms_have_one_gradient(tokens, rows, dtype):
  random = np.random.default_rng(0)
  with jax.enable_x64(dtype == 'float64'):
    table = jnp.asarray(random.normal(size=(rows, 3)), dtype)
    index = random.integers(0, rows, (2, tokens))
    # Small numbers beside large ones of other rows.
    weights = random.normal(size=(2, tokens, 3)) * 10.0 ** (index % 7)[..., None]

    def results(platform):
      with ambient.within(devices=[types.SimpleNamespace(platform=platform)]):
        found, pull = jax.vjp(lambda table: rows_of(table, index), table)
        return found, pull(jnp.asarray(weights, dtype))[0]

    (found, gradient), (expected, plain) = results('gpu'), results('cpu')
    np.testing.assert_array_equal(found, expected)
    summed = np.zeros((rows, 3))
    np.add.at(summed, index, np.asarray(jnp.asarray(weights, dtype), np.float64))
    bound = {'float64': 1e-14, 'float32': 1e-5, 'bfloat16': 0.01}[dtype]
    assert gradient.dtype == plain.dtype == dtype
    np.testing.assert_allclose(np.float64(gradient), summed, rtol=bound, atol=bound)
