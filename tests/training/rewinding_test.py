"""Carries that are had again from the ones after them: bit for bit, and at what they weigh."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import jaxprs
import numpy as np
import pytest
import tiny

from valkyrie.models.attention.document_cache import DocumentCache
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.kv_cache import KVCache
from valkyrie.sharding import ambient
from valkyrie.sharding.sequence_parallel import OverTime
from valkyrie.training import rewinding, tbptt

LAYERS, ROWS, SLOTS, HEADS, WIDTH = 2, 3, 16, 1, 2
FOLLOWING = (0, 5, 14)  # of the rows: the last one passes the end of the slots
CHUNKS = 4


def carry_of(seed):
  """A carry of two layers with a cache that is full, and a state."""
  random = np.random.default_rng(seed)
  shape = (LAYERS, ROWS, SLOTS, HEADS, WIDTH)
  keys, values = random.normal(size=(2, *shape)).astype(np.float32)
  keys[..., 0] = -0.0  # which a sum of floats over devices loses
  documents = random.integers(1, 9, (LAYERS, ROWS, SLOTS)).astype(np.int32)
  following = np.tile(np.asarray(FOLLOWING, np.int32), (LAYERS, 1))
  cache = DocumentCache(OverTime(KVCache(keys, values, documents)), following)
  return {'cache': cache, 'state': keys[:, :, 0].copy()}


def written(carry, tokens):
  """The carry after chunks of so many tokens, written slot by slot."""
  after = jax.tree.map(np.array, carry)
  held = after['cache'].slots.content
  for layer in range(LAYERS):
    for row in range(ROWS):
      for number in range(tokens):
        slot = (FOLLOWING[row] + number) % SLOTS
        held.keys[layer, row, slot] = number + 1
        held.values[layer, row, slot] = -number
        held.segment_ids[layer, row, slot] = 9
  after['cache'].following[:] = (after['cache'].following + tokens) % SLOTS
  after['state'] += 1
  return after


def rewound(before, after, tokens):
  """The carry before so many tokens, from what is kept of it and the carry after."""
  kept = rewinding.kept(before, tokens)
  return kept, rewinding.rewound(rewinding.rewindable(after), kept)


def assert_same_bits(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(('room', 'tokens'), [(6, 6), (6, 4), (6, 0), (40, 16), (40, 40)])
def test_a_carry_before_tokens_is_had_again(room, tokens):
  """`room` tokens may have been written; a chunk ends with padding if it has fewer."""
  before = carry_of(0)
  after = written(before, tokens)
  kept, found = rewound(before, after, room)
  assert_same_bits(found, before)
  replaced = kept['cache'].content.slots.content
  assert replaced.keys.shape == (LAYERS, ROWS, min(room, SLOTS), HEADS, WIDTH)
  assert kept['state'] is before['state']


@pytest.mark.parametrize('piece', [1, 3, 20])
def test_devices_keep_their_share_of_what_a_chunk_replaces(piece):
  devices = 4
  mesh = Mesh(np.array(jax.devices()[:devices]), ('time',))
  before = carry_of(0)
  after = written(before, min(devices * piece, SLOTS))
  shared = PartitionSpec(None, None, 'time')
  slots = OverTime(KVCache(shared, shared, shared))
  whole = PartitionSpec()
  carries = {'cache': DocumentCache(slots, whole), 'state': whole}

  def body(before, after):
    with ambient.within(time=('time',)):
      kept, found = rewound(before, after, piece)
    assert kept['cache'].content.slots.content.keys.shape[2] == min(piece, SLOTS // devices)
    return found

  run = jax.shard_map(
    body, mesh=mesh, in_specs=(carries, carries), out_specs=carries, check_vma=False
  )
  assert_same_bits(jax.jit(run)(before, after), before)


@functools.cache
def gradients_of(keep_carries, chunks=CHUNKS, time=32, jit=jax.jit):
  attention = functools.partial(
    FullAttention, heads=2, head_width=4, max_context=SLOTS, slice_size=4, slides=True
  )
  model = tiny.model(mixers=(attention,))
  gradients = functools.partial(
    tbptt.gradients,
    model,
    chunk_size=time // chunks,
    backprop_chunks=chunks,
    remat_chunks=True,
    keep_carries=keep_carries,
  )
  return model, jit(gradients)


def test_the_gradient_is_the_same_however_many_carries_are_kept():
  """The rows' documents fill the slots more than once; two thirds of a chunk are padding."""
  batch = tiny.batch((13, 9, 2, 3), padding=5)
  model, keeping = gradients_of(keep_carries=True)
  _, recomputing = gradients_of(keep_carries=False)
  _, once = gradients_of(keep_carries=False, chunks=1)
  params, carry = tiny.init(model, 2)
  gradient, after, _ = keeping(params, carry, batch, batch.weights.sum())
  recomputed, same_after, _ = recomputing(params, carry, batch, batch.weights.sum())
  assert_same_bits((gradient, after), (recomputed, same_after))
  expected, _, _ = once(params, carry, batch, batch.weights.sum())
  for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  assert jnp.abs(jax.tree.leaves(expected)[0]).max() > 0


def test_what_is_kept_does_not_grow_with_slots_times_chunks():
  model, gradients = gradients_of(keep_carries=True, jit=lambda function: function)
  params, carry = tiny.init(model, 2)
  batch = tiny.batch((32,))
  traced = jax.make_jaxpr(gradients)(params, carry, batch, batch.weights.sum())
  outputs = [of for equation in jaxprs.equations(traced.jaxpr) for of in equation.outvars]
  shapes = {output.aval.shape for output in outputs}
  heads = 2, 4
  assert (2, 2, SLOTS, *heads) in shapes  # of layers and rows
  assert (CHUNKS, 2, 2, 32 // CHUNKS, *heads) in shapes
  assert (CHUNKS, 2, 2, SLOTS, *heads) not in shapes
