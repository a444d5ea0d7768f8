"""A model whose time is split over eight devices, against the same model on one."""

import functools

import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import jaxprs
import numpy as np
import pytest
from streams import CHUNKS, ROWS, stream
import tiny

from valkyrie.models import layers
from valkyrie.models.attention import kv_cache
from valkyrie.models.recurrence import scan, sharded_scan
from valkyrie.models.recurrence.scan import Complex
from valkyrie.sharding import ambient, messages, sequence_parallel

EXACT = 1e-10  # in float64

# name: (the mesh, the axes of rows, the axes of time)
LAYOUTS = {
  'time': ({'t': 8}, (), ('t',)),
  'rows_and_time': ({'r': 2, 't': 4}, ('r',), ('t',)),
  'two_axes': ({'x': 2, 'y': 4}, (), ('x', 'y')),
}
MODELS = {
  'hybrid': {'mixers': (tiny.attention, tiny.s5)},
  'dilated': {
    'mixers': (
      functools.partial(
        tiny.attention, dilations=(1, 3), document_start=0, window=4, query_key_norm=True
      ),
    )
  },
  'full': {
    'mixers': (
      functools.partial(tiny.full, max_context=24, slides=True),
      functools.partial(tiny.full, max_context=64, carried=False),
    )
  },
  'dilated_starts': {
    'mixers': (
      functools.partial(tiny.attention, dilations=(3, 1), document_start=5),
      functools.partial(tiny.s5, conj_sym=False, scan_form='associative', activation='full_glu'),
    )
  },
}


@pytest.fixture
def float64():
  with jax.enable_x64(True):
    yield


@functools.cache
def built(name):
  model = tiny.model(compute_dtype='float64', **MODELS[name])
  params, _ = tiny.init(model, ROWS)
  return model, widened(params), widened(model.initial_carry(ROWS))


def widened(tree):
  return jax.tree.map(
    lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, jax.device_get(tree)
  )


def read(model, params, carry, chunks, weights):
  """Chunk after chunk -> (a loss, (what each token found, zero for padding, the carry))."""

  @jax.checkpoint
  def step(carry, now):
    features, carry = model.apply(params, carry, *now)
    return carry, jnp.where(now[2][..., None] > 0, features.hidden, 0)

  carry, hidden = lax.scan(step, carry, chunks)
  return jnp.sum(weights * hidden), (hidden, carry)


@functools.cache
def on_one_device(name):
  model, _, _ = built(name)
  return jax.jit(jax.value_and_grad(functools.partial(read, model), has_aux=True))


@functools.cache
def sharded(name, layout):
  """The same on eight devices, in one `shard_map`."""
  model, _, _ = built(name)
  sizes, rows, time = LAYOUTS[layout]
  mesh = Mesh(np.reshape(jax.devices(), tuple(sizes.values())), tuple(sizes))

  def body(params, carry, chunks, weights):
    # What the others hold of the carry must not matter, as long as it is finite.
    others = lax.axis_index(time) > 0
    shared = sequence_parallel.is_over_time(carry)
    carry = jax.tree.map(
      lambda x, is_shared: x if is_shared else jnp.where(others, jnp.full_like(x, 77), x),
      carry,
      shared,
    )
    with ambient.within(time=time):
      (loss, (hidden, carry)), gradient = jax.value_and_grad(
        functools.partial(read, model), has_aux=True
      )(params, carry, chunks, weights)
      carry = jax.tree.map(
        lambda x, is_shared: messages.all_gather(x, time, 2) if is_shared else x,
        sequence_parallel.broadcast_carry(carry),
        shared,
      )
    loss, gradient = lax.psum((loss, gradient), (*rows, *time))
    return (loss, (hidden, jax.tree.map(lambda x: x[None], carry))), gradient

  # The settled carry is given back by every device of time, to be compared.
  whole, cut = PartitionSpec(), PartitionSpec(None, rows, time)
  memory = jax.tree.map(
    lambda is_shared: PartitionSpec(None, rows, *[time] * is_shared),
    sequence_parallel.is_over_time(built(name)[2]),
  )
  return jax.jit(
    jax.shard_map(
      body,
      mesh=mesh,
      in_specs=(whole, memory, cut, cut),
      out_specs=((whole, (cut, PartitionSpec(time, None, rows))), whole),
      check_vma=False,
    )
  )


