"""The whole model: chunked equals whole, packed equals alone, and nothing sees the future."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.lab.certificates import hlo, work
from valkyrie.models import language_model, layers
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.block import Block
from valkyrie.models.layers import GatedMLP, SquaredReLUMLP
from valkyrie.models.model import created
from valkyrie.types import Batch

full = functools.partial(FullAttention, heads=2, head_width=8, max_context=24)
MIXERS = {
  'hybrid': (tiny.attention, tiny.s5),
  'attention': (tiny.attention,),
  's5': (tiny.s5,),
  'full': (full, tiny.s5),
  'full alone': (full,),
  'n-grams': (tiny.attention,),
}
EVERY = ('hybrid', 'full', 'n-grams')  # which have all parts of the others


@functools.cache
def built(mixers='hybrid', **options):
  if mixers == 'n-grams':
    options['ngrams'] = tiny.ngrams
  model = tiny.model(MIXERS[mixers], **options)
  params, _ = tiny.init(model, 2)
  return model, params, jax.jit(model.apply)


def hidden(apply, params, carry, batch: Batch, chunk: int):
  """Reads the batch in chunks -> (hidden [B, T, D], the carry at the end)."""
  out = []
  for begin in range(0, batch.inputs.shape[1], chunk):
    piece = tiny.cut(batch, begin, begin + chunk)
    features, carry = apply(params, carry, piece.inputs, piece.positions, piece.segment_ids)
    out.append(features.hidden)
  return np.concatenate(out, axis=1), carry


def test_full_attention_without_a_carry_reads_each_chunk_alone():
  batch = tiny.batch((7, 15, 2))
  carried, params, apply = built('full alone')
  alone = tiny.model((functools.partial(full, carried=False, slice_size=5),))
  read = jax.jit(alone.apply)
  fresh = carried.initial_carry(2)
  assert not jax.tree.leaves(alone.initial_carry(2)) and not alone.about.carried
  assert alone.about.forward_flops < carried.about.forward_flops
  whole, _ = hidden(apply, params, fresh, batch, 24)
  close(hidden(read, params, alone.initial_carry(2), batch, 24)[0], whole)
  for begin in (0, 12):  # the second chunk begins inside a document
    piece = tiny.cut(batch, begin, begin + 12)
    expected, _ = hidden(apply, params, fresh, piece, 12)
    close(hidden(read, params, alone.initial_carry(2), piece, 12)[0], expected)
  with pytest.raises(ConfigurationError, match=r'25 tokens.*max_context=24'):
    hidden(alone.apply, params, alone.initial_carry(2), tiny.batch((25,)), 25)


def close(a, b, atol=2e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol), a, b)


@pytest.mark.invariant(1)
@pytest.mark.parametrize('mixers', EVERY)
def test_where_chunks_are_cut_changes_nothing(mixers):
  """Chunks of one token, shorter than the window (6), and longer; cuts inside documents."""
  model, params, apply = built(mixers)
  batch = tiny.batch((7, 15, 2))
  fresh = model.initial_carry(2)
  whole, whole_carry = hidden(apply, params, fresh, batch, 24)
  for chunk in (1, 4, 12):
    pieces, carry = hidden(apply, params, fresh, batch, chunk)
    close(pieces, whole)
    close(carry, whole_carry)


def test_the_carry_begins_at_zero_and_init_does_not_advance_it():
  model, _, _ = built()
  _, carry = tiny.init(model, 3)
  close(carry, model.initial_carry(3), atol=0)
  assert all(not np.any(leaf) for leaf in jax.tree.leaves(carry))
  assert {leaf.shape[:2] for leaf in jax.tree.leaves(carry)} == {(2, 3)}  # layers, rows


# Public report NovaSky-AI/SkyRL#2056: a state that crosses packed documents.
@pytest.mark.invariant(3)
@pytest.mark.parametrize('mixers', EVERY)
def test_packed_documents_equal_the_same_documents_alone(mixers):
  """A document alone stands before padding, so that the programs are those of the test above."""
  model, params, apply = built(mixers)
  lengths = (7, 15, 2)
  batch = tiny.batch(lengths)
  packed, _ = hidden(apply, params, model.initial_carry(2), batch, 12)
  begin = 0
  for length in lengths:
    padding = tiny.batch((), padding=24 - length)
    alone = jax.tree.map(
      lambda *parts: np.concatenate(parts, axis=1),
      tiny.cut(batch, begin, begin + length),
      padding,
    )
    found, _ = hidden(apply, params, model.initial_carry(2), alone, 24)
    close(packed[:, begin : begin + length], found[:, :length])
    begin += length


@pytest.mark.invariant(3)
def test_a_row_that_starts_a_document_does_not_know_what_it_read_before():
  model, params, apply = built()
  _, used = hidden(apply, params, model.initial_carry(2), tiny.batch((24,), seed=1), 8)
  batch = tiny.batch((12,), seed=2)
  batch = batch._replace(segment_ids=batch.segment_ids + 7)
  from_used, _ = hidden(apply, params, used, batch, 4)
  from_fresh, _ = hidden(apply, params, model.initial_carry(2), batch, 4)
  close(from_used, from_fresh)


@pytest.mark.invariant(4)
def test_padding_leaves_every_carry_untouched():
  model, params, apply = built()
  batch, padded = tiny.batch((7, 5)), tiny.batch((7, 5), padding=4)
  padded = padded._replace(inputs=np.concatenate([batch.inputs, padded.inputs[:, -4:]], axis=1))
  _, carry = hidden(apply, params, model.initial_carry(2), batch, 12)
  _, with_padding = hidden(apply, params, model.initial_carry(2), padded, 16)
  close(with_padding, carry)
  nothing = tiny.cut(padded, 12, 16)
  _, after = apply(params, carry, nothing.inputs, nothing.positions, nothing.segment_ids)
  close(after, carry, atol=0)


@pytest.mark.invariant(2)
@pytest.mark.parametrize('mixers', EVERY)
def test_no_output_depends_on_a_later_token_nor_on_another_document(mixers):
  """By gradient: d hidden[t] / d embedding of token s, which has its own row of the table."""
  model, params, _ = built(mixers)
  time = 16
  batch = tiny.batch((6, 10), rows=1)
  batch = batch._replace(inputs=np.arange(time, dtype=np.int32)[None])

  @jax.jit
  def influence(embedding):
    tied = {**params, 'model': {'embedding': embedding}}
    fresh = model.initial_carry(1)
    features, _ = model.apply(tied, fresh, batch.inputs, batch.positions, batch.segment_ids)
    return features.hidden[0].sum(axis=-1)

  jacobian = jax.jacrev(influence)(params['model']['embedding'])  # [t, token, D]
  depends = np.asarray(jnp.any(jacobian[:, :time] != 0, axis=-1))
  same = batch.segment_ids[0][:, None] == batch.segment_ids[0][None]
  allowed = np.tril(np.ones((time, time), bool)) & same
  assert not np.any(depends & ~allowed)
  assert np.all(depends[np.eye(time, dtype=bool)])
  if mixers != 'n-grams':
    assert np.all(depends[allowed])  # and memory reaches back to the start of the document


@functools.cache
def gradient_under(remat):
  """(the compiled gradient of a loss under this policy of recomputation, the gradient, tokens)."""
  model, (_, params, _) = tiny.model(MIXERS['hybrid'], remat_policy=remat), built()
  batch = tiny.batch((7, 15, 2))

  def loss(params):
    features, _ = model.apply(
      params, model.initial_carry(2), batch.inputs, batch.positions, batch.segment_ids
    )
    return jnp.sum(jnp.square(features.hidden) * 0.1)

  compiled = jax.jit(jax.grad(loss)).lower(params).compile()
  return compiled, compiled(params), batch.inputs.size


def test_remat_changes_nothing():
  _, expected, _ = gradient_under(None)
  for remat in ('products', 'mlp', 'attention', 'nothing'):
    close(gradient_under(remat)[1], expected, atol=1e-5)


def test_what_a_policy_names_is_not_computed_again():
  def flops(remat):
    compiled, _, tokens = gradient_under(remat)
    program = hlo.parse(compiled.as_text())
    return sum(one.flops * one.times for one in work.list_work(program)), tokens

  (attention, tokens), (mlp, _) = flops('attention'), flops('mlp')
  layers, d_model, width = 2, 16, 24
  assert attention - mlp == layers * tokens * 2 * d_model * 2 * width
  assert flops('nothing')[0] > attention
  assert mlp > flops(None)[0]


@pytest.mark.invariant(8)
def test_dtypes_under_bfloat16():
  model = tiny.model(compute_dtype='bfloat16')
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), 2))
  assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {'float32'}
  batch = tiny.batch((7, 15, 2))
  where = batch.inputs, batch.positions, batch.segment_ids
  features, after = jax.eval_shape(model.apply, params, carry, *where)
  assert features.hidden.dtype == jnp.bfloat16
  attention, state = after['model']['carry'][0]
  assert {part.dtype.name for part in state} == {'float32'}
  assert attention.window.keys.dtype == attention.window.values.dtype == jnp.bfloat16
  assert jax.tree.map(lambda x: x.dtype, carry) == jax.tree.map(lambda x: x.dtype, after)


class Decay(hk.Module):
  """A mixer with a float32 matrix that must stay float32, as Mamba's A_log, and with a cast one."""

  causal = True
  dropout = 0.0

  def initial_carry(self, batch_size, dtype):
    return ()

  def forward_flops(self, width):
    return 0

  def __call__(self, x, carry, *, positions, segment_ids):
    init = hk.initializers.RandomNormal(1.0)
    a_log = hk.get_parameter('a_log', (x.shape[-1], 4), jnp.float32, init)
    scale = jnp.exp(jnp.sum(jnp.sin(a_log), axis=1) / 3)
    (mixed,) = layers.project(x, (None, None), mixed=16)
    (wide,) = layers.project(mixed.astype(jnp.float32) * scale[None, None], (None, None), wide=16)
    return wide.astype(x.dtype), carry


