"""Attention to both sides against its definition over all pairs, in float64."""

import functools

import dense_attention
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest

from valkyrie.models import slices
from valkyrie.models.attention import bidirectional_longformer
from valkyrie.models.attention.bidirectional_longformer import Projections
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.attention.windows import windows_of

HEADS, KV_HEADS, WIDTH, TIME, LIMIT = 4, 2, 6, 26, 5


def attention(local, from_global, window, dilations, slice_size, **options):
  seen = tuple(windows_of(dilations, HEADS, window, slice_size, Rotary()))
  return bidirectional_longformer.bidirectional_attention(
    local, from_global, windows=seen, **options
  )


compiled = jax.jit(attention, static_argnames=('window', 'dilations', 'slice_size'))


def problem(lengths, seed=0, rows=2, time=TIME):
  """Documents of these lengths, padding after them, and tokens global_tokens at random."""
  random = np.random.default_rng(seed)

  def projections():
    return Projections(
      *(random.normal(size=(rows, time, n, WIDTH)) for n in (HEADS, KV_HEADS, KV_HEADS))
    )

  ends = np.cumsum(lengths)
  segments = np.where(
    np.arange(time) < ends[-1], np.searchsorted(ends, np.arange(time), 'right'), -1
  )
  return {
    'local': projections(),
    'from_global': projections(),
    'segments': np.tile(segments.astype(np.int32) + 1, (rows, 1)),
    'mask': random.random((rows, time)) < 0.15,
  }


def run(p, dtype=np.float64, limit=LIMIT, **how):
  global_tokens = bidirectional_longformer.first_positions(jnp.asarray(p['mask']), limit)
  q = bidirectional_longformer.take(jnp.asarray(p['from_global'].q), global_tokens)
  cast = functools.partial(jnp.asarray, dtype=dtype)
  local, from_global = jax.tree.map(cast, (p['local'], p['from_global']._replace(q=q)))
  return compiled(
    local, from_global, segment_ids=jnp.asarray(p['segments']), global_tokens=global_tokens, **how
  )


def reference(p, window, dilations, limit=LIMIT):
  counted = p['mask'] & (np.cumsum(p['mask'], axis=1) <= limit)
  return dense_attention.bidirectional(
    p['local'], p['from_global'], p['segments'], counted, window, dilations
  )


@hypothesis.given(
  lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
  seed=st.integers(0, 99),
  window=st.sampled_from([1, 3, 40]),
  dilations=st.sampled_from([(1, 1), (1, 3), (2, 2)]),
  slice_size=st.sampled_from([4, 64]),
  dtype=st.sampled_from([np.float64, np.float64, np.float32, jnp.bfloat16]),
)
@hypothesis.settings(max_examples=15, derandomize=True, deadline=None)
def test_equals_the_definition(lengths, seed, window, dilations, slice_size, dtype):
  """Windows and slices longer and shorter than the row; unused and surplus designations."""
  p = problem(lengths, seed)
  with jax.enable_x64(True):
    out = run(p, dtype, window=window, dilations=dilations, slice_size=slice_size)
  assert out.dtype == dtype
  tolerance = {8: 1e-9, 4: 2e-5, 2: 0.05}[out.dtype.itemsize]
  expected = reference(p, window, dilations)
  np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_a_row_that_is_all_padding_disturbs_nothing():
  p = problem((5, 9))
  p['segments'][0] = 0
  with jax.enable_x64(True):
    out = run(p, window=3, dilations=(1, 1), slice_size=4)
  assert np.all(np.isfinite(out))
  np.testing.assert_allclose(out[1], reference(p, 3, (1, 1))[1], rtol=1e-9, atol=1e-9)


def test_the_gradient_is_that_of_the_definition():
  """Along one direction of all six inputs, by central differences of the definition."""
  p, direction = problem((3, 14, 5)), problem((3, 14, 5), seed=1)
  how = {'window': 3, 'dilations': (1, 2)}
  weights = np.random.default_rng(2).normal(size=p['local'].q.shape)

  def moved(x, dx, by):
    return jax.tree.map(lambda a, b: a + by * b, x, dx)

  def defined(by):
    there = {name: moved(p[name], direction[name], by) for name in ('local', 'from_global')}
    return np.sum(reference({**p, **there}, **how) * weights)

  with jax.enable_x64(True):
    at = bidirectional_longformer.first_positions(jnp.asarray(p['mask']), LIMIT)

    def computed(local, from_global):
      q = bidirectional_longformer.take(from_global.q, at)
      out = attention(
        local,
        from_global._replace(q=q),
        segment_ids=jnp.asarray(p['segments']),
        global_tokens=at,
        slice_size=8,
        **how,
      )
      return jnp.sum(out * weights)

    gradient = jax.jit(jax.grad(computed, argnums=(0, 1)))(p['local'], p['from_global'])
  slope = sum(
    np.sum(np.asarray(a) * b)
    for a, b in zip(
      jax.tree.leaves(gradient),
      jax.tree.leaves((direction['local'], direction['from_global'])),
      strict=True,
    )
  )
  np.testing.assert_allclose(slope, (defined(1e-5) - defined(-1e-5)) / 2e-5, rtol=1e-8)


@pytest.mark.parametrize('differentiate', [False, True])
def test_nothing_grows_with_the_square_of_time(differentiate):
  time, limit = 2**16, 4
  ones = Projections(*(jnp.ones((1, time, n, WIDTH)) for n in (HEADS, KV_HEADS, KV_HEADS)))

  def loss(local, from_global):
    out = attention(
      local,
      from_global,
      segment_ids=jnp.ones((1, time), jnp.int32),
      global_tokens=jnp.arange(limit)[None],
      window=8,
      dilations=(1, 2),
      slice_size=16,
    )
    return jnp.sum(out)

  f = jax.grad(loss, argnums=(0, 1)) if differentiate else loss
  jaxpr = jax.make_jaxpr(f)(ones, ones._replace(q=ones.q[:, :limit])).jaxpr
  # The logits were looked at: as many slices as may be held at once. T x T would be 2^32.
  largest = max(jaxprs.sizes(jaxpr))
  assert 0.99 * slices.LOGITS_AT_ONCE < largest <= slices.LOGITS_AT_ONCE == 2**22