@pytest.mark.invariant(6)
@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize(
  ('name', 'layout', 'size'),
  [
    ('hybrid', 'time', 64),  # pieces of 8, a window of 6
    ('hybrid', 'two_axes', 16),  # pieces of 2: a window comes from three devices
    ('dilated', 'rows_and_time', 48),  # pieces of 12, a window of 12
    ('dilated_starts', 'rows_and_time', 12),  # a window of 18, longer than the chunk
    ('full', 'two_axes', 16),  # pieces of 2, and of 3 slots
    ('full', 'rows_and_time', 48),  # 24 slots, fewer than a chunk has tokens
  ],
)
@pytest.mark.usefixtures('float64')
def test_values_carries_and_gradients_are_those_of_one_device(name, layout, size, seed):
  _, params, carry = built(name)
  pieces = {'rows_and_time': 4}.get(layout, 8)
  chunks = stream(size, pieces, seed)
  weights = np.random.default_rng(seed).normal(size=(CHUNKS, ROWS, size, 16))
  arguments = params, carry, chunks, weights
  (expected, (hidden, after)), gradient = on_one_device(name)(*arguments)
  (loss, (their_hidden, settled)), their_gradient = sharded(name, layout)(*arguments)

  np.testing.assert_allclose(loss, expected, rtol=EXACT)
  np.testing.assert_allclose(their_hidden, hidden, rtol=EXACT, atol=10 * EXACT)
  for theirs, whole in zip(jax.tree.leaves(settled), jax.tree.leaves(after), strict=True):
    assert theirs.shape == (pieces, *whole.shape) and theirs.dtype == whole.dtype
    for one in theirs:
      np.testing.assert_array_equal(one, theirs[0])
      np.testing.assert_allclose(one, whole, rtol=EXACT, atol=10 * EXACT)
  for theirs, whole in zip(jax.tree.leaves(their_gradient), jax.tree.leaves(gradient), strict=True):
    assert np.linalg.norm(whole) > 0
    assert np.linalg.norm(theirs - whole) <= EXACT * np.linalg.norm(whole)


def on_eight(f, *, out):
  """f of each device's piece, in a `shard_map` over time alone; `out` is its dimension of time."""
  mesh = Mesh(np.array(jax.devices()), ('t',))

  def body(*args):
    with ambient.within(time=('t',)):
      return f(*args)

  specs = {'in_specs': PartitionSpec('t'), 'out_specs': PartitionSpec(*[None] * out, 't')}
  return jax.jit(jax.shard_map(body, mesh=mesh, check_vma=False, **specs))


@pytest.mark.usefixtures('float64')
def test_a_layer_sends_its_window_once_and_otherwise_little():
  """Not the keys of each of the many pieces of a chunk; what padding takes is in a branch."""
  _, params, carry = built('hybrid')
  arguments = params, carry, stream(64, 8, 0), np.zeros((CHUNKS, ROWS, 64, 16))
  traced = jax.make_jaxpr(sharded('hybrid', 'time'))(*arguments)
  (body,) = [e for e in jaxprs.equations(traced.jaxpr) if e.primitive.name == 'scan'][:1]
  sent = {'ppermute': [], 'all_gather': [], 'psum': []}
  for equation in jaxprs.equations(body.params['jaxpr'].jaxpr):
    if equation.primitive.name in sent:
      sent[equation.primitive.name] += map(jaxprs.size, equation.invars)
  ids, keys = ROWS * tiny.WINDOW, ROWS * tiny.WINDOW * 2 * 8
  assert sorted(sent['ppermute']) == sorted(sent['psum']) == [ids, keys, keys]
  # Lengths; document starts, their documents, and which were carried; a state, and a decay of it.
  starts, state = ROWS * 2, ROWS * 8
  assert sorted(sent['all_gather']) == sorted([ROWS, 2 * starts * 16, starts, starts, 4 * state])