@pytest.mark.invariant(7)
def test_the_cast_copy_computes_the_same_and_all_other_parameters_stay_float32():
  s5 = functools.partial(tiny.s5, activation='full_glu')
  model = tiny.model((tiny.attention, s5, Decay), compute_dtype='bfloat16')
  params, carry = tiny.init(model, 2)
  copy = model.cast(params)
  cast = {'query', 'key', 'value', 'out', 'gate', 'hidden', 'mixed'}
  for module, group in copy.items():
    for name, leaf in group.items():
      assert leaf.dtype == (jnp.bfloat16 if name in cast else jnp.float32), (module, name)
  batch = tiny.batch((7, 15, 2))
  read = jax.jit(model.apply)
  for a, b in zip(
    jax.tree.leaves(read(copy, carry, batch.inputs, batch.positions, batch.segment_ids)),
    jax.tree.leaves(read(params, carry, batch.inputs, batch.positions, batch.segment_ids)),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)


class Named(hk.Module):
  """A parameter with one axis of the given name."""

  def __call__(self, axis):
    return layers.parameter('weight', (4,), jnp.ones, axes=(axis,))


def test_a_declaration_belongs_to_its_innermost_module():
  """A module inside a stack has the name of one outside; a plain parameter declares nothing."""

  def stacked(x):
    return x + Named('inner')('b')

  def f():
    hk.get_parameter('plain', (2,), init=jnp.ones)
    return hk.layer_stack(3, name='outer')(stacked)(Named('inner')('a'))

  made = created(f)[1]()
  axes = {module: group['weight'].axes for module, group in made.items() if 'weight' in group}
  assert axes == {'inner': ('a',), 'outer/inner': ('layers', 'b')}
  assert made['~']['plain'].axes is None and made['~']['plain'].cast is None


