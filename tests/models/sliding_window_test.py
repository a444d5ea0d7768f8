"""Window attention against a dense masked softmax in float64, however it is cut."""

import dense_attention
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest

from valkyrie.models import slices
from valkyrie.models.attention import kv_cache, sliding_window
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.attention.windows import windows_of

HEADS, KV_HEADS, WIDTH = 4, 2, 6
PLAIN = (1,) * KV_HEADS


def attention(q, k, v, carry, slice_size, dilations, **options):
  """`sliding_window_attention`, with the window that the carry has."""
  width = carry.window.segment_ids.shape[1] // max(dilations)
  seen = tuple(windows_of(dilations, HEADS, width, slice_size, Rotary()))
  return sliding_window.sliding_window_attention(q, k, v, carry, windows=seen, **options)


compiled = jax.jit(attention, static_argnames=('slice_size', 'dilations'))


def problem(lengths, padding=0, registers=2, seed=0, rows=2):
  random = np.random.default_rng(seed)
  time = sum(lengths) + padding
  tile = (rows, 1)
  return {
    'q': random.normal(size=(rows, time, HEADS, WIDTH)),
    'k': random.normal(size=(rows, time, KV_HEADS, WIDTH)),
    'v': random.normal(size=(rows, time, KV_HEADS, WIDTH)),
    'registers': tuple(random.normal(size=(2, registers, KV_HEADS, WIDTH))),
    'positions': np.tile(np.concatenate([np.arange(n) for n in (*lengths, padding)]), tile),
    'segments': np.tile(np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding]), tile),
  }


def run(p, window, starts, cuts, slice_size, dilations=PLAIN, dtype=np.float64):
  """The function under test, chunk after chunk."""
  cast = {
    name: jnp.asarray(x, dtype) if name in 'qkv' else jnp.asarray(x, np.int32)
    for name, x in p.items()
    if name != 'registers'
  }
  registers = tuple(jnp.asarray(r, dtype) for r in p['registers'])
  slots = window * max(dilations)
  carry = kv_cache.empty_carry(p['q'].shape[0], slots, starts, KV_HEADS, WIDTH, dtype)
  out = []
  for begin, end in zip([0, *cuts], [*cuts, p['q'].shape[1]], strict=True):
    piece = {name: x[:, begin:end] for name, x in cast.items()}
    o, carry = compiled(
      piece['q'],
      piece['k'],
      piece['v'],
      carry,
      positions=piece['positions'],
      segment_ids=piece['segments'],
      registers=registers,
      slice_size=slice_size,
      dilations=dilations,
    )
    out.append(o)
  return jnp.concatenate(out, axis=1), carry


def reference(p, window, dilations, starts):
  arrays = (p[name] for name in ('q', 'k', 'v', 'registers', 'positions', 'segments'))
  return dense_attention.causal(*arrays, window, dilations, starts)


def assert_matches(p, window, starts, dilations=PLAIN, dtype=np.float64, **how):
  with jax.enable_x64(True):
    out, _ = run(p, window, starts, dilations=dilations, dtype=dtype, **how)
  assert out.dtype == dtype
  out = np.asarray(out, np.float64)
  real = p['segments'] > 0
  tolerance = {8: 1e-9, 4: 2e-5, 2: 0.05}[jnp.dtype(dtype).itemsize]
  expected = reference(p, window, dilations, starts)
  np.testing.assert_allclose(out[real], expected[real], rtol=tolerance, atol=tolerance)
  assert np.all(np.isfinite(out))


# Public report huggingface/transformers#37574: a window's cache when it is full.
@pytest.mark.invariant(1)
@pytest.mark.parametrize('dilations', [PLAIN, (1, 3)])
@pytest.mark.parametrize('cuts', [(), (5, 10), (1, 2, 3, 4, 5, 10), (23, 28), tuple(range(1, 33))])
def test_equals_the_definition_however_it_is_cut(cuts, dilations):
  """Chunks longer and shorter than the window, and single tokens; three documents in a row.

  All cuts are into pieces of 1, 5, 23 and 33 tokens, so that few programs are compiled.
  """
  p = problem((3, 22, 8))
  assert_matches(p, window=5, starts=2, cuts=cuts, slice_size=4, dilations=dilations)


@hypothesis.given(
  lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
  seed=st.integers(0, 99),
  window=st.sampled_from([1, 4, 9]),
  dilations=st.sampled_from([PLAIN, (1, 3), (2, 2)]),
  starts=st.sampled_from([0, 3]),
  registers=st.sampled_from([0, 2]),
  slice_size=st.sampled_from([3, 16]),
  chunk=st.sampled_from([1, 7, 14, 28]),
  dtype=st.sampled_from([np.float64, np.float64, np.float32, jnp.bfloat16]),
)
@hypothesis.settings(max_examples=15, derandomize=True, deadline=None)
def test_equals_the_definition(lengths, seed, chunk, registers, **how):
  time = 28
  ends = np.minimum(np.cumsum(lengths), time)
  lengths = np.diff(ends, prepend=0, append=time)  # one more document fills the row
  p = problem(lengths[lengths > 0], registers=registers, seed=seed, rows=1)
  assert_matches(p, cuts=tuple(range(chunk, time, chunk)), **how)


