"""The contract of a recurrent sequence mixer, for each one."""

import functools

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest
from streams import CHUNKS, ROWS, stream

from valkyrie.models.layers import MixerOptions
from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.models.recurrence.mamba2 import Mamba2
from valkyrie.models.recurrence.rg_lru import RGLRU
from valkyrie.models.s5.layer import S5
from valkyrie.sharding import ambient, sequence_parallel

WIDTH = 8
EXACT = 1e-10  # in float64

s5 = functools.partial(
  S5, state_size=6, hippo_blocks=2, discretization='normalized', activation='linear'
)
rg_lru = functools.partial(RGLRU, width=12, heads=3)


def gated(inner, **options):
  """A `GatedRecurrence` with this mixer inside."""
  return functools.partial(GatedRecurrence, functools.partial(inner, **options), width=12)


# Those that scan have a form for CPUs and one for accelerators, see `scan.FORMS`.
MIXERS = {
  's5': gated(s5, scan_form='sequential'),
  's5_associative': gated(s5, scan_form='associative'),
  's5_selective': gated(s5, selective=True, scan_form='sequential'),
  's5_selective_associative': gated(s5, selective=True, scan_form='associative'),
  'rg_lru': gated(rg_lru, scan_form='sequential'),
  'rg_lru_associative': gated(rg_lru, scan_form='associative'),
  'gated_delta': functools.partial(
    GatedDeltaNet,
    heads=2,
    key_width=4,
    value_width=5,
    value_heads=4,
    norm_epsilon=1e-3,
    slice_size=4,
  ),
  'mamba2': functools.partial(
    Mamba2, heads=4, head_width=3, state_size=5, groups=2, convolution_bias=True, slice_size=4
  ),
}
every_mixer = pytest.mark.parametrize('name', MIXERS)


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


def transformed(name):
  name, _, first = name.partition(' with ')

  def mix(carry, x, positions, segment_ids):
    mixer = MIXERS[name]()
    mixer.configure(MixerOptions(learned_carry=bool(first)))
    return mixer(x, carry, positions=positions, segment_ids=segment_ids)

  return hk.transform(mix)


@functools.cache
def built(name):
  """(apply, compiled; parameters away from any initialization; a carry in use), in float64."""
  mixer, random = transformed(name), np.random.default_rng(0)
  carry = initial_carry(name, 'float64')
  tokens = np.ones((ROWS, 1), np.int32)
  params = jax.jit(mixer.init)(jax.random.key(0), carry, np.ones((ROWS, 1, WIDTH)), tokens, tokens)

  def moved(leaf):
    return np.float64(leaf) + 0.3 * random.normal(size=leaf.shape)

  apply = jax.jit(lambda params, *arguments: mixer.apply(params, None, *arguments))
  return apply, jax.tree.map(moved, params), jax.tree.map(moved, carry)


def initial_carry(name, dtype):
  made, name = [], name.partition(' with ')[0]
  hk.transform(lambda: made.append(MIXERS[name]().initial_carry(ROWS, dtype))).init(None)
  return made[0]


def close(found, expected):
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=EXACT, atol=EXACT)


def in_chunks(name, lengths, arguments, tokens, weights):
  """((outputs, the carry after), gradients by params, carry and x), in chunks of these lengths.

  Args:
    name: of the mixer.
    lengths: of the chunks, whose sum is T.
    arguments: params, the carry, x [B, T, D].
    tokens: positions and segment ids.
    weights: of the outputs in the loss [B, T, D].
  """
  apply, _, _ = built(name)
  cuts = np.cumsum(lengths)[:-1]

  def loss(params, carry, x):
    out = []
    for now, *where in zip(*(jnp.split(part, cuts, axis=1) for part in (x, *tokens)), strict=True):
      y, carry = apply(params, carry, now, *where)
      out.append(y)
    y, random = jnp.concatenate(out, axis=1), np.random.default_rng(9)
    of_carry = sum(jnp.sum(random.normal(size=c.shape) * c) for c in jax.tree.leaves(carry))
    return jnp.sum(weights * y) + of_carry, (y, carry)

  (_, found), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)
  return found, gradients


def normal(*shape, seed=1):
  return np.random.default_rng(seed).normal(size=shape)


