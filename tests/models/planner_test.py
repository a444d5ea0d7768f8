"""The planner against a loop over tokens: nothing leaks, and chunks change nothing."""

import functools

from drafts import DraftLoss
import haiku as hk
from hrm import Pace, Reasoner, Weights
from hrm_test import reference as deliberate
from hypothesis import given, settings, strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.training import tbptt
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.objective import PREDICTION
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step
from valkyrie.types import Batch

WIDTH = 8
TIME = 24
CHUNK = 12
HEADS = 2  # as in hrm_test
TERMS = (*PREDICTION, DraftLoss())
planner = functools.partial(tiny.planner, head_width=WIDTH // HEADS)


def _pure():
  def f(x, carry, positions, segment_ids):
    return planner()(x, carry, positions=positions, segment_ids=segment_ids)

  def fresh(rows, dtype):
    return planner().initial_carry(rows, WIDTH, dtype)

  empty = hk.without_apply_rng(hk.transform(fresh)).apply
  return hk.without_apply_rng(hk.transform(f)), functools.partial(empty, {})


def awake(params, seed=9):
  """Parameters as if learned: none is zero, and every segment is halted at somewhere.

  Those of the recurrence move little, since it would else blow up what differs in the last bit.
  """
  random = np.random.default_rng(seed)

  def learned(name, x):
    noise = random.normal(size=x.shape) * (0.15 if name[:4] in ('slow', 'fast') else 0.5)
    return np.asarray(x) + noise.astype(x.dtype)

  return {
    module: {name: learned(name, x) if 'planner' in module else x for name, x in leaves.items()}
    for module, leaves in params.items()
  }


def widen(tree):
  return jax.tree.map(
    lambda x: np.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype), tree
  )


