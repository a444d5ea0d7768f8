"""Full attention through many chunks: its definition, its gradient, and what slides."""

import functools
import types

import dense_attention
import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import jaxprs
import numpy as np
import pytest

from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import collectives, hlo, work
from valkyrie.models import kernel_choice, slices
from valkyrie.models.attention import blocks, cudnn, document_cache, softmax
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.kv_cache import KVCache
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.attention.rotary import Rotary
from valkyrie.sharding import ambient, sequence_parallel

HEADS, KV_HEADS, WIDTH = 4, 2, 6
# Documents of three rows: each within 24 tokens, in slots that are used twice; the last is one.
ROWS = ((3, 22, 8), (9, 24), (33,))
LONGEST = 24


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture
def few_logits(monkeypatch):
  """Blocks of at most 5 keys; the last one is not full."""
  monkeypatch.setattr(slices, 'LOGITS_AT_ONCE', 5 * 4 * HEADS * len(ROWS))
  monkeypatch.setattr(cudnn, 'PAIRS_AT_ONCE', 5 * 5 * len(ROWS))


@pytest.fixture(params=['plain', 'kernel', 'as a TPU'])
def by_kernel(request, monkeypatch):
  """Whether blocks are read as by cuDNN's kernel, in whose place stand its equations.

  A TPU has the plain form with a mask for each head, and blocks of twice as many keys.
  """
  if request.param == 'as a TPU':
    monkeypatch.setattr(blocks, 'platform', lambda: 'tpu')

  def logits_of(q, k, seen):
    scores = jnp.einsum('rhsk,rhnk->rhsn', q, jnp.repeat(k, HEADS // KV_HEADS, axis=1))
    if seen is None:
      return scores
    return scores + jnp.where(seen, 0, softmax.MASKED)[:, None]

  def forward(q, k, v, seen):
    logits = logits_of(q, k, seen)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - log_total[..., None])
    values = jnp.repeat(v, HEADS // KV_HEADS, axis=1)
    return jnp.einsum('rhsn,rhnk->rhsk', weights, values), log_total

  def backward(q, k, v, seen, out, log_total, gradient):
    keys, values = (jnp.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
    weights = jnp.exp(logits_of(q, k, seen) - log_total[..., None])
    d_weights = jnp.einsum('rhsk,rhnk->rhsn', gradient, values)
    d_logits = weights * (d_weights - jnp.sum(gradient * out, axis=-1, keepdims=True))

    def by_kv_head(x):
      return x.reshape(len(x), KV_HEADS, -1, *x.shape[2:]).sum(2)

    d_k = by_kv_head(jnp.einsum('rhsn,rhsk->rhnk', d_logits, q))
    d_v = by_kv_head(jnp.einsum('rhsn,rhsk->rhnk', weights, gradient))
    return jnp.einsum('rhsn,rhnk->rhsk', d_logits, keys), d_k, d_v

  monkeypatch.setattr(cudnn, 'forward', forward)
  monkeypatch.setattr(cudnn, 'backward', backward)
  monkeypatch.setattr(blocks, 'LANES', 5)
  return request.param == 'kernel'


def problem(seed=0):
  random = np.random.default_rng(seed)
  time = sum(ROWS[0])
  shapes = {'q': HEADS, 'k': KV_HEADS, 'v': KV_HEADS}
  arrays = {n: random.normal(size=(len(ROWS), time, h, WIDTH)) for n, h in shapes.items()}
  segments = np.stack([np.repeat(np.arange(len(row)) + 1, row) for row in ROWS])
  return arrays, segments.astype(np.int32)


def read(arrays, segments, cuts, reach=LONGEST, slice_size=4, by_kernel=False):
  """Chunk after chunk -> (out [B, T, H, K], the cache)."""
  form = blocks.Form(reach, slice_size, by_kernel)
  dtype = arrays['q'].dtype
  cache = document_cache.empty_cache(len(segments), reach, KV_HEADS, WIDTH, dtype)
  attend = jax.jit(functools.partial(document_cache.attend, form, Rotary()))
  outs = []
  for begin, end in zip([0, *cuts], [*cuts, segments.shape[1]], strict=True):
    q, k, v = (arrays[name][:, begin:end] for name in 'qkv')
    out, cache = attend(q, KVCache(k, v, segments[:, begin:end]), cache)
    outs.append(out)
  return jnp.concatenate(outs, axis=1), cache


def definition(arrays, segments, reach=LONGEST):
  registers = np.zeros((2, 0, KV_HEADS, WIDTH))
  positions = np.zeros_like(segments)
  ones = (1,) * KV_HEADS
  return dense_attention.causal(
    *arrays.values(), registers, positions, segments, reach - 1, ones, 0
  )


@pytest.mark.invariant(1)
@pytest.mark.invariant(3)
@pytest.mark.parametrize('cuts', [(), (11, 22), tuple(range(1, 33))])
@pytest.mark.usefixtures('few_logits')
def test_equals_the_definition_however_it_is_cut(cuts, by_kernel):
  arrays, segments = problem()
  out, _ = read(arrays, segments, cuts, by_kernel=by_kernel)
  np.testing.assert_allclose(out, definition(arrays, segments), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('documents', [(20,), (10, 10), (7, 13)])
def test_a_kernel_gets_no_mask_for_keys_that_all_its_queries_see(documents, monkeypatch):
  """Blocks of 5 keys and slices of 5 queries. Here, what is read without a mask is NaN."""
  monkeypatch.setattr(blocks, 'LANES', 5)
  monkeypatch.setattr(cudnn, 'PAIRS_AT_ONCE', 5 * 5)

  def forward(q, k, v, seen):
    value = 0.0 if seen is not None else jnp.nan
    return jnp.full(q.shape, value), jnp.full(q.shape[:-1], value)

  monkeypatch.setattr(cudnn, 'forward', forward)
  segments = np.repeat(np.arange(len(documents)) + 1, documents)
  tokens = np.ones((1, segments.size, HEADS, WIDTH))
  keys = KVCache(tokens[:, :, :KV_HEADS], tokens[:, :, :KV_HEADS], segments[None])
  form = blocks.Form(LONGEST, 5, by_kernel=True)
  out, _ = document_cache.attend(form, Rotary(), tokens, keys, ())
  by_slice = segments.reshape(-1, 5)
  for number, queries in enumerate(by_slice):
    before = by_slice[:number]
    whole = [np.all(block[:, None] == queries) for block in before]
    rows = slice(5 * number, 5 * number + 5)
    assert np.isnan(out[0, rows]).all() == any(whole)


def test_a_certificate_counts_every_block_as_one_without_a_mask(monkeypatch):
  monkeypatch.setattr(blocks, 'LANES', 5)
  monkeypatch.setattr(cudnn, 'PAIRS_AT_ONCE', 5 * 5)

  def forward(q, k, v, seen):
    logits = jnp.einsum('rhsk,rhnk->rhsn', q, k)
    if seen is not None:
      logits += jnp.einsum('rsn,rhsm->rhmn', seen.astype(q.dtype), logits)
    return jnp.einsum('rhsn,rhnk->rhsk', logits, v), logits[..., 0]

  monkeypatch.setattr(cudnn, 'forward', forward)
  form = blocks.Form(LONGEST, 5, by_kernel=True)
  tokens = jnp.ones((1, 20, HEADS, WIDTH))
  keys = KVCache(tokens, tokens, jnp.ones((1, 20), jnp.int32))
  read = jax.jit(functools.partial(document_cache.attend, form, Rotary()))
  program = hlo.parse(read.lower(tokens, keys, ()).compile().as_text() or '')
  flops = sum(one.flops * one.times for one in work.list_work(program))
  assert flops == 2 * 2 * 20 * 20 * HEADS * WIDTH


@pytest.mark.usefixtures('few_logits')
def test_the_gradient_through_all_chunks_is_that_of_the_definition(by_kernel):
  """Along one direction of all inputs at once, by central differences of the definition."""
  arrays, segments = problem()
  direction, _ = problem(seed=1)
  weights = np.random.default_rng(2).normal(size=arrays['q'].shape)

  def moved(by):
    return {name: x + by * direction[name] for name, x in arrays.items()}

  def computed(moving):
    return jnp.sum(read(moving, segments, (11, 22), by_kernel=by_kernel)[0] * weights)

  def defined(by):
    return np.sum(definition(moved(by), segments) * weights)

  gradient = jax.grad(computed)(arrays)
  slope = sum(np.sum(np.asarray(gradient[name]) * direction[name]) for name in arrays)
  expected = (defined(1e-5) - defined(-1e-5)) / 2e-5
  np.testing.assert_allclose(slope, expected, rtol=1e-8)


@pytest.mark.invariant(4)
def test_padding_leaves_the_cache_as_it_was():
  arrays, segments = problem()
  padded = np.where(np.arange(33)[None] < 22, segments, 0)
  whole = {name: x[:, :22] for name, x in arrays.items()}
  _, expected = read(whole, segments[:, :22], (11,))
  _, found = read(arrays, padded, (11,))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_angles_a_million_tokens_away_are_those_of_float64():
  at = jnp.array([[0, 1023, 1024, 123_456, 2**20 - 1]])
  found = document_cache.angles_at(Rotary(), 2**20, 8, jnp.float32, at)
  exact = np.asarray(at)[..., None] * Rotary().frequencies(8)
  for table, function in zip(found, (np.cos, np.sin), strict=True):
    assert table.dtype == jnp.float32
    np.testing.assert_allclose(table, function(exact), atol=3e-7)


@pytest.mark.invariant(12)
@pytest.mark.parametrize('differentiate', [False, True])
def test_nothing_has_the_size_of_queries_times_keys(differentiate):
  time, context = 2**10, 2**16

  def loss(q, k, v):
    cache = document_cache.empty_cache(1, context, KV_HEADS, WIDTH, q.dtype)
    tokens = KVCache(k, v, jnp.ones((1, time), jnp.int32))
    form = blocks.Form(context, 128)
    return jnp.sum(document_cache.attend(form, Rotary(), q, tokens, cache)[0])

  arguments = [jnp.ones((1, time, n, WIDTH)) for n in (HEADS, KV_HEADS, KV_HEADS)]
  f = jax.grad(loss, argnums=(0, 1, 2)) if differentiate else loss
  sizes = list(jaxprs.sizes(jax.make_jaxpr(f)(*arguments).jaxpr))
  assert slices.LOGITS_AT_ONCE / 2 < max(sizes) <= slices.LOGITS_AT_ONCE < time * context


def test_a_kernel_gives_the_gradients_of_pieces_of_devices(by_kernel):
  """The join over devices has a gradient for the logarithm, which the kernel does not take.

  A device has no key that some queries see: of the first tokens, and of other documents.
  """
  if not by_kernel:
    pytest.skip('the plain form is what a kernel is compared with')
  arrays, segments = problem()
  arrays = {name: x[:, :32] for name, x in arrays.items()}
  segments = jnp.asarray(segments[:, :32])
  weights = np.random.default_rng(2).normal(size=arrays['q'].shape)
  pieces = PartitionSpec(None, 't')

  def gradients(form):
    def piece(q, k, v, segments):
      with ambient.within(time=('t',)):
        return document_cache.attend(form, Rotary(), q, KVCache(k, v, segments), ())[0]

    read = jax.shard_map(
      piece,
      mesh=Mesh(np.array(jax.devices()), ('t',)),
      in_specs=(pieces,) * 4,
      out_specs=pieces,
      check_vma=False,
    )
    return jax.grad(lambda x: jnp.sum(read(x['q'], x['k'], x['v'], segments) * weights))(arrays)

  found, expected = (gradients(blocks.Form(LONGEST, 4, kernel)) for kernel in (True, False))
  for name in 'qkv':
    assert np.abs(expected[name]).max() > 0.1
    np.testing.assert_allclose(found[name], expected[name], rtol=1e-8, atol=1e-10)


@pytest.mark.invariant(12)
def test_over_devices_the_messages_do_not_grow_with_the_keys():
  """And a certificate counts the products of every block, though a block can be left out."""
  time, devices = 64, 8

  def work_of(slots):
    def body(q, k, v, segments, cache):
      with ambient.within(time=('t',)):
        form = blocks.Form(slots, 16)
        return document_cache.attend(form, Rotary(), q, KVCache(k, v, segments), cache)

    cache = document_cache.empty_cache(1, slots, KV_HEADS, WIDTH, 'float32')
    arrays = [jnp.ones((1, time, heads, WIDTH), 'float32') for heads in (HEADS, KV_HEADS, KV_HEADS)]
    over_time = jax.tree.map(
      lambda shared: PartitionSpec(None, 't') if shared else PartitionSpec(),
      sequence_parallel.is_over_time(cache),
    )
    pieces = PartitionSpec(None, 't')
    step = jax.shard_map(
      body,
      mesh=Mesh(np.array(jax.devices()), ('t',)),
      in_specs=(pieces, pieces, pieces, pieces, over_time),
      out_specs=(pieces, over_time),
      check_vma=False,
    )
    compiled = jax.jit(step).lower(*arrays, jnp.ones((1, time), jnp.int32), cache).compile()
    program = hlo.parse(compiled.as_text())
    flops = sum(one.flops * one.times for one in work.list_work(program))
    assert flops == 4 * time * (slots + time) // devices * HEADS * WIDTH
    return collectives.by_kind(collectives.list_collectives(program))

  messages = work_of(64)
  assert messages == work_of(1024) and sum(messages.values()) > 0


def mixer(make):
  def f(x, carry, segments):
    zeros = jnp.zeros_like(segments)
    return make(heads=HEADS, kv_heads=KV_HEADS, head_width=WIDTH)(
      x, carry, positions=zeros, segment_ids=segments
    )

  def initial_carry():
    return make(heads=HEADS, kv_heads=KV_HEADS, head_width=WIDTH).initial_carry(3, 'float64')

  return hk.without_apply_rng(hk.transform(f)), hk.transform(initial_carry).apply({}, None)


def test_what_slides_is_a_window_of_longer_documents():
  _, segments = problem()
  x, weights = np.random.default_rng(0).normal(size=(2, 3, 33, 8))
  full = mixer(functools.partial(FullAttention, max_context=10, slides=True))
  window = mixer(functools.partial(LongformerAttention, window=9))
  params = full[0].init(jax.random.key(0), x, full[1], segments)
  named = {f'longformer_attention{n.removeprefix("full_attention")}': p for n, p in params.items()}

  def results(of, params):
    transformed, carry = of

    @jax.jit
    def loss(params, x):
      ys, after = [], carry
      for part in (slice(0, 11), slice(11, 22), slice(22, 33)):
        y, after = transformed.apply(params, x[:, part], after, segments[:, part])
        ys.append(y)
      return jnp.sum(weights * jnp.concatenate(ys, axis=1))

    return jax.tree.leaves(jax.value_and_grad(loss, (0, 1))(params, x))

  for found, expected in zip(results(full, params), results(window, named), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'slides': True, 'carried': False}, 'slides = True needs FullAttention.carried = True'),
    ({'kernels': 'interpret'}, "cuDNN's kernel reads the keys of earlier chunks, and only a GPU"),
  ],
)
def test_what_has_no_meaning_is_refused(options, said):
  with pytest.raises(ConfigurationError, match=said):
    hk.transform(lambda: FullAttention(heads=1, head_width=8, max_context=8, **options)).apply(
      {}, None
    )


@pytest.mark.parametrize('carried', [False, True])
def test_kernels_read_no_piece_of_a_chunk_that_is_read_alone(carried):
  def misfit():
    sizes = {'heads': 1, 'head_width': 8, 'max_context': 128}
    mixer = FullAttention(**sizes, carried=carried, kernels='prefer')
    return kernel_choice.why_not(mixer, 128)

  gpu = [types.SimpleNamespace(platform='gpu')]
  with ambient.within(time=('t',), devices=gpu):
    found = hk.transform(misfit).apply({}, None)
  with ambient.within(devices=gpu):
    assert hk.transform(misfit).apply({}, None) is None
  expected = None if carried else 'the kernels read whole chunks, and devices share each chunk'
  assert found == expected
