"""However a train step is laid out over devices, it computes what one device does."""

import functools
import pathlib

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from valkyrie import configuration, main
from valkyrie.errors import ConfigurationError
from valkyrie.partitioning import Partitioner, constrain, path_of
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_step import initial_state, make_train_step

LAYOUTS = sorted(
  file.stem
  for file in (pathlib.Path(__file__).parents[1] / 'gin' / 'partition').glob('*.gin')
  if file.stem != 'axes'
)
ROWS = 8
PHASE = Phase(chunk_size=6, chunks=2, backprop_chunks=2)


@functools.cache
def trained(name):
  """(state, losses) after two steps over documents that end inside chunks, by gin's layout."""
  gin.clear_config()
  configuration.load([f'gin/partition/{name}.gin'], rooms=main.ROOMS)
  layout = Partitioner()
  layout.check_batch(ROWS)
  model = tiny.model()
  # Adam divides a gradient by its own size, and so turns the last bit of one that is nearly zero
  # into a step of full length: with this epsilon it does not.
  optimizer = Optimizer(
    0.01, 0, 10, *(functools.partial(f, eps=1e-3) for f in (optax.adamw, optax.adam))
  )

  def start():
    return initial_state(model, optimizer, 0, ROWS)

  shardings = layout.state_shardings(jax.eval_shape(start))
  # Made on one device: what is compared is the step.
  state = jax.device_put(jax.jit(start)(), shardings)
  step = layout.partition(
    make_train_step(model, optimizer, Curriculum([PHASE]), PHASE, seed=0, remat=True),
    out_shardings=(shardings, None),
  )
  losses = []
  for seed in range(2):
    batch = layout.place_batch(tiny.batch((4, 3, 5), rows=ROWS, seed=seed))
    state, metrics = step(state, batch)
    losses.append(float(metrics.sums.loss / metrics.sums.weight))
  return state, losses, layout


def test_the_layouts_that_a_machine_of_any_size_can_use():
  assert {'single', 'data', 'fsdp'} <= set(LAYOUTS)


@pytest.mark.parametrize('name', [name for name in LAYOUTS if name != 'single'])
def test_a_layout_changes_no_number(name):
  (one, expected, _), (many, losses, layout) = trained('single'), trained(name)
  assert layout.mesh.size == 8
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  # Sums over rows are taken in another order: about 1e-7 of a gradient, times learning rate / eps.
  for field in ('params', 'carry'):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
      *(jax.device_get(getattr(state, field)) for state in (many, one)),
    )


def test_fsdp_holds_an_eighth_of_what_it_splits():
  state, _, layout = trained('fsdp')
  split = 0
  for tree in (state.params, state.optimizer_state):
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      shards = leaf.addressable_shards
      assert len(shards) == 8
      is_split = 'embed' in layout.logical_axes(path_of(key_path), leaf.shape)
      assert {shard.data.nbytes for shard in shards} == {leaf.nbytes // (8 if is_split else 1)}
      split += leaf.nbytes * is_split
  total = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer_state)))
  assert split > 0.8 * total
  # The memory of a row stays with the row.
  for leaf in jax.tree.leaves(state.carry):
    assert leaf.addressable_shards[0].data.shape[1] == ROWS // 8


def layout(mesh=(('data', 8),), parameter_axes=(), axis_rules=(('batch', 'data'),)):
  return Partitioner(mesh, parameter_axes, axis_rules)


def leaf(*shape):
  return {'params': {'w': jax.ShapeDtypeStruct(shape, jnp.float32)}}


@pytest.mark.parametrize(
  'attempt, message',
  [
    (lambda: layout().check_batch(12), r'batch_size=12 .* 8 devices.* are 8 and 16'),
    (lambda: layout().check_batch(3), r'batch_size=3 .* 8 devices.*Use 8'),
    (
      lambda: layout(mesh=(('data', 4), ('model', 4), ('time', 2))),
      r'data=4 x model=4 x time=2 needs 32 devices, but there are 8',
    ),
    (lambda: layout(mesh=(('data', -1), ('model', 3))), r'data=-1 x model=3 .* there are 8'),
    (
      lambda: layout(axis_rules=(('embed', 'modle'),)),
      r"'embed' over \['modle'\], but the mesh has the axes \('data',\)",
    ),
    (
      lambda: layout().state_shardings(leaf(4, 5)),
      r"no rule for params/w of shape \(4, 5\).*\('w\$', \(None, None\)\)",
    ),
    (
      lambda: layout(parameter_axes=(('w$', ('embed',)),)).state_shardings(leaf(4, 5)),
      r"params/w the axes \('embed',\), but its shape is \(4, 5\).*2 axes",
    ),
    (
      lambda: layout(
        parameter_axes=(('w$', ('embed',)),), axis_rules=(('embed', 'data'),)
      ).state_shardings(leaf(12)),
      r'params/w of shape \(12,\) cannot be split .* 12 is not a multiple of 8',
    ),
  ],
)
def test_what_does_not_fit_is_refused_with_both_sides_named(attempt, message):
  with pytest.raises(ConfigurationError, match=message) as caught:
    attempt()
  assert caught.value.exit_code == 78


def test_constrain_pins_inside_a_partition_and_does_nothing_outside():
  x = jnp.ones((8, 4))
  assert constrain(x, 'batch', None) is x
  pinned = layout().partition(lambda x: constrain(x, 'batch', None))(x)
  assert pinned.addressable_shards[0].data.shape == (1, 4)
