"""The module where numbers stop being finite is named, in the forward and in the backward pass."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
import tiny

from valkyrie.errors import Diverged
from valkyrie.training import nan_hunt
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step

CHUNKS = 2
COUNTS = r'\(\d+ of [\d,]+ are NaN, \d+ infinite\)\.'


class Spoiler(hk.Module):
  """A mixer that spoils position 9 of a document."""

  def __init__(self, spoil, name=None):
    super().__init__(name)
    self._spoil = spoil
    self.causal = True
    self.dropout = 0.0

  def initial_carry(self, batch_size, dtype):
    del dtype
    return jnp.zeros((batch_size, 1), jnp.float32)

  def forward_flops(self, width):
    del width
    return 0

  def __call__(self, x, carry, *, positions, segment_ids):
    del segment_ids
    return self._spoil(x, (positions == 9)[..., None]), carry


def overflow(x, here):
  return x * jnp.where(here, jnp.inf, 1.0)


@jax.custom_vjp
def _only_backward(x, here):
  del here
  return x


_only_backward.defvjp(
  lambda x, here: (x, here), lambda here, gradient: (jnp.where(here, jnp.nan, gradient), None)
)


def hunted_step(spoil):
  mixers = (tiny.s5, functools.partial(Spoiler, spoil))
  phase = Phase(chunk_size=8, chunks=CHUNKS, backprop_chunks=CHUNKS)
  curriculum = Curriculum([phase])
  optimizer = Optimizer(learning_rate=1e-2, warmup_steps=1, train_steps=10)

  def step_of(model, remat):
    return make_train_step(model, optimizer, curriculum, phase, seed=0, remat_chunks=remat)

  model = tiny.model(mixers)
  state = initial_state(model, optimizer, 0, 2)
  traceable = step_of(tiny.model(mixers, remat_policy=None), remat=False)
  return nan_hunt.hunting(jax.jit(step_of(model, remat=True)), traceable), traceable, state


@pytest.mark.parametrize(
  ('spoil', 'place'),
  # Position 9 is in the second chunk, whose layers are the calls 3 and 4. Forward, its first layer
  # comes first; backward, its second, where the gradient flows from the mixer into its norm.
  [
    (overflow, 'the output of block_0/spoiler, in call 3 of'),
    (_only_backward, 'the gradient of the output of block_0/mixer_norm_1, in call 4 of'),
  ],
)
def test_the_first_module_is_named(spoil, place):
  step, _, state = hunted_step(spoil)
  healthy, metrics = step(state, tiny.batch([8, 8]))  # no document has a position 9
  assert int(healthy.step) == 1 and int(metrics.skipped) == 0
  with pytest.raises(Diverged, match=f'Step 2 has .*: {place} the step {COUNTS}'):
    step(healthy, tiny.batch([8 * CHUNKS]))


def test_what_goes_in_is_looked_at_first():
  _, traceable, state = hunted_step(overflow)
  state.params['model']['embedding'] = state.params['model']['embedding'].at[3, 2].set(jnp.nan)
  found = nan_hunt.first_nonfinite(traceable, state, tiny.batch([8 * CHUNKS]))
  size = state.params['model']['embedding'].size
  assert found == f'parameter model/embedding (1 of {size:,} are NaN, 0 infinite), before the step.'
  state.params['model/final_norm'] = {'scale': jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0])}
  found = nan_hunt.first_nonfinite(traceable, state, tiny.batch([8 * CHUNKS]))
  assert found.endswith(
    ', parameter model/final_norm/scale (1 of 4 are NaN, 2 infinite), before the step.'
  )
