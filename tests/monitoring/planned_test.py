"""What a run says about its steps and its memory before anything is allocated."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest
import tiny

from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.models.recurrence.rg_lru import RGLRU
from valkyrie.monitoring import memory, planned
from valkyrie.training.train_state import TrainState

WIDTH = 16
MLP = 3 * WIDTH * 24
UNEMBEDDING = WIDTH * tiny.VOCABULARY
LRU = functools.partial(RGLRU, width=32, heads=4)
GATED_LRU = functools.partial(GatedRecurrence, width=32, recurrence=LRU)
RECURRENCE = functools.partial(GatedRecurrence, width=32, recurrence=tiny.s5)


# The multiply-adds of a token with matrices, and its other operations, of each of two layers.
@pytest.mark.parametrize(('mixers', 'elements', 'others'), [
  # Queries and results of 4 heads, keys and values of 2; the scores of 6 + 1 + 2 + 2 keys.
  ((tiny.attention,), 2 * WIDTH * (32 + 16), 4 * 11 * 32),
  ((tiny.s5,), 4 * 8 * WIDTH, 8 * 8),
  # The input, gate and output; B and C inside; the four taps, and the eight states.
  ((RECURRENCE,), 3 * WIDTH * 32 + 4 * 8 * 32, 2 * 4 * 32 + 8 * 8),
  # The same with two gates of four blocks inside; two gated inputs and the states.
  ((GATED_LRU,), 3 * WIDTH * 32 + 2 * 4 * 8 * 8, 2 * 4 * 32 + 4 * 32),
])  # fmt: skip
def test_operations_are_of_weights_or_between_tokens(mixers, elements, others):
  model = tiny.model(mixers=mixers)
  of_weights = 6 * (2 * (elements + MLP) + UNEMBEDDING)
  between = 3 * 2 * others
  one, two = planned.operations(model, [10, 30, 10])
  assert one.startswith('a step of 10 tokens takes ') and two.startswith('a step of 30 tokens')
  numbers = [float(number) for number in re.findall(r'\d\.\d*e\+\d+|\d+(?= of|:)', one)]
  expected = [10 * (of_weights + between), 10 * of_weights, 10 * between]
  assert numbers == pytest.approx(expected, rel=1e-3)


def test_the_parts_of_a_state_are_told_by_their_bytes_on_a_device():
  mesh = Mesh(np.asarray(jax.devices()[:2]), ('data',))
  split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (('data',), ()))

  def shape(size, sharding=whole):
    return jax.ShapeDtypeStruct((size,), jnp.float32, sharding=sharding)

  params = {
    'model/mlp': {'w': shape(512, split), 'b': shape(256)},
    'teacher/mlp': {'w': shape(1024)},
    'teacher': {'embedding': shape(256)},
  }
  moments = {'mu': params['model/mlp']}
  state = TrainState(shape(1), params, moments, {'model': shape(768)}, shape(1))
  assert planned.held(state) == (
    'on each device: model 2.0 KiB, teacher 5.0 KiB, state of the optimizer 2.0 KiB, carries 3.0 '
    'KiB'
  )


def test_arrays_are_counted_where_devices_do_not_report_their_memory():
  def counted():
    (line,) = [line for line in memory.lines(' now') if line.startswith('arrays')]
    assert line.endswith(' (they do not report their memory)')
    return memory._live_bytes()

  before = counted()
  kept = jnp.ones((1024, 256)).block_until_ready()
  assert counted() >= before + kept.nbytes
