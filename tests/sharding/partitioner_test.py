"""However a train step is laid out over devices, it computes what one device does."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
from layouts import ROWS, assert_equal, gradients, initial, layout_of, of_step
from layouts import batch as batch_of
import numpy as np
import optax
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import collectives, hlo
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.models.recurrence.mamba2 import Mamba2
from valkyrie.sharding import ambient
from valkyrie.sharding.mesh import make_mesh
from valkyrie.sharding.partitioner import Partitioner, constrain
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_state import initial_state, state_axes
from valkyrie.training.train_step import make_train_step

LAYOUTS = sorted(
  file.stem for file in (pathlib.Path(__file__).parents[2] / 'gin' / 'partition').glob('*.gin')
)
SPLIT = [name for name in LAYOUTS if name != 'single']
PHASE = Phase(chunk_size=8, chunks=3, backprop_chunks=3)


def sent_by(layout, model):
  """(the collectives of a step, its parameters, their shardings)."""
  params, carry = initial('float32')  # whose arrays do not depend on the policy of recomputation
  placed = tiny.shardings(layout, model, params, carry)
  state = jax.device_put({'params': params, 'carry': carry}, placed)
  arguments = state['params'], state['carry'], layout.place_batch(batch_of('float32'))
  compiled = layout.jit(of_step(model)).lower(*arguments).compile()
  return collectives.list_collectives(hlo.parse(compiled.as_text())), params, placed['params']


# Public report NVIDIA/Megatron-LM#7513: unequal masks over pieces of a sequence.
@pytest.mark.invariant(6)
@pytest.mark.parametrize('name', SPLIT)
def test_a_layout_changes_no_loss_no_gradient_and_no_carry(name):
  """In float64; in float32, and in two processes, it is in processes_test.py."""
  many, layout = gradients(name, 'float64', ngrams=tiny.ngrams)
  assert layout.mesh.size == 8
  assert_equal(many, gradients('single', 'float64', ngrams=tiny.ngrams)[0])


@pytest.mark.invariant(6)
@pytest.mark.parametrize(
  'name, layout, options',
  [
    ('fsdp', {}, {'insert': tiny.planner, 'mixers': (tiny.s5,)}),
    (
      'context_fsdp',
      {
        'mesh': '(("z", 2), ("x", 2), ("y", 2))',
        'axis_rules': '(("batch", "z"), ("time", ("x", "y")), ("embed", ("z", "x", "y")))',
      },
      {'backprop_chunks': 1},
    ),
  ],
)
def test_layers_that_gather_their_weights_change_nothing(name, layout, options):
  """With a planner; and over three axes of rows and time, with the gradient cut between chunks."""
  bindings = [f'--gin.Partitioner.{name}={value}' for name, value in layout.items()]
  found, _ = gradients(name, 'float64', *bindings, **options)
  assert_equal(found, gradients('single', 'float64', **options)[0])


@pytest.mark.invariant(6)
def test_split_products_change_nothing_in_norms_and_states_of_groups():
  """A mean over heads, and heads that share queries and keys or B and C, on several devices."""
  mixers = (
    functools.partial(
      tiny.attention,
      query_key_norm='whole',
      output_gate=True,
      rotary=functools.partial(Rotary, share=0.5),
    ),
    functools.partial(GatedDeltaNet, heads=2, key_width=4, value_width=4, value_heads=4),
    functools.partial(Mamba2, heads=4, head_width=4, state_size=4, groups=2, convolution_bias=True),
  )
  found, layout = gradients('tensor2d', 'float64', mixers=mixers, layers=1)
  assert layout.mesh.size == 8
  assert_equal(found, gradients('single', 'float64', mixers=mixers, layers=1)[0])


@pytest.mark.invariant(6)
@pytest.mark.parametrize('name', ['context', 'context_fsdp', 'tensor2d'])
@pytest.mark.parametrize('backprop_chunks', [3, 1])
def test_the_keys_of_a_document_over_devices_change_nothing(name, backprop_chunks):
  """Each device holds a part of the slots, which are fewer than the tokens of the step."""
  options = {'mixers': (tiny.full, tiny.s5), 'backprop_chunks': backprop_chunks}
  found, _ = gradients(name, 'float64', **options)
  assert_equal(found, gradients('single', 'float64', **options)[0])


@pytest.mark.invariant(6)
def test_two_slices_of_four_change_nothing():
  """Slices split the rows; within a slice, time and weights are split."""
  bindings = ('--gin.Partitioner.slices=2',)
  found, layout = gradients('context_fsdp', 'float64', *bindings, ngrams=tiny.ngrams)
  assert layout.mesh.shape['slice'] == 2 and layout.mesh.size == 8
  assert_equal(found, gradients('single', 'float64', ngrams=tiny.ngrams)[0])


@pytest.mark.parametrize('name', ['zero1', 'fsdp'])
def test_only_gradients_cross_slices_and_once(name):
  """Each device exchanges its quarter of the gradient with its peer in the other slice."""
  layout = layout_of(name, '--gin.Partitioner.slices=2')
  sent, params, placed = sent_by(layout, tiny.model())
  across = [one for one in sent if 'slice' in collectives.mesh_axes(one, layout.mesh)]
  assert {one.kind for one in across} == {'all-reduce'}
  assert not any(one.in_loop for one in across)
  quarters = sum(
    leaf.nbytes // 4
    for leaf, place in zip(jax.tree.leaves(params), jax.tree.leaves(placed), strict=True)
    if any(place.spec)
  )
  peers = [one for one in across if collectives.mesh_axes(one, layout.mesh) == ('slice',)]
  assert sum(one.bytes for one in peers) == quarters


@dataclasses.dataclass(frozen=True)
class Chip:
  """What jax.experimental.mesh_utils reads of a device."""

  id: int
  slice_index: int
  platform: str = 'gpu'
  device_kind: str = 'chip'
  process_index: int = 0


def test_a_mesh_keeps_each_slice_together():
  chips = [Chip(number, number % 2) for number in range(8)]
  with ambient.within(devices=chips):
    made = make_mesh((('x', 2), ('y', -1)), slices=2)
    assert dict(made.shape) == {'slice': 2, 'x': 2, 'y': 2}
    assert [[chip.slice_index for chip in one.flat] for one in made.devices] == [[0] * 4, [1] * 4]
    assert [chip.id for chip in made.devices[1].flat] == [1, 3, 5, 7]
    with pytest.raises(
      ConfigurationError, match=r'belong to 2 slices, but .*slices = 4. Set it to 2'
    ):
      make_mesh((('x', 2),), slices=4)
    assert [chip.id for chip in make_mesh((('x', 8),)).devices] == list(range(8))
  tpus = [dataclasses.replace(chip, platform='tpu') for chip in chips]
  with (
    ambient.within(devices=tpus),
    pytest.raises(ConfigurationError, match=r'slices = 1\. Set it to 2'),
  ):
    make_mesh((('x', 4),))


def test_a_mesh_over_a_part_of_the_devices():
  made = make_mesh((('x', 2), ('y', -1)), chosen=(6, 3, 5, 2))
  assert [device.id for device in made.devices.flat] == [6, 3, 5, 2]
  assert [device.id for device in make_mesh((('x', 1),), chosen=[4]).devices] == [4]
  for chosen, message in (
    ((0, 8), r'\(0, 8\) does not name devices of this run, .* from 0 to 7'),
    ((-1,), 'does not name devices'),
    ((True,), 'does not name devices'),
    ((), 'Name some, such as'),
    (2, 'Partitioner.devices = 2 does not name'),
    ((1, 1), 'has a number twice'),
    (
      (0, 1, 2),
      r'needs a multiple of 2 devices, but Partitioner\.devices has 3 .* or name so many',
    ),
  ):
    with pytest.raises(ConfigurationError, match=message):
      make_mesh((('x', 2), ('y', -1)), chosen=chosen)
  chips = [Chip(number, number // 4) for number in range(8)]
  with ambient.within(devices=chips):
    made = make_mesh((('x', -1),), slices=2, chosen=(0, 1, 6, 7))
    assert [[chip.id for chip in one] for one in made.devices] == [[0, 1], [6, 7]]
    with pytest.raises(ConfigurationError, match=r'cannot form the mesh .* as many in each slice'):
      make_mesh((('x', -1),), slices=2, chosen=(0, 1, 2, 7))


@pytest.mark.parametrize(
  ('kind', 'advice'),
  [
    ('TPU v4', 'Run on 32 devices, such as the slice v4-64.'),
    ('TPU v5p', 'Run on 32 devices, such as the slice v5p-64.'),
    ('TPU v5 lite', 'Run on 32 devices.'),  # whose slices count chips
  ],
)
def test_too_few_chips_name_the_slice_that_has_enough(kind, advice):
  chips = [Chip(number, 0, 'tpu', kind) for number in range(16)]
  with ambient.within(devices=chips), pytest.raises(ConfigurationError) as refusal:
    make_mesh((('data', 4), ('weights', 8)))
  assert f'sees 16 ({kind}). {advice} --run_mode=precompile' in str(refusal.value)


@pytest.mark.parametrize('remat_policy, passes', [('nothing', 3), (None, 2)])
def test_a_layer_gathers_its_weights_once_for_each_pass_and_chunk(remat_policy, passes):
  """And scatters its gradient once for each chunk; all others move once."""
  sent, params, placed = sent_by(layout_of('fsdp'), tiny.model(remat_policy=remat_policy))

  def split(in_layers):
    """Bytes of the parts that the other devices hold."""
    return sum(
      leaf.nbytes * 7 // 8
      for module, group in params.items()
      for name, leaf in group.items()
      if ('layers/' in module) == in_layers and any(placed[module][name].spec)
    )

  inside = collectives.by_kind([one for one in sent if one.in_loop])
  outside = collectives.by_kind([one for one in sent if not one.in_loop])
  assert inside['all-gather'] == passes * PHASE.chunks * split(in_layers=True)
  assert outside['all-gather'] == split(in_layers=False)
  assert inside['reduce-scatter'] == PHASE.chunks * split(in_layers=True)


@functools.cache
def trained(name):
  """(state, losses) after two steps, by gin's layout."""
  layout = layout_of(name)
  layout.check_batch(ROWS)
  model = tiny.model()
  # Adam divides a gradient by its own size, and so turns the last bit of one that is nearly zero
  # into a step of full length: with this epsilon it does not.
  optimizer = Optimizer(
    0.01, 0, 10, *(functools.partial(f, eps=1e-3) for f in (optax.adamw, optax.adam))
  )

  def start():
    return initial_state(model, optimizer, 0, ROWS)

  shardings = tiny.state_shardings(layout, model, optimizer, jax.eval_shape(start))
  # Made on one device: what is compared is the step.
  state = jax.device_put(jax.jit(start)(), shardings)
  step = layout.jit(
    make_train_step(model, optimizer, Curriculum([PHASE]), PHASE, seed=0, remat_chunks=True),
    out_shardings=(shardings, None),
  )
  losses = []
  for seed in range(2):
    batch = layout.place_batch(tiny.batch((4, 3, 5, 12), rows=ROWS, seed=seed))
    state, metrics = step(state, batch)
    losses.append(float(metrics.sums.loss / metrics.sums.weight))
  return state, losses, model, optimizer, layout