def test_settling_gives_every_device_what_the_first_holds_to_the_bit():
  held = np.array([-0.0, 3e38, -1e-38, np.pi], np.float32)
  carry = {
    'float32': np.concatenate([held, np.random.default_rng(0).normal(size=28)]),
    'bfloat16': jnp.asarray([0.1, -0.0, 3.0, 1e30] + [7.0] * 28, jnp.bfloat16),
    'int32': np.arange(32, dtype=np.int32) - 2**30,
  }
  carry['float32'] = carry['float32'].astype(np.float32)
  settled = on_eight(sequence_parallel.broadcast_carry, out=0)(carry)
  for name, leaf in carry.items():
    for piece in np.split(np.asarray(settled[name]), 8):
      assert piece.tobytes() == np.asarray(leaf[:4]).tobytes(), name
  assert sequence_parallel.broadcast_carry(carry) is carry  # where time is whole


def test_a_long_chunk_is_as_exact_in_pieces():
  """16k steps of states that last, in float32, against complex128."""
  random = np.random.default_rng(0)
  time, states = 2**14, 16
  decay = (1 - 10 ** random.uniform(-5, -3, states)) * np.exp(1j * random.uniform(-3, 3, states))
  growth = np.asarray(decay - 1, np.complex64)
  driven = random.normal(size=(2, time, 1, states)).astype(np.float32)

  def run(re, im):
    zero = jnp.zeros((1, states), jnp.float32)
    arrays = (
      Complex(growth.real, growth.imag),
      Complex(re, im),
      Complex(zero, zero),
      jnp.zeros((len(re), 1), bool),
    )
    if sequence_parallel.axes():
      found, _ = sharded_scan.scan_chunk(
        *arrays, jnp.array([len(re)]), jnp.float32, form='sequential'
      )
    else:
      found = scan.diagonal_scan(*arrays, form='sequential')
    return found.re, found.im

  x, expected = np.zeros(states, complex), []
  for now in driven[0] + 1j * driven[1]:
    x = x + growth.astype(complex) * x + now[0]
    expected.append(x)
  for way in (jax.jit(run), on_eight(run, out=0)):
    re, im = way(*driven)
    off = np.linalg.norm(np.asarray(re + 1j * im)[:, 0] - expected) / np.linalg.norm(expected)
    assert off < 1e-5


@pytest.mark.parametrize('shared', [(), (1,)])
def test_dropout_draws_anew_on_each_device_but_where_one_draw_is_for_all_of_a_chunk(shared):
  drop = hk.transform(lambda x: layers.dropout(x, 0.5, shared))

  def draws(x):
    return drop.apply({}, jax.random.key(0), x[None])

  drawn = on_eight(draws, out=1)(np.ones((64, 16), np.float32))[0].reshape(8, -1)
  assert len(np.unique(drawn, axis=0)) == (1 if shared else 8)


def test_attention_draws_anew_on_each_device():
  """Of tokens that are alike: documents of one token, which read themselves and the registers."""

  def attend(x, carry):
    return tiny.attention(dropout=0.5, document_start=0)(x, carry, **tokens)

  mixer = hk.transform(attend)
  carry = kv_cache.empty_carry(1, tiny.WINDOW, 0, 2, 8, jnp.float32)
  tokens = {'positions': jnp.zeros((1, 8), jnp.int32), 'segment_ids': 1 + jnp.arange(8)[None]}
  params = mixer.init(jax.random.key(0), np.ones((1, 8, 16), np.float32), carry)

  def read(x):
    out, _ = mixer.apply(params, jax.random.key(1), x[None], carry)
    return out

  out = on_eight(read, out=1)(np.ones((64, 16), np.float32))[0].reshape(8, -1)
  assert len(np.unique(out, axis=0)) == 8