@pytest.mark.invariant(4)
def test_padding_leaves_the_carry_as_it_was():
  whole, padded = problem((9,)), problem((9,), padding=6)
  for name in 'qkv':
    padded[name][:, :9] = whole[name]
  padded['registers'] = whole['registers']
  with jax.enable_x64(True):
    out, carry = run(whole, 5, 2, cuts=(), slice_size=4)
    for cuts in ((), (4,), (9,), (11,)):
      # Padding stands at the end of a chunk, so what follows a chunk with padding is padding here.
      padded_out, padded_carry = run(padded, 5, 2, cuts=cuts, slice_size=4)
      np.testing.assert_allclose(padded_out[:, :9], out, rtol=1e-9)
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), carry, padded_carry)


# Public report pytorch/pytorch#41508: rows whose keys are all masked.
def test_a_row_that_is_all_padding_disturbs_nothing():
  p = problem((9,))
  p['segments'][0] = 0

  def loss(q, k, v):
    out, carry = run({**p, 'q': q, 'k': k, 'v': v}, 5, 2, cuts=(4,), slice_size=4)
    return jnp.sum(out[1] ** 2), (out, carry)

  with jax.enable_x64(True):
    gradients, (out, carry) = jax.grad(loss, (0, 1, 2), has_aux=True)(p['q'], p['k'], p['v'])
  np.testing.assert_allclose(out[1], reference(p, 5, PLAIN, 2)[1], rtol=1e-9)
  assert np.all(np.isfinite(out))
  assert not any(np.any(leaf[0]) for leaf in jax.tree.leaves(carry))
  for gradient in gradients:
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[0]) and np.any(gradient[1])


def test_a_document_ten_million_tokens_long():
  """Positions only say where a document starts: nothing else depends on how large they are."""
  p = problem((20,))
  p['positions'] = p['positions'] + 10_000_000
  assert_matches(p, window=5, starts=2, cuts=(7,), slice_size=4)


# Public report EleutherAI/gpt-neox#1003: rotary angles in low precision.
def test_float32_far_into_a_document_is_as_exact_as_at_its_start():
  early, late = problem((64,)), problem((64,))
  late['positions'] = late['positions'] + 10_000_000
  at_start, _ = run(early, 8, 0, cuts=(), slice_size=8, dtype=np.float32)
  far_in, _ = run(late, 8, 0, cuts=(), slice_size=8, dtype=np.float32)
  np.testing.assert_array_equal(at_start, far_in)


@pytest.mark.invariant(12)
@pytest.mark.parametrize('differentiate', [False, True])
def test_nothing_grows_with_the_square_of_time(differentiate):
  time, window = 2**16, 16

  def loss(q, k, v):
    zeros = jnp.zeros((1, time), jnp.int32)
    out, _ = attention(
      q,
      k,
      v,
      kv_cache.empty_carry(1, window, 2, KV_HEADS, WIDTH, jnp.float32),
      positions=zeros,
      segment_ids=zeros + 1,
      registers=(jnp.ones((2, KV_HEADS, WIDTH)), jnp.ones((2, KV_HEADS, WIDTH))),
      slice_size=16,
      dilations=PLAIN,
    )
    return jnp.sum(out)

  arguments = [jnp.ones((1, time, n, WIDTH)) for n in (HEADS, KV_HEADS, KV_HEADS)]
  f = jax.grad(loss, argnums=(0, 1, 2)) if differentiate else loss
  sizes = list(jaxprs.sizes(jax.make_jaxpr(f)(*arguments).jaxpr))
  # The logits were looked at: as many slices as may be held at once. T x T would be 2^32.
  assert max(sizes) == slices.LOGITS_AT_ONCE == 2**22


@pytest.mark.parametrize('dilations', [PLAIN, (1, 2)])
def test_the_gradient_is_that_of_the_definition(dilations):
  """The hand-written backward pass, and what flows through the carry.

  Along one direction of all inputs at once, by central differences of the definition.
  """
  window, starts = 5, 2
  p, direction = (problem((3, 19, 8), rows=1, seed=seed) for seed in (0, 1))
  weights = np.random.default_rng(2).normal(size=p['q'].shape)
  moving = ('q', 'k', 'v', 'registers')

  def moved(by):
    return {
      name: jax.tree.map(lambda a, b: a + by * b, p[name], direction[name]) for name in moving
    }

  def defined(by):
    return np.sum(reference({**p, **moved(by)}, window, dilations, starts) * weights)

  def computed(inputs):
    out, _ = run({**p, **inputs}, window, starts, (13,), 4, dilations)
    return jnp.sum(out * weights)

  with jax.enable_x64(True):
    gradient = jax.jit(jax.grad(computed))(moved(0))
  slope = jax.tree.map(
    lambda a, b: np.sum(np.asarray(a) * b), gradient, {n: direction[n] for n in moving}
  )
  expected = (defined(1e-5) - defined(-1e-5)) / 2e-5
  np.testing.assert_allclose(sum(jax.tree.leaves(slope)), expected, rtol=1e-8)