def test_the_layouts_that_a_machine_of_any_size_can_use():
  assert {'single', 'data', 'zero1', 'fsdp', 'tensor2d', 'context'} <= set(LAYOUTS)


# Public report NVIDIA-NeMo/RL#3788: replicated gradients counted once a device.
@pytest.mark.parametrize('name', ['zero1', 'fsdp'])
def test_two_steps_end_where_one_device_ends(name):
  (one, expected, *_), (many, losses, *_) = trained('single'), trained(name)
  np.testing.assert_allclose(losses, expected, rtol=1e-5)
  # Sums over rows are taken in another order: about 1e-7 of a gradient, times learning rate / eps.
  for field in ('params', 'carry'):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
      *(jax.device_get(getattr(state, field)) for state in (many, one)),
    )


@pytest.mark.parametrize('name', ['zero1', 'fsdp'])
def test_a_device_holds_an_eighth_of_what_is_split(name):
  state, _, model, optimizer, layout = trained(name)
  axes = state_axes(model, optimizer, layout, state)
  split = 0
  for field in ('params', 'optimizer_state'):
    leaves, structure = jax.tree.flatten(getattr(state, field))
    for leaf, names in zip(leaves, structure.flatten_up_to(getattr(axes, field)), strict=True):
      shards = leaf.addressable_shards
      assert len(shards) == 8
      is_split = 'embed' in names
      assert {shard.data.nbytes for shard in shards} == {leaf.nbytes // (8 if is_split else 1)}
      split += leaf.nbytes * is_split
  total = sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.optimizer_state)))
  assert split > 0.8 * total
  # The memory of a row stays with the row.
  for leaf in jax.tree.leaves(state.carry):
    assert leaf.addressable_shards[0].data.shape[1] == ROWS // 8


