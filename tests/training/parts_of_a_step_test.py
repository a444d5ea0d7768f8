"""Options of a step: micro-batches, z-loss and the average of the parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import tbptt
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.objective import PREDICTION, Prediction, read, terms_of
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.setup import StepSettings
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step

PHASE = Phase(chunk_size=6, chunks=4, backprop_chunks=2)
ROWS = 4


def small_model(mixer=tiny.s5, **options):
  return tiny.model(mixers=(mixer,), remat_policy=None, **options)


def built(model, batch_size=ROWS, with_average=False):
  """(the state before the first step, a function that makes a step with these options)."""
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=2, train_steps=20)
  step = functools.partial(
    make_train_step, model, optimizer, Curriculum([PHASE]), PHASE, seed=0, remat_chunks=False
  )
  make = jax.jit(lambda: initial_state(model, optimizer, 0, batch_size, with_average=with_average))
  return make(), step


def rows():
  """Rows of different documents."""
  parts = [tiny.batch(lengths, rows=1, seed=n)
           for n, lengths in enumerate([(7, 15, 2), (24,), (3, 21), (12, 12)])]  # fmt: skip
  return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


# Public report huggingface/transformers#24725: means over unequal micro-batches.
def test_micro_batches_are_the_whole_batch_in_float64():
  with jax.enable_x64(True):
    state, step = built(small_model(compute_dtype='float64'))
    wide = jax.tree.map(
      lambda x: jnp.asarray(x, jnp.float64) if x.dtype == jnp.float32 else x, state
    )
    found = {count: jax.jit(step(micro_batches=count))(wide, rows()) for count in (1, 4)}
    for name in ('params', 'carry'):
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12, rtol=1e-9),
        getattr(found[4][0], name),
        getattr(found[1][0], name),
      )
    np.testing.assert_allclose(found[4][1].sums[:3], found[1][1].sums[:3], rtol=1e-12)


def test_micro_batches_over_devices():
  mesh = Partitioner((('data', 4), ('time', 2)), (('batch', 'data'), ('time', 'time')))
  batch = jax.tree.map(lambda x: np.tile(x, (2, 1)), rows())
  state, step = built(small_model(tiny.attention), batch_size=8)
  results = [mesh.jit(step(micro_batches=count))(state, batch)[0].params for count in (1, 2)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *results)


def test_the_z_loss_pulls_the_normalizers_to_one():
  model = small_model()
  params, carry = tiny.init(model, ROWS)
  batch = rows()

  @functools.partial(jax.jit, static_argnums=0)
  def of(z_loss):
    return tbptt.gradients(
      model, params, carry, batch, batch.weights.sum(), chunk_size=24, backprop_chunks=1,
      remat_chunks=False, terms=(Prediction(z_loss),),
    )  # fmt: skip

  plain, _, sums = of(0.0)
  with_z, _, same = of(0.1)
  np.testing.assert_allclose(sums.loss, same.loss, rtol=1e-6)
  along = jax.tree.map(lambda a, b: a - b, with_z, plain)

  @jax.jit
  def z(params):
    total = batch.weights.sum()
    return (
      read((Prediction(0.1),), model, params, carry, batch, total=total)[0]
      - read(PREDICTION, model, params, carry, batch, total=total)[0]
    )

  expected = jax.grad(z)(params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), along, expected)


# Public report lightly-ai/lightly-train#892: an average that begins anew after a resume.
def test_the_average_follows_the_parameters_and_ignores_refused_steps():
  state, step = built(small_model(), with_average=True)
  step = jax.jit(step(average_decay=0.5))
  jax.tree.map(np.testing.assert_array_equal, state.average, state.params)
  assert state.evaluated is state.average
  expected = state.average
  for n in range(1, 9):
    state, _ = step(state, rows())
    share = min(0.5, (1 + n) / (10 + n))
    expected = jax.tree.map(
      lambda a, p, share=share: share * a + (1 - share) * p, expected, state.params
    )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.average, expected)
  broken = rows()._replace(weights=np.full((ROWS, 24), np.nan, np.float32))
  after, _ = step(state, broken)
  jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
  assert int(after.skipped) == 1 and all(
    np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.average)
  )


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'objective': lambda: Prediction(-1.0)}, 'Prediction.z_loss = -1.0 is out of'),
    ({'average_decay': 1.0}, r'average_decay = 1\.0 .* Use a number in \(0, 1\)'),
    ({'micro_batches': 0}, 'StepSettings.micro_batches = 0 is out of'),
  ],
)
def test_numbers_out_of_range(options, message):
  parts = dict.fromkeys(('model', 'partitioner', 'curriculum', 'optimizer'))
  with pytest.raises(ConfigurationError, match=message):
    terms_of(StepSettings(seed=0, batch_size=2, **parts, **options).objective)