# Public report fla-org/flash-linear-attention#1140: gradients through chunks shorter than a
# convolution.
@pytest.mark.invariant(1)
@every_mixer
@pytest.mark.usefixtures('float64')
def test_the_cuts_between_chunks_change_nothing(name):
  """Of rows whose first document began before, and whose others are of 1 to 8 tokens."""
  _, params, carry = built(name)
  positions = np.stack([np.r_[7:10, 0:1, 0:8], np.r_[1:6, 0:7]]).astype(np.int32)
  tokens = positions, np.ones_like(positions)
  x, weights = normal(2, ROWS, 12, WIDTH)
  arguments = params, carry, x
  whole = in_chunks(name, [12], arguments, tokens, weights)
  assert min(map(np.linalg.norm, jax.tree.leaves(whole[1]))) > 0
  for lengths in ([1] * 12, [3, 8, 1], [8, 1, 3]):
    close(in_chunks(name, lengths, arguments, tokens, weights), whole)


@pytest.mark.invariant(2)
@every_mixer
@pytest.mark.usefixtures('float64')
def test_no_output_depends_on_a_later_token_and_every_later_output_on_a_token(name):
  apply, params, carry = built(name)
  positions = np.tile(np.arange(5, 17, dtype=np.int32), (ROWS, 1))
  tokens = positions, np.ones_like(positions)
  x = normal(ROWS, 12, WIDTH)
  y, _ = apply(params, carry, x, *tokens)
  for t in range(12):
    other = x.copy()
    other[:, t] += 1
    changed = np.any(apply(params, carry, other, *tokens)[0] != y, axis=-1)
    np.testing.assert_array_equal(changed, np.tile(np.arange(12) >= t, (ROWS, 1)))


@pytest.mark.invariant(3)
@pytest.mark.parametrize('name', ['s5', 'rg_lru', 'gated_delta', 'mamba2'])
@pytest.mark.usefixtures('float64')
def test_documents_begin_with_the_learned_state(name):
  """As if they went on from it; the first document of the rows goes on from the carry."""
  learned, params, carry = built(f'{name} with first')
  plain, fresh = built(name)[0], initial_carry(name, 'float64')
  x = normal(ROWS, 18, WIDTH)
  positions = np.tile(np.r_[4:7, np.arange(15) % 3].astype(np.int32), (ROWS, 1))
  found = learned(params, carry, x, positions, np.ones_like(positions))
  leaves = jax.tree.leaves_with_path(params)  # by name: im, then re
  first = [leaf for path, leaf in leaves if 'first_carry' in jax.tree_util.keystr(path)][::-1]
  states, structure = jax.tree.flatten(fresh.state)
  begun = [jnp.broadcast_to(one, leaf.shape) for one, leaf in zip(first, states, strict=True)]
  at = np.tile(np.int32([1, 2, 3]), (ROWS, 1))
  out, after = [], carry
  for begin in range(0, 18, 3):
    now, more, tokens = x[:, begin : begin + 3], (0, 0), (at + 3 * (begin == 0), np.ones_like(at))
    if begin:
      after = fresh._replace(state=structure.unflatten(begun))
    if begin and name == 'rg_lru':  # which scales the first input of a document otherwise
      starts, goes_on = (plain(params, fresh, now, t, tokens[1]) for t in (at - 1, at))
      more = starts[0] - goes_on[0], starts[1].state - goes_on[1].state
    y, after = plain(params, after, now, *tokens)
    out.append(y + more[0])
    after = after._replace(state=jax.tree.map(lambda s, m=more[1]: s + m, after.state))
  close(found, (jnp.concatenate(out, axis=1), after))
  zero = jax.tree.map_with_path(
    lambda path, leaf: leaf * ('first_carry' not in jax.tree_util.keystr(path)), params
  )
  without = plain(params, carry, x, positions, np.ones_like(positions))
  close(learned(zero, carry, x, positions, np.ones_like(positions)), without)
  differs = np.abs(without[0] - found[0]).max(axis=-1) > 1e-9
  np.testing.assert_array_equal(differs, np.tile(np.arange(18) >= 3, (ROWS, 1)))


# Public report state-spaces/mamba#783: padding that changes a state.
@pytest.mark.invariant(4)
@every_mixer
@pytest.mark.usefixtures('float64')
def test_padding_changes_no_carry(name):
  """Rows of 3 and 0 tokens before padding, against 3 tokens, and no chunk at all."""
  apply, params, carry = built(name)
  x = 100 * normal(ROWS, 12, WIDTH)
  positions, segment_ids = np.zeros((2, ROWS, 12), np.int32)
  positions[0, :3], segment_ids[0, :3] = (8, 9, 0), (1, 1, 2)
  y, after = apply(params, carry, x, positions, segment_ids)
  own_y, own = apply(params, carry, x[:, :3], positions[:, :3], segment_ids[:, :3])
  close(y[0, :3], own_y[0])
  close(after, own)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), after, carry)
  tokens = positions, segment_ids
  _, (_, of_carry, of_x) = in_chunks(name, [12], (params, carry, x), tokens, 0.0)
  np.testing.assert_array_equal(of_x[segment_ids == 0], 0)
  assert min(np.linalg.norm(part[1]) for part in jax.tree.leaves(of_carry)) > 0