def reference(params, x, positions, segment_ids):
  """One row, token by token, in float64: (out [T, D], drafts [T, M, D], values [T, M, 2])."""
  p = params['planner']
  options = planner.keywords
  grain, segments = options['plan_interval'], options['segments']
  pace = Pace(segments, 2, 2, HEADS)
  weights = Weights(
    slow=Reasoner(*(p[f'slow_{name}'] for name in Reasoner._fields)),
    fast=Reasoner(*(p[f'fast_{name}'] for name in Reasoner._fields)),
    halt=p['halt'],
    halt_bias=p['halt_bias'],
  )

  def softmax(scores):
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)

  def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale

  block, state, plans, values, stands = [], None, None, None, 0
  outs, drafts, heads = [], [], []
  x = norm(x, params['planner/input_norm']['scale'])
  for token, position, document in zip(x, positions, segment_ids, strict=True):
    if position == 0:
      block, plans = [], None
      state = (np.zeros((options['plan_tokens'], WIDTH)),) * 2

    if plans is None:
      read = np.zeros((segments, WIDTH))
      out, head = np.zeros(WIDTH), np.zeros((segments, 2))
    else:
      read = []
      for plan in plans:
        parts = []
        for h in range(HEADS):
          of = slice(h * WIDTH // HEADS, (h + 1) * WIDTH // HEADS)
          q, k, v = token @ p['query'][:, of], plan @ p['key'][:, of], plan @ p['value'][:, of]
          parts.append(softmax(k @ q / np.sqrt(WIDTH / HEADS)) @ v)
        read.append(np.concatenate(parts))
      read, head = np.stack(read), values
      out = read[stands] @ p['out']
    outs.append(out)
    drafts.append(norm(read, params['planner/draft_norm']['scale']))
    heads.append(head)

    if document > 0:
      block.append(token)
    if len(block) == grain:
      shares = softmax(p['queries'] @ np.stack(block).T / np.sqrt(WIDTH))
      told = shares @ np.stack(block) @ p['summary'] + p['queries']
      _, after = deliberate(weights, *state, told, pace)
      plans = [slow for slow, _ in after]
      values = np.stack([plan[0] @ p['halt'] + p['halt_bias'] for plan in plans])
      stands = next((m for m in range(segments) if values[m, 0] > values[m, 1]), segments - 1)
      block, state = [], after[stands]
  return np.stack(outs), np.stack(drafts), np.stack(heads)


@functools.cache
def alone():
  """(the planner compiled for chunks of CHUNK, float64 parameters, an empty carry of two rows)."""
  pure, empty = _pure()
  with jax.enable_x64(True):
    one = jnp.ones((2, 1), jnp.int32)
    params = pure.init(jax.random.key(0), jnp.ones((2, 1, WIDTH)), empty(2, jnp.float64), one, one)
    return jax.jit(pure.apply), awake(widen(params)), empty(2, jnp.float64)


def in_pieces(x, batch: Batch, lengths):
  """The planner over chunks of these lengths, each filled up to CHUNK with padding.

  Returns:
    (out [B, T, D], drafts [B, T, M, D], values [B, T, M, 2], has_plan [B, T]).
  """
  apply, params, carry = alone()
  pieces, begin = [], 0
  for length in lengths:

    def piece(leaf, begin=begin, length=length):
      fill = [(0, 0), (0, CHUNK - length), (0, 0)][: leaf.ndim]
      return np.pad(leaf[:, begin : begin + length], fill)

    with jax.enable_x64(True):
      out, carry, drafts = apply(
        params, piece(x), carry, piece(batch.positions), piece(batch.segment_ids)
      )
    hidden, values = (np.moveaxis(leaf, 0, 2) for leaf in (drafts.hidden, drafts.values))
    pieces.append([leaf[:, :length] for leaf in (out, hidden, values, drafts.has_plan)])
    begin += length
  return [np.concatenate(column, axis=1) for column in zip(*pieces, strict=True)]


def _up_to(total, longest):
  """Lists of lengths from 1 to `longest` that add up to `total`."""

  def cut_off(lengths):
    ends = np.minimum(np.cumsum([*lengths, *[longest] * total]), total)
    return [int(n) for n in np.diff(ends, prepend=0) if n]

  return strategies.lists(strategies.integers(1, longest), max_size=total).map(cut_off)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
  documents=strategies.tuples(_up_to(TIME, 17), _up_to(TIME, 17)),
  chunks=_up_to(TIME, CHUNK),
  seed=strategies.integers(0, 2**16),
)
def test_however_documents_end_and_chunks_are_cut_it_equals_the_loop_over_tokens(
  documents, chunks, seed
):
  rows = [tiny.batch(lengths, rows=1) for lengths in documents]
  batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
  x = np.random.default_rng(seed).normal(size=(2, TIME, WIDTH))
  found = in_pieces(x, batch, chunks)
  stands = batch.positions >= tiny.INTERVAL
  np.testing.assert_array_equal(found[3], stands)
  _, params, _ = alone()
  for row in range(2):
    out, drafts, values = reference(params, x[row], batch.positions[row], batch.segment_ids[row])
    np.testing.assert_allclose(found[0][row], out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[1][row], drafts, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found[2][row][stands[row]], values[stands[row]], rtol=1e-9)


def test_the_halting_head_has_chosen_every_segment_somewhere():
  """What the test above compares would else not tell the segments apart."""
  x = np.random.default_rng(0).normal(size=(2, TIME, WIDTH))
  _, _, values, has_plan = in_pieces(x, tiny.batch((TIME,)), [CHUNK, CHUNK])
  halts = values[has_plan][..., 0] > values[has_plan][..., 1]
  halts[:, -1] = True
  assert set(np.argmax(halts, axis=-1)) == {0, 1, 2}


@functools.cache
def built(mixers=(), **options):
  model = tiny.model(mixers, insert=tiny.planner, **options)
  params, carry = tiny.init(model, 2)
  return model, awake(params), carry