def test_layers_are_stacked_over_the_repeated_pattern():
  """Two kinds of block in turn: the carry is a tuple over the pattern, stacked over repeats."""
  narrow = functools.partial(Block, mixers=(tiny.attention,), mlp_width=8)
  memory = functools.partial(Block, mixers=(tiny.s5,), mlp_width=24)
  model = language_model.transform(
    functools.partial(
      language_model.LanguageModel,
      vocabulary_size=tiny.VOCABULARY,
      d_model=16,
      layers=6,
      pattern=(narrow, memory),
    )
  )
  params, carry = tiny.init(model, 2)
  assert params['model/layers/block_0/~/mlp']['hidden'].shape == (3, 16, 8)
  assert params['model/layers/block_1/~/mlp']['hidden'].shape == (3, 16, 24)
  (attention,), (state,) = carry['model']['carry']
  assert attention.window.keys.shape == (3, 2, tiny.WINDOW, 2, 8)
  assert state.re.shape == (3, 2, 8)
  batch = tiny.batch((24,))
  apply = jax.jit(model.apply)
  whole, _ = hidden(apply, params, carry, batch, 24)
  pieces, _ = hidden(apply, params, carry, batch, 5)
  close(pieces, whole)
  with pytest.raises(ConfigurationError, match='layers=3 must be a multiple of the 2 blocks'):
    language_model.transform(
      functools.partial(
        language_model.LanguageModel,
        vocabulary_size=50,
        d_model=16,
        layers=3,
        pattern=(narrow, memory),
      )
    )


