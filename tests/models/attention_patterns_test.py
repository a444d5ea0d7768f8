"""Attention patterns against a plain softmax over every pair of tokens, in float64."""

import functools

import dense_attention
import haiku as hk
import jax
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest
import tiny

from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.attention.patterns import Patterns
from valkyrie.sharding import ambient, sequence_parallel

D = 8
# The documents of two rows, and then padding.
LENGTHS, PADDING = ((3, 20, 6), (9, 24)), (4, 0)
TIME = 33
SHAPE = {'heads': 4, 'kv_heads': 2, 'head_width': 6, 'slice_size': 4}
# name: (the mixer, the window of its definition, dilations, document starts)
MIXERS = {
  'window': (
    functools.partial(
      LongformerAttention,
      **SHAPE,
      window=5,
      dilations=(1, 3),
      registers=2,
      document_start=3,
      query_key_norm=True,
    ),
    *(5, (1, 3), 3),
  ),
  'full': (
    functools.partial(FullAttention, **SHAPE, max_context=24, query_key_norm='whole'),
    *(23, (1, 1), 0),
  ),
  'uncarried': (
    functools.partial(FullAttention, **SHAPE, max_context=64, carried=False),
    *(63, (1, 1), 0),
  ),
}


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def rows():
  """(positions, segment_ids), int32 [B, T]."""
  positions = []
  segments = []
  for lengths, padding in zip(LENGTHS, PADDING, strict=True):
    positions.append(np.concatenate([np.arange(n) for n in (*lengths, padding)]))
    segments.append(np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, padding]))
  return np.array(positions, np.int32), np.array(segments, np.int32)


@functools.cache
def asked(name):
  """(functions of a mixer with random parameters by name, its empty carry, its parameters)."""
  make, *_ = MIXERS[name]
  questions = {
    'call': lambda *given, **where: make()(*given, **where),  # noqa: PLW0108  (makes one inside)
    'pattern': lambda *given, **where: make().attention_pattern(*given, **where),
    'carry': lambda: make().initial_carry(len(LENGTHS), np.float64),
  }
  pure = {of: hk.without_apply_rng(hk.transform(ask)) for of, ask in questions.items()}
  carry = pure['carry'].apply({})
  positions, segments = rows()
  where = {'positions': positions, 'segment_ids': segments}
  random = np.random.default_rng(0)
  drawn = pure['call'].init(jax.random.key(0), inputs(), carry, **where)
  params = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.5 * random.normal(size=leaf.shape), drawn)
  applied = {of: functools.partial(jax.jit(f.apply), params) for of, f in pure.items()}
  return applied, carry, params


def inputs():
  return np.random.default_rng(1).normal(size=(len(LENGTHS), TIME, D))


def heads(name):
  """q, k and v [B, T, heads, K] by the definition, and the parameters of the mixer."""
  make, *_ = MIXERS[name]
  _, _, params = asked(name)
  module = min(params, key=len)
  norm = make.keywords.get('query_key_norm')
  found = []
  for of in ('query', 'key', 'value'):
    x = inputs() @ params[module][of]
    by_head = x.reshape(len(LENGTHS), TIME, -1, SHAPE['head_width'])
    if norm and of != 'value':
      scaled = by_head if norm is True else x
      mean_square = np.mean(scaled**2, axis=-1, keepdims=True)
      scaled = scaled / np.sqrt(mean_square + 1e-6) * params[f'{module}/{of}_norm']['scale']
      by_head = scaled.reshape(by_head.shape)
    found.append(np.asarray(by_head))
  return *found, params[module]


def definition(name):
  """The weights [B, T, H, R + T]."""
  _, width, dilations, starts = MIXERS[name]
  q, k, _, own = heads(name)
  keys = own.get('register_keys', np.zeros((0, *k.shape[2:])))
  return dense_attention.causal_weights(q, k, keys, *rows(), width, dilations, starts)


def by_token(pattern, begin):
  """The weights [B, S, H, R + T] of a pattern of a chunk that begins at this token of the row."""
  registers, starts, before, chunk = (np.exp(part) for part in pattern)
  positions, _ = rows()
  weights = np.zeros((*registers.shape[:3], TIME))
  weights[..., begin : begin + chunk.shape[3]] = chunk
  held = min(begin, before.shape[3])
  weights[..., begin - held : begin] += before[..., before.shape[3] - held :]
  for row, of_row in enumerate(weights):
    first = begin - positions[row, begin]  # of the document that the chunk continues
    if first < begin:
      slots = min(starts.shape[3], TIME - first)
      of_row[..., first : first + slots] += starts[row, ..., :slots]
  return np.concatenate([registers, weights], axis=3)