@pytest.mark.invariant(2)
def test_a_token_depends_on_earlier_intervals_and_on_nothing_else():
  """In a model whose only way from token to token is the planner; documents start in mid-chunk.

  Changing a token changes every later interval of its document. Its gradient reaches the next one,
  since the recurrence cuts it at its last step. In float64: in float32 the rows of a batch
  round differently, and the recurrence amplifies that.
  """
  with jax.enable_x64(True):
    model, params, _ = built(compute_dtype='float64', remat_policy=None)
    lengths, time = (11, 2, 15), 28
    batch = tiny.batch(lengths, rows=1)
    tokens = np.arange(time, dtype=np.int32)  # each has its own row of the table
    block, document = batch.positions[0] // tiny.INTERVAL, batch.segment_ids[0]
    same = document[:, None] == document[None]
    itself = np.eye(time, dtype=bool)

    @jax.jit
    def read(embedding, inputs):
      rows = inputs.shape[0]
      positions, segment_ids = (
        jnp.repeat(leaf, rows, axis=0) for leaf in (batch.positions, batch.segment_ids)
      )
      tied = {**params, 'model': {'embedding': embedding}}
      features, _ = model.apply(tied, model.initial_carry(rows), inputs, positions, segment_ids)
      drafts = jnp.moveaxis(features.auxiliary.hidden, 0, 2).reshape(rows, time, -1)
      return jnp.concatenate([features.hidden, drafts], axis=-1)

    embedding = params['model']['embedding']
    changed = np.where(itself, time + 1, tokens[None])
    out = read(embedding, np.concatenate([tokens[None], changed]).astype(np.int32))
    moved = np.abs(out[1:] - out[:1]).max(axis=-1).T > 1e-9  # [t, s]
    np.testing.assert_array_equal(moved, itself | same & (block[None] < block[:, None]))

    jacobian = jax.jacrev(lambda e: read(e, tokens[None])[0].sum(axis=-1))(embedding)
    depends = np.asarray(jnp.any(jacobian[:, :time] != 0, axis=-1))
    np.testing.assert_array_equal(depends, itself | same & (block[None] == block[:, None] - 1))


@pytest.mark.invariant(1)
def test_where_chunks_are_cut_changes_no_gradient():
  """In float64, and at chunks that are no multiple of the grain (4)."""
  with jax.enable_x64(True):
    model, params, carry = built(compute_dtype='float64', remat_policy=None)
    batch = widen(tiny.batch((7, 15, 2)))

    def at(chunk_size):
      return jax.jit(
        functools.partial(
          tbptt.gradients,
          model,
          chunk_size=chunk_size,
          backprop_chunks=TIME // chunk_size,
          remat_chunks=False,
          terms=TERMS,
        )
      )(widen(params), widen(carry), batch, batch.weights.sum())

    expected, expected_carry, sums = at(TIME)
    assert sums.terms['draft_loss'] > 0
    assert all(np.any(x) for name, x in expected['model/~/planner'].items())
    gradient, after, _ = at(3)
    for a, b in ((gradient, expected), (after, expected_carry)):
      jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-10), a, b)


def test_a_new_planner_and_one_passed_over_leave_the_model_as_it_is_without():
  model, _, carry = built()
  fresh, _ = tiny.init(model, 2)
  bare = tiny.model(())
  shapes, _ = jax.eval_shape(lambda: bare.init(jax.random.key(0), 2))
  below, above = 'model/layers/', 'model/upper_layers/'
  without = {
    name: {
      leaf: np.concatenate([x, fresh[name.replace(below, above)][leaf]]) if below in name else x
      for leaf, x in leaves.items()
    }
    for name, leaves in fresh.items()
    if 'planner' not in name and above not in name
  }
  assert jax.tree.map(np.shape, without) == jax.tree.map(np.shape, shapes)
  assert set(bare.initial_carry(2)['model']) == {'carry'}
  batch = tiny.batch((7, 15, 2))
  read = batch.inputs, batch.positions, batch.segment_ids
  apply = jax.jit(model.apply)
  expected, _ = jax.jit(bare.apply)(without, bare.initial_carry(2), *read)
  new, _ = apply(fresh, carry, *read)
  passed, after = jax.jit(model.without_insert().apply)(awake(fresh), carry, *read)
  assert expected.auxiliary is passed.auxiliary is None and new.auxiliary is not None
  for features in (new, passed):
    np.testing.assert_allclose(features.hidden, expected.hidden, rtol=1e-6, atol=1e-6)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(after))