class Noise(hk.Module):
  """A mixer that carries the draw of its dropout, so that a test can look at it."""

  causal = True
  dropout = 0.5

  def initial_carry(self, batch_size, dtype):
    return jnp.zeros((batch_size, 16), dtype)

  def forward_flops(self, width):
    return 0

  def __call__(self, x, carry, *, positions, segment_ids):
    draw = layers.dropout(jnp.ones_like(x), self.dropout, shared=(1,))
    return draw * x, draw[:, -1]


@pytest.mark.parametrize('remat', ['nothing', None])
def test_dropout_draws_for_each_layer_and_row_and_only_with_an_rng(remat):
  model = tiny.model((Noise,), remat_policy=remat)
  assert model.about.has_dropout
  assert not built()[0].about.has_dropout
  params, fresh = tiny.init(model, 2)
  batch = tiny.batch((24,))

  @jax.jit
  def draws(rng):
    _, carry = model.apply(params, fresh, batch.inputs, batch.positions, batch.segment_ids, rng)
    return carry['model']['carry'][0][0]  # [layers, rows, D]

  assert np.all(draws(None) == 1)
  drawn = draws(jax.random.key(0))
  assert set(np.unique(drawn)) == {0, 2}
  assert len(np.unique(drawn.reshape(4, 16), axis=0)) == 4
  np.testing.assert_array_equal(drawn, draws(jax.random.key(0)))
  assert np.any(drawn != draws(jax.random.key(1)))


def test_dropout_of_a_block_zeroes_what_its_parts_add():
  block = functools.partial(Block, mixers=(tiny.s5,), mlp_width=24)
  plain, model = (
    language_model.transform(
      functools.partial(
        language_model.LanguageModel,
        vocabulary_size=50,
        d_model=16,
        layers=1,
        pattern=(make,),
        remat_policy=None,
      )
    )
    for make in (block, functools.partial(block, dropout=0.5))
  )
  assert model.about.has_dropout and not plain.about.has_dropout
  params, fresh = tiny.init(plain, 2)
  batch = tiny.batch((96,))

  @jax.jit
  def added(rng):
    features, _ = model.apply(
      params, fresh, batch.inputs, batch.positions, batch.segment_ids, rng,
      activations=('mixers', 'mlp'),
    )  # fmt: skip
    return features.activations

  whole, dropped = added(None), added(jax.random.key(0))
  kept = np.abs(dropped['mixers']) > 1e-6
  np.testing.assert_allclose(dropped['mixers'][kept], 2 * whole['mixers'][kept], atol=1e-5)
  for values in dropped.values():
    zero = np.abs(values) < 1e-6
    assert abs(zero.mean() - 0.5) < 0.05
    assert np.any(zero[0, 0] != zero[0, 1]) and np.any(zero[0, :, 0] != zero[0, :, 1])