def read(mixer, params, carry, chunks, weights):
  """Chunk after chunk -> (a loss, (the outputs, zero at padding, and the carry))."""

  def step(carry, now):
    y, carry = mixer.apply(params, None, carry, *now)
    return carry, jnp.where(now[2][..., None] > 0, y, 0)

  carry, y = lax.scan(step, carry, chunks)
  return jnp.sum(weights * y), (y, carry)


@functools.cache
def on_one_device(name):
  reader = functools.partial(read, transformed(name))
  return jax.jit(jax.value_and_grad(reader, (0, 1), has_aux=True))


@functools.cache
def on_eight_devices(name):
  def body(params, carry, chunks, weights):
    # Every device but the first may hold anything finite.
    others = lax.axis_index('t') > 0
    entering = jax.tree.map(lambda c: jnp.where(others, jnp.full_like(c, 77), c), carry)
    with ambient.within(time=('t',)):
      reader = functools.partial(read, transformed(name))
      (loss, (y, after)), (of_params, of_carry) = jax.value_and_grad(reader, (0, 1), has_aux=True)(
        params, entering, chunks, weights
      )
      after = sequence_parallel.broadcast_carry(after)
      of_carry = sequence_parallel.broadcast_carry(of_carry)
    loss, of_params = lax.psum((loss, of_params), 't')
    return (loss, (y, after)), (of_params, of_carry)

  whole, cut = PartitionSpec(), PartitionSpec(None, None, 't')
  return jax.jit(
    jax.shard_map(
      body,
      mesh=Mesh(np.array(jax.devices()), ('t',)),
      in_specs=(whole, whole, cut, cut),
      out_specs=((whole, (cut, whole)), whole),
      check_vma=False,
    )
  )


@pytest.mark.invariant(6)
@pytest.mark.parametrize(
  ('name', 'piece'),
  [
    # Each mixer, form, option and length of a piece, but not each with each.
    *(('s5', 8), ('s5_associative', 2), ('s5_selective', 2)),
    *(('rg_lru', 2), ('rg_lru_associative', 2)),
    *(('gated_delta', 8), ('gated_delta with first', 2)),
    *(('mamba2', 2), ('mamba2 with first', 8)),
  ],
)
@pytest.mark.usefixtures('float64')
def test_values_carries_and_gradients_over_eight_devices_are_those_of_one(name, piece):
  """A convolution reads pieces of 2 tokens of two devices; pieces of 8 have two slices."""
  _, params, carry = built(name)
  for seed in range(4):
    _, positions, segment_ids = stream(8 * piece, 8, seed)
    x, weights = normal(2, CHUNKS, ROWS, 8 * piece, WIDTH, seed=seed)
    arguments = params, carry, (x, positions, segment_ids), weights
    close(on_eight_devices(name)(*arguments), on_one_device(name)(*arguments))


@pytest.mark.invariant(8)
@every_mixer
def test_under_bfloat16_states_and_parameters_are_float32(name):
  mixer, x = transformed(name), normal(ROWS, 64, WIDTH).astype(np.float32)
  positions = np.tile(np.arange(64, dtype=np.int32) % 50, (ROWS, 1))
  tokens = positions, np.ones_like(positions)
  params = jax.jit(mixer.init)(jax.random.key(0), initial_carry(name, 'float32'), x, *tokens)
  apply = jax.jit(mixer.apply)
  expected, _ = apply(params, None, initial_carry(name, 'float32'), x, *tokens)
  carry = initial_carry(name, 'bfloat16')
  y, after = apply(params, None, carry, x.astype(jnp.bfloat16), *tokens)
  assert y.dtype == jnp.bfloat16
  assert np.linalg.norm(y.astype(np.float32) - expected) < 0.02 * np.linalg.norm(expected)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'float32'}
  for of in (carry, after):
    for path, leaf in jax.tree.leaves_with_path(of):
      is_tail = '.tail' in jax.tree_util.keystr(path)
      assert leaf.dtype == (jnp.bfloat16 if is_tail else jnp.float32), path


@every_mixer
def test_protocol(name):
  def check():
    mixer = MIXERS[name]()
    assert mixer.causal and mixer.sequence_parallel and mixer.dropout == 0
    assert mixer.forward_flops(2 * WIDTH) > mixer.forward_flops(WIDTH) > 0

  hk.transform(check).init(None)