@pytest.mark.parametrize('cuts', [(), (11, 22), tuple(range(1, TIME))])
@pytest.mark.parametrize('name', MIXERS)
def test_a_pattern_is_a_softmax_over_all_that_a_query_sees(name, cuts):
  """Documents in a row, keys of earlier chunks, and the end of a row."""
  if name == 'uncarried' and cuts:
    pytest.skip('it reads each chunk by itself')
  expected = definition(name)
  applied, carry, _ = asked(name)
  positions, segments = rows()
  for begin, end in zip([0, *cuts], [*cuts, TIME], strict=True):
    where = {'positions': positions[:, begin:end], 'segment_ids': segments[:, begin:end]}
    x = inputs()[:, begin:end]
    at = Patterns(3).at(end - begin)
    found = by_token(applied['pattern'](at, x, carry, **where), begin)
    real = segments[:, begin + at] > 0
    np.testing.assert_allclose(found[real], expected[:, begin + at][real], rtol=1e-9, atol=1e-12)
    _, carry = applied['call'](x, carry, **where)


@pytest.mark.parametrize('name', MIXERS)
def test_its_weighted_sum_of_the_values_is_what_the_mixer_projects(name):
  applied, carry, _ = asked(name)
  positions, segments = rows()
  where = {'positions': positions, 'segment_ids': segments}
  pattern = applied['pattern'](np.arange(TIME), inputs(), carry, **where)
  weights = by_token(pattern, 0)
  _, _, v, own = heads(name)
  registers = own.get('register_values', np.zeros((0, *v.shape[2:])))
  of_rows = np.broadcast_to(registers, (len(v), *registers.shape))
  values = np.repeat(np.concatenate([of_rows, v], axis=1), 2, axis=2)
  out = np.einsum('bths,bshk->bthk', weights, values)
  mixed, _ = applied['call'](inputs(), carry, **where)
  expected = out.reshape(*out.shape[:2], -1) @ own['out']
  real = segments > 0
  np.testing.assert_allclose(mixed[real], expected[real], rtol=1e-9, atol=1e-11)


@pytest.mark.invariant(6)
@pytest.mark.parametrize('name', ['window', 'full'])
def test_devices_that_share_a_chunk_find_the_pattern(name):
  """Pieces of 2 tokens of the second chunk, and of 3 carried slots of full attention."""
  half, end, piece = 16, 32, 2
  positions, segments = rows()
  where = {'positions': positions, 'segment_ids': segments}
  before = {of: x[:, :half] for of, x in where.items()}
  after = {of: x[:, half:end] for of, x in where.items()}
  applied, carry, params = asked(name)
  _, carry = applied['call'](inputs()[:, :half], carry, **before)
  make, *_ = MIXERS[name]
  ask = hk.without_apply_rng(hk.transform(lambda *a, **k: make().attention_pattern(*a, **k)))

  def body(x, carry, where):
    with ambient.within(time=('t',)):
      pattern = ask.apply(params, np.arange(piece), x, carry, **where)
    return jax.tree.map(lambda part: part[None], pattern)

  cut, whole = PartitionSpec(None, 't'), PartitionSpec()
  memory = jax.tree.map(
    lambda is_shared: cut if is_shared else whole, sequence_parallel.is_over_time(carry)
  )
  mesh = Mesh(np.array(jax.devices()), ('t',))
  specs = {'in_specs': (cut, memory, cut), 'out_specs': PartitionSpec('t')}
  read = jax.jit(jax.shard_map(body, mesh=mesh, check_vma=False, **specs))
  of_devices = jax.device_get(read(inputs()[:, half:end], carry, after))
  expected = definition(name)
  for device in range(len(jax.devices())):
    pattern = jax.tree.map(lambda part, device=device: part[device], of_devices)
    queries = half + piece * device + np.arange(piece)
    begin = half if name == 'full' else queries[0]
    real = segments[:, queries] > 0
    found = by_token(pattern, begin)
    np.testing.assert_allclose(found[real], expected[:, queries][real], rtol=1e-9, atol=1e-12)


def test_queries_are_evenly_spaced_and_end_with_the_chunk():
  assert Patterns(3).at(9).tolist() == [2, 5, 8]
  assert Patterns(4).at(10).tolist() == [1, 4, 6, 9]
  assert Patterns(9).at(2).tolist() == [0, 1]
  assert not len(Patterns(0).at(5))


def test_a_model_returns_patterns_by_path_and_all_else_as_without():
  with jax.enable_x64(False):
    model = tiny.model((tiny.attention, tiny.s5, tiny.full))
    params, carry = tiny.init(model, 2)
    batch = tiny.batch((9, 5), padding=2)
    apply = jax.jit(model.read, static_argnames='activations')
    plain, after = apply(params, carry, batch)
    found, carry = apply(params, carry, batch, activations=('stream', Patterns(4)))
  assert plain.patterns is None
  np.testing.assert_allclose(found.hidden, plain.hidden, atol=2e-6)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), carry, after)
  block = 'model/layers/block_0/~'
  paths = {f'{block}/longformer_attention', f'{block}/full_attention'}
  assert {*found.patterns} == paths
  for pattern in found.patterns.values():
    total = sum(np.exp(part).sum(-1) for part in pattern)
    assert total.shape == (2, 2, 4, 4)  # layers, rows, queries, heads
    np.testing.assert_allclose(total, 1, rtol=1e-6)
