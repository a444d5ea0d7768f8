"""bfloat16 trains as float32 does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.quantization import Quantization
from valkyrie.training import rounding
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step

STEPS = 200
# bfloat16 keeps 8 binary digits. Rounded activations move a loss by a few thousandths, and that
# must not grow from step to step: means of 20 steps stay this close, relatively.
TOLERANCE = 0.02


@functools.cache
def losses(compute_dtype, parameter_dtype='float32', quantization=None):
  """The mean loss of each step on counting sequences, whose step the model must find out."""
  phase = Phase(chunk_size=16, chunks=2, backprop_chunks=2)
  curriculum = Curriculum([phase])
  optimizer = Optimizer(learning_rate=1e-2, warmup_steps=10, train_steps=STEPS)
  model = tiny.model(
    layers=1,
    compute_dtype=compute_dtype,
    parameter_dtype=parameter_dtype,
    quantization=quantization,
    remat_policy=None,
  )
  state = jax.jit(lambda: initial_state(model, optimizer, 0, 8))()
  step = jax.jit(
    make_train_step(model, optimizer, curriculum, phase, seed=0, remat_chunks=False),
    donate_argnums=0,
  )
  random = np.random.default_rng(0)
  found = []
  for _ in range(STEPS):
    batch = tiny.batch([20, 12], rows=8)
    first, by = random.integers(0, tiny.VOCABULARY, (8, 1)), random.integers(1, 5, (8, 1))
    tokens = ((first + by * np.arange(33)) % tiny.VOCABULARY).astype(np.int32)
    state, metrics = step(state, batch._replace(inputs=tokens[:, :-1], targets=tokens[:, 1:]))
    found.append(metrics.sums.loss / metrics.sums.weight)
  return np.asarray(jax.device_get(found))


@pytest.mark.invariant(8)
def test_bfloat16_stays_with_float32_for_200_steps():
  wide, narrow = (losses(dtype).reshape(-1, 20).mean(1) for dtype in ('float32', 'bfloat16'))
  assert wide[-1] < 0.5 * wide[0]  # there was something to learn, and it was learned
  assert not np.array_equal(wide, narrow)  # bfloat16 was really at work
  np.testing.assert_allclose(narrow, wide, rtol=TOLERANCE)


def test_products_in_int8_learn_as_much():
  wide = losses('float32').reshape(-1, 20).mean(1)
  narrow = losses('float32', quantization=Quantization).reshape(-1, 20).mean(1)
  assert not np.array_equal(wide, narrow)
  np.testing.assert_allclose(narrow, wide, rtol=TOLERANCE)


@pytest.mark.invariant(8)
def test_parameters_in_bfloat16_learn_as_much():
  wide = losses('bfloat16').reshape(-1, 20).mean(1)
  narrow = losses('bfloat16', 'bfloat16').reshape(-1, 20).mean(1)
  assert not np.array_equal(wide, narrow)
  np.testing.assert_allclose(narrow, wide, rtol=2 * TOLERANCE)


def test_the_parameters_that_every_use_casts_are_stored_in_bfloat16():
  model = tiny.model(compute_dtype='bfloat16', parameter_dtype='bfloat16')
  wide = tiny.model(compute_dtype='bfloat16')
  stored, params = tiny.init(model, 1)[0], tiny.init(wide, 1)[0]
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(stored)}
  assert dtypes == {jnp.dtype('bfloat16'), jnp.dtype('float32')}
  assert stored['model']['embedding'].dtype == jnp.float32
  jax.tree.map(np.testing.assert_array_equal, stored, wide.cast(params))


def test_rounding_at_random_is_exact_in_the_mean():
  x = jnp.asarray([1.0, -3.0, 1 + 2**-9, -1 - 2**-10, 0.0, jnp.inf], jnp.float32)
  draws = jax.vmap(
    lambda key: rounding.stored({'x': x}, {'x': x.astype(jnp.bfloat16)}, lambda: key)['x']
  )(jax.random.split(jax.random.key(0), 4096))
  assert draws.dtype == jnp.bfloat16
  draws = np.asarray(draws, np.float64)
  for column in (0, 1, 4, 5):  # numbers of bfloat16 stay
    assert (draws[:, column] == float(x[column])).all()
  assert set(draws[:, 2]) == {1.0, 1 + 2**-7} and set(draws[:, 3]) == {-1.0, -1 - 2**-7}
  spread = 2**-7 / 2 / 4096**0.5  # the largest standard error of such a mean
  np.testing.assert_allclose(draws[:, 2:4].mean(0), x[2:4], atol=4 * spread)


def test_a_dtype_of_parameters_that_no_use_has_is_refused():
  with pytest.raises(ConfigurationError, match="use 'float32', or 'bfloat16' for both"):
    tiny.model(parameter_dtype='bfloat16')
