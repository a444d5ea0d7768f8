"""bfloat16 trains as float32 does."""

import functools

import jax
import numpy as np
import pytest
import tiny

from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_step import initial_state, make_train_step

STEPS = 200
# bfloat16 keeps 8 binary digits. Rounded activations move a loss by a few thousandths, and that
# must not grow from step to step: means of 20 steps stay this close, relatively.
TOLERANCE = 0.02


@functools.cache
def losses(compute_dtype):
  """The mean loss of each step on counting sequences, whose step the model must find out."""
  phase = Phase(chunk_size=16, chunks=2, backprop_chunks=2)
  curriculum = Curriculum([phase])
  optimizer = Optimizer(learning_rate=1e-2, warmup_steps=10, train_steps=STEPS)
  model = tiny.model(compute_dtype=compute_dtype, remat_policy=None)
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