def test_a_phase_without_it_leaves_its_parameters_and_moments_as_they_are():
  model, params, _ = built()
  optimizer = Optimizer(learning_rate=0.01, warmup_steps=2, train_steps=20)  # AdamW, with decay
  on = Phase(chunk_size=12, chunks=2, backprop_chunks=2)
  off = Phase(chunk_size=12, chunks=2, backprop_chunks=2, insert=False)
  assert on.shape != off.shape
  steps = {
    phase: jax.jit(
      make_train_step(
        model, optimizer, Curriculum([phase]), phase, seed=0, remat_chunks=False, terms=TERMS
      )
    )
    for phase in (on, off)
  }
  state = initial_state(model, optimizer, 0, 2)._replace(params=params)
  batch = tiny.batch((7, 15, 2))

  def of_planner(state):
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.optimizer_state))
    return {str(path): np.asarray(x) for path, x in leaves if 'planner' in str(path)}

  for phase in (on, off, off, off, on):
    before, rest = of_planner(state), state.params['model/final_norm']['scale']
    state, metrics = steps[phase](state, batch)
    after = of_planner(state)
    assert not np.array_equal(rest, state.params['model/final_norm']['scale'])
    if phase is on:
      assert all(not np.array_equal(after[path], x) for path, x in before.items())
      assert metrics.sums.terms['draft_loss'] > 0
    else:
      assert all(np.array_equal(after[path], x) for path, x in before.items())
      assert metrics.sums.terms['draft_loss'] == 0
  counts = [int(x) for path, x in after.items() if 'count' in path]
  assert counts and set(counts) == {2}  # steps of its own


def test_decoding_token_by_token_equals_reading_at_once():
  model, params, _ = built()
  _, carry = tiny.init(model, 2)
  batch = tiny.batch((7, 15, 2))
  apply = jax.jit(model.apply)
  whole, _ = apply(params, carry, batch.inputs, batch.positions, batch.segment_ids)
  for t in range(TIME):
    one = tiny.cut(batch, t, t + 1)
    features, carry = apply(params, carry, one.inputs, one.positions, one.segment_ids)
    np.testing.assert_allclose(features.hidden[:, 0], whole.hidden[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.invariant(8)
def test_dtypes_under_bfloat16():
  model = tiny.model((), insert=tiny.planner, compute_dtype='bfloat16')
  params, carry = jax.eval_shape(lambda: model.init(jax.random.key(0), 2))
  batch = tiny.batch((7, 15, 2))
  features, after = jax.eval_shape(
    model.apply, params, carry, batch.inputs, batch.positions, batch.segment_ids
  )
  assert jax.tree.map(lambda x: x.dtype, carry) == jax.tree.map(lambda x: x.dtype, after)
  of_planner = after['model']['planner']
  assert of_planner.tokens.dtype == features.hidden.dtype == jnp.bfloat16
  assert {x.dtype.name for x in jax.tree.leaves((of_planner.state, of_planner.plan))} == {'float32'}


@pytest.mark.parametrize(
  'options, message',
  [
    ({'segments': 0}, 'segments = 0 is out of range'),
    ({'head_width': 5}, 'head_width=5 must div'),
    ({'plan_interval': 13}, r'plan_interval=13 does not divide .* Use 12 or 14\.'),
  ],
)
def test_what_cannot_be_built(options, message):
  with pytest.raises(ConfigurationError, match=message):
    model = tiny.model((), insert=functools.partial(tiny.planner, **options))
    jax.eval_shape(lambda: model.init(jax.random.key(0), 1))
  with pytest.raises(ConfigurationError, match='insert needs repeats below and above it'):
    tiny.model((), layers=1, insert=tiny.planner)