def layout(mesh=(('data', 8),), parameter_axes=(), axis_rules=(('batch', 'data'),)):
  return Partitioner(mesh, axis_rules, parameter_axes)


def leaf(*shape):
  return {'params': {'w': jax.ShapeDtypeStruct(shape, jnp.float32)}}


def test_a_rule_replaces_the_declared_axes_and_without_either_a_parameter_is_not_split():
  ruled = layout(parameter_axes=(('w$', (None, 'embed')),))
  assert ruled.parameter_axes('params/a/w', ('embed', None), (4, 5)) == (None, 'embed')
  assert ruled.parameter_axes('params/a/v', ('embed', None), (4, 5)) == ('embed', None)
  assert ruled.parameter_axes('params/a/v', None, (4, 5)) == (None, None)
  assert ruled.computation != layout().computation
  layout(axis_rules=(('batch', 'data'), ('mine', 'data'))).check_rules({'w': ('mine', None)})


@pytest.mark.parametrize(
  'attempt, message',
  [
    (lambda: layout().check_batch(12), r'batch_size=12 does not divide .* 8 devices. Use 8 or 16'),
    (lambda: layout().check_batch(3), r'batch_size=3 .* 8 devices. Use 8'),
    (lambda: layout().check_batch(-3), r'batch_size=-3 must be at least 1. Use 8'),
    (
      lambda: layout(mesh=(('data', 4), ('data', 2))),
      r"'data', 2\)\) is not a mesh. Give each axis a",
    ),
    (lambda: layout(mesh=(('data', 0),)), r"\(\('data', 0\),\) is not a mesh"),
    (lambda: layout(mesh='data'), r"'data' is not a mesh"),
    (
      lambda: layout(parameter_axes=(('(', ('embed',)),)),
      r"'\(', which is not a regular expression",
    ),
    (
      lambda: layout(mesh=(('data', 4), ('model', 4), ('time', 2))),
      r'data=4 x model=4 x time=2 needs 32 devices, but this process sees 8 .*precompile',
    ),
    (lambda: layout(mesh=(('data', -1), ('model', 3))), r'data=-1 x model=3 .* sees 8'),
    (
      lambda: layout(axis_rules=(('embed', 'modle'),)),
      r"'embed' over \['modle'\], but the mesh has the axes \('data',\)",
    ),
    (
      lambda: layout(axis_rules=(('embed', 'data'), ('embed', None))),
      'has two rules for one logical axis. Remove one',
    ),
    (
      lambda: layout(axis_rules=(('batch', 'data'), ('embde', 'data'))).check_rules(
        {'w': ('layers', 'mine')}
      ),
      "splits 'embde', but no array of this model.* The model has .*mine.* Did you mean embed?",
    ),
    (
      lambda: layout(parameter_axes=(('w$', ('embed',)),)).parameter_axes('params/w', None, (4, 5)),
      r"params/w the axes \('embed',\), but its shape is \(4, 5\).*2 axes",
    ),
    (
      lambda: layout(axis_rules=(('batch', 'data'), ('embed', 'data'))).shardings(
        leaf(12), {'params': {'w': ('embed',)}}
      ),
      r'params/w of shape \(12,\) .* 12 is not a multiple of 8 .*Change the size to 8 or 16',
    ),
    (
      lambda: layout_of('context').shardings(jnp.ones((3, 12)), ('batch', 'time')),
      r'12 is not a multiple of 8 devices. Change FullAttention.max_context to 8 or 16, or',
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
  pinned = layout().jit(lambda x: constrain(x, 'batch', None))(x)
  assert pinned.addressable_shards[0].data.shape == (1, 4)


def test_layouts_that_differ_only_in_what_layers_gather_are_not_the_same():
  gathers, whole = (
    layout_of('context_fsdp', f'--gin.Partitioner.gather_layers={gathered}').computation
    for gathered in (True, False)
  )
  assert gathers != whole and gathers == layout_of('context_fsdp').computation
  with ambient.within(devices=jax.devices()[:1]):
    one = {name: layout_of(name).computation for name in ('context_fsdp', 'single')}
  assert one['single'] == one['context_fsdp'] == ()
