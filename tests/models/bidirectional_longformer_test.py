"""The mixer that reads both ways, from its parameters to its outputs."""

import functools

import dense_attention
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.bidirectional_longformer import BidirectionalLongformer

HEADS, KV_HEADS, WIDTH = 4, 2, 6
make = functools.partial(
  BidirectionalLongformer,
  heads=HEADS,
  head_width=WIDTH,
  window=3,
  kv_heads=KV_HEADS,
  dilations=(1, 2),
  document_start=2,
  max_global_tokens=3,
  slice_size=8,
)


def transformed(**options):
  def mix(x, positions, segment_ids):
    mixer = make(**options)
    carry = mixer.initial_carry(x.shape[0], x.dtype)
    return mixer(x, carry, positions=positions, segment_ids=segment_ids)

  return hk.transform(mix)


@pytest.mark.parametrize('normed', [False, True])
def test_equals_the_definition_from_its_parameters(normed):
  """The first document goes on from an earlier chunk: its first tokens are not in this one."""
  batch = tiny.batch((6, 14, 5, 3), padding=2)
  first = batch.segment_ids == 1
  positions = np.where(first, batch.positions + 10_000_000, batch.positions)
  x = np.random.default_rng(0).normal(size=(*positions.shape, 16))
  mixer = transformed(dropout=0.5, query_key_norm=normed)
  params = jax.jit(mixer.init)(
    jax.random.key(0), jnp.asarray(x, jnp.float32), positions, batch.segment_ids
  )
  random = np.random.default_rng(1)
  params = {
    module: {'scale': jnp.float32(random.uniform(0.5, 2, WIDTH))} if 'norm' in module else group
    for module, group in params.items()
  }
  p = jax.tree.map(np.float64, params['bidirectional_longformer'])
  assert len(params) == (5 if normed else 1)

  def projected(name):
    heads = (x @ p[name]).reshape(*x.shape[:2], -1, WIDTH)
    if not normed or 'value' in name:
      return heads
    size = np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + 1e-6)
    scale = np.float64(params[f'bidirectional_longformer/{name}_norm']['scale'])
    return heads / size * scale[None, None, None]

  def projections(*names):
    return tuple(map(projected, names))

  starts = (positions < 2) & (batch.segment_ids > 0)
  expected = dense_attention.bidirectional(
    projections('query', 'key', 'value'),
    projections('global_query', 'global_key', 'global_value'),
    batch.segment_ids,
    global_tokens=starts & (np.cumsum(starts, axis=1) <= 3),
    window=3,
    dilations=(1, 2),
  )
  expected = expected.reshape(*x.shape[:2], -1) @ p['out']

  apply = jax.jit(mixer.apply)
  for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.05)):
    arguments = jnp.asarray(x, dtype), positions, batch.segment_ids
    out, carry = apply(params, None, *arguments)
    assert out.dtype == dtype and carry == ()
    np.testing.assert_allclose(np.float64(out), expected, rtol=tolerance, atol=tolerance)
  # Without a random key nothing was left out.
  dropped, _ = apply(params, jax.random.key(1), *arguments)
  assert np.all(np.any(dropped != out, axis=-1) == (batch.segment_ids > 0))


def test_without_document_starts_there_are_no_global_projections():
  batch = tiny.batch((12,))
  mixer = transformed(document_start=0, max_global_tokens=None)
  x = jnp.ones((2, 12, 16))
  shapes = jax.eval_shape(mixer.init, jax.random.key(0), x, batch.positions, batch.segment_ids)
  (params,) = shapes.values()
  assert set(params) == {'query', 'key', 'value', 'out'}


def test_what_does_not_fit_is_refused():
  with pytest.raises(ConfigurationError, match='BidirectionalLongformer'):
    tiny.model((make,))
  for wrong in ({'dilations': (1,)}, {'dilations': (1, 0)}, {'heads': 3}, {'head_width': 5}):
    with pytest.raises(ConfigurationError, match=f'Bidirectional.*{next(iter(wrong))} ?='):
      hk.transform(lambda wrong=wrong: make(**wrong)).init(None)
