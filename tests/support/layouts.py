"""A train step in each layout of gin/partition, and the comparison of two layouts' results."""

import functools

import gin
import jax
import jax.numpy as jnp
import numpy as np
import tiny

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import tbptt
from valkyrie.training.data_parallel import shard_map_step

ROWS = 8


def layout_of(name, *bindings):
  gin.clear_config()
  load_gin([f'gin/partition/{name}.gin'], bindings, modules=main.CONFIGURABLE_MODULES)
  return Partitioner()


def widen(tree, dtype):
  def cast(x):
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(cast, jax.device_get(tree))


def batch(dtype):
  """Documents that end inside chunks, one of them in padding; a row has nothing to learn."""
  padded, whole = tiny.batch((4, 3, 5), rows=ROWS, padding=4), tiny.batch((8,), rows=ROWS, seed=1)
  whole = whole._replace(segment_ids=4 * whole.segment_ids)
  made = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), padded, whole)
  weighed = np.where(np.arange(ROWS)[:, None] > 0, made.weights, 0)
  return widen(made._replace(weights=weighed), dtype)


def of_step(model, remat_chunks=True, backprop_chunks=3):
  """The pure function (params, carry, batch) -> (gradient, carry, sums)."""

  def of(params, carry, batch):
    compute = functools.partial(
      tbptt.gradients, model, backprop_chunks=backprop_chunks, remat_chunks=remat_chunks
    )
    return shard_map_step(
      compute, model, params, carry, batch, chunk_size=8, learns=lambda module, name: True
    )

  return of


def assert_replicas_agree(tree):
  """What several devices hold of one part of an array is the same."""
  for leaf in jax.tree.leaves(tree):
    parts = {}
    for shard in leaf.addressable_shards:
      part = parts.setdefault(str(shard.index), shard.data)
      np.testing.assert_array_equal(shard.data, part)


@functools.cache
def initial(dtype, **options):
  """(params, carry) of a model with these options, which are the same in every layout."""
  return widen(tiny.init(tiny.model(compute_dtype=dtype, **options), ROWS), dtype)


@functools.cache
def gradients(name, dtype, *bindings, backprop_chunks=3, **options):
  """(gradient, carry, sums) of a step, and its layout; options are those of the model."""
  with jax.enable_x64(dtype == 'float64'):
    layout = layout_of(name, *bindings)
    model = tiny.model(compute_dtype=dtype, **options)
    params, carry = initial(dtype, **options)
    state = {'params': params, 'carry': carry}
    state = jax.device_put(state, tiny.shardings(layout, model, params, carry))
    step = layout.jit(of_step(model, backprop_chunks=backprop_chunks))
    found = step(state['params'], state['carry'], layout.place_batch(batch(dtype)))
    assert_replicas_agree(found)
    return jax.device_get(found), layout


def relative(a, b):
  """The norm of the difference over b's norm, the largest over leaves; NaN if one is NaN."""
  found = []
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    difference = np.linalg.norm(x - y)
    size = np.linalg.norm(y)
    found.append(difference / size if size else difference)
  return float(np.max(found))


def assert_equal(found, expected):
  """Two results of `of_step` in float64 are the same."""
  (gradient, carry, sums), one = found, expected
  np.testing.assert_allclose(sums.loss, one[2].loss, rtol=1e-10)
  assert (sums.weight, sums.beyond_window) == (one[2].weight, one[2].beyond_window)
  assert relative(gradient, one[0]) <= 1e-10
  assert relative(carry, one[1]) <= 1e-10