class Backwards(hk.Module):
  """A mixer that reads the next token."""

  causal = False
  dropout = 0.0

  def initial_carry(self, batch_size, dtype):
    return ()

  def forward_flops(self, width):
    return 0

  def __call__(self, x, carry, *, positions, segment_ids):
    return jnp.roll(x, -1, axis=1), carry


def test_a_mixer_that_reads_later_tokens_is_refused():
  with pytest.raises(ConfigurationError, match='its mixer Backwards also reads those after it'):
    tiny.model((tiny.s5, Backwards))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'unroll': 0}, 'unroll = 0 is out of range'),
    ({'layers': 0}, 'layers = 0 is out of range'),
    ({'remat_policy': 'all'}, "remat_policy='all' is unknown. Use one of"),
    ({'compute_dtype': 'half'}, "compute_dtype='half' is unknown. Use one of"),
  ],
)
def test_options_that_cannot_be_are_refused(options, message):
  with pytest.raises(ConfigurationError, match=rf'LanguageModel\.{message}'):
    tiny.model(**options)


def test_the_description_of_a_model():
  model, params, _ = built('full')
  assert (model.about.window, model.about.max_context, model.about.vocabulary_size) == (23, 24, 50)
  assert built('hybrid')[0].about.max_context is None
  assert built('s5')[0].about.window == 0
  assert built('hybrid')[0].about.needs_whole_rows == ()
  assert tiny.model((Noise, tiny.s5, full, Noise)).about.needs_whole_rows == ('Noise',)
  assert tiny.model((functools.partial(full, slides=True),)).about.max_context is None
  assert tiny.model(insert=tiny.planner).about.needs_whole_rows == ('Planner',)
  # Every matrix costs two operations a weight and token; what attention reads comes on top.
  model, params, _ = built('attention')
  matrices = sum(
    x.size
    for group in params.values()
    for name, x in group.items()
    if name in ('query', 'key', 'value', 'out', 'gate', 'hidden')
  )
  unembedding = tiny.VOCABULARY * 16
  reads = 2 * 4 * (tiny.WINDOW + 1 + 2 + 2) * 4 * 8
  assert model.about.forward_flops == 2 * (matrices + unembedding) + reads


MLPS = {
  'silu': GatedMLP,
  'gelu': functools.partial(GatedMLP, activation='gelu'),
  'squared': SquaredReLUMLP,
  'as_wide': functools.partial(SquaredReLUMLP, width_factor=1),
}


@pytest.mark.parametrize('form', MLPS)
def test_an_mlp_is_its_equation_and_counts_its_operations(form):
  make = MLPS[form]
  x = np.random.default_rng(0).normal(size=(2, 5, 16))
  layer = hk.transform(lambda x: (make(24, name='mlp')(x), make(24, name='of').forward_flops(16)))
  params = layer.init(jax.random.key(0), x)
  found, flops = layer.apply(params, None, x)
  w = {name: np.asarray(value, np.float64) for name, value in params['mlp'].items()}
  hidden = x @ w['hidden']
  if 'gate' in w:
    gate = x @ w['gate']
    cube = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    active = {'silu': gate / (1 + np.exp(-gate)), 'gelu': gate * (1 + np.tanh(cube)) / 2}
    inner = active[form] * hidden
  else:
    inner = np.maximum(hidden, 0) ** 2
  np.testing.assert_allclose(found, inner @ w['out'], rtol=1e-5, atol=1e-6)
  matrices = 2 if form == 'as_wide' else 3
  assert flops == 2 * sum(each.size for each in w.values()) == 2 * matrices * 16 * 24
