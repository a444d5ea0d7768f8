"""Gradients through chunks: exact where they flow, nothing where they are cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from valkyrie.sharding.sequence_parallel import OverTime
from valkyrie.training import losses, objective, tbptt
from valkyrie.training.losses import token_scores

TIME = 24


@functools.cache
def built():
  model = tiny.model()
  params, carry = tiny.init(model, 2)
  return model, params, carry


@functools.cache
def gradient_of(chunk_size, backprop_chunks, remat=True, keep_carries=False):
  model, _, _ = built()
  return jax.jit(
    functools.partial(
      tbptt.gradients,
      model,
      chunk_size=chunk_size,
      backprop_chunks=backprop_chunks,
      remat_chunks=remat,
      keep_carries=keep_carries,
    )
  )


@jax.jit
def direct(params, carry, batch):
  """The mean loss of the whole row, differentiated with no chunks at all."""
  model, _, _ = built()

  def loss(params):
    return objective.read(
      objective.PREDICTION, model, params, carry, batch, total=jnp.sum(batch.weights)
    )

  gradient, (after, sums) = jax.grad(loss, has_aux=True)(params)
  return gradient, after, sums


def difference(a, b):
  """The largest relative 2-norm over leaves, by numpy, which compiles nothing."""
  leaves = zip(*map(jax.tree.leaves, jax.device_get((a, b))), strict=True)
  return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in leaves)


@pytest.mark.invariant(1)
@pytest.mark.parametrize(
  # Shorter and longer than the window of 6, in which the programs are those of other tests, too.
  ('chunk_size', 'remat', 'keep'),
  [(1, True, False), (6, True, False), (6, False, False), (12, True, False), (6, True, True)],
)
def test_with_all_chunks_the_gradient_is_that_of_the_whole(chunk_size, remat, keep):
  _, params, carry = built()
  batch = tiny.batch((7, 15, 2))
  gradient, after, sums = gradient_of(chunk_size, TIME // chunk_size, remat, keep)(
    params, carry, batch, batch.weights.sum()
  )
  expected, expected_after, expected_sums = direct(params, carry, batch)
  assert difference(gradient, expected) < 1e-5
  np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-5)
  assert sums.weight == batch.weights.sum()
  for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected_after), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_in_float64_the_gradients_agree_to_rounding():
  with jax.enable_x64(True):
    _, params, carry = built()

    def widen(tree):
      return jax.tree.map(
        lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, jax.device_get(tree)
      )

    model64 = tiny.model(compute_dtype='float64')
    batch = widen(tiny.batch((7, 15, 2)))
    carry = widen(carry)

    def at(chunk_size):
      return jax.jit(
        functools.partial(
          tbptt.gradients,
          model64,
          chunk_size=chunk_size,
          backprop_chunks=TIME // chunk_size,
          remat_chunks=True,
        )
      )(widen(params), carry, batch, batch.weights.sum())[0]

    assert difference(at(4), at(TIME)) < 1e-10


def test_between_groups_the_gradient_is_cut_and_within_a_group_it_flows():
  """d loss of the last 12 tokens / d the tokens of the first 12, through the carry alone."""
  model, params, carry = built()
  batch = tiny.batch((TIME,))
  late = batch._replace(weights=np.where(np.arange(TIME) >= 12, batch.weights, 0))
  # Tokens 0 to 23 stand only in the first half, and 24 to 47 only in the second, so that the rows
  # of the embedding tell the halves apart; targets come from the second half as well.
  inputs = np.tile(np.arange(TIME, dtype=np.int32), (2, 1))
  late = late._replace(inputs=inputs, targets=np.full_like(inputs, 40))

  def touched(backprop_chunks):
    gradient, _, _ = gradient_of(6, backprop_chunks)(params, carry, late, late.weights.sum())
    # The unembedding touches every row: what the softmax alone gives is subtracted.
    return gradient['model']['embedding'][:12]

  def softmax_only():
    def loss(unembedding):
      features, _ = model.apply(params, carry, late.inputs, late.positions, late.segment_ids)
      scores = token_scores(
        features._replace(unembedding=unembedding), late.targets, model.about.vocabulary_size
      )
      return jnp.sum(scores.loss * late.weights) / jnp.sum(late.weights)

    return jax.jit(jax.grad(loss))(params['model']['embedding'])[:12]

  through_softmax = softmax_only()
  cut = np.abs(touched(2) - through_softmax).max()
  flows = np.abs(touched(4) - through_softmax).max()
  assert cut < 1e-7
  assert flows > 1e-4


def test_groups_add_up_to_the_mean_over_the_step():
  """The gradient of a truncated step is the weighted mean of its groups' own gradients."""
  _, params, carry = built()
  batch = tiny.batch((7, 13, 4))
  gradient, _, sums = gradient_of(6, 2)(params, carry, batch, batch.weights.sum())
  total, expected = batch.weights.sum(), None
  for begin in (0, 12):
    part = tiny.cut(batch, begin, begin + 12)
    of_group, carry, _ = direct(params, carry, part)
    share = jax.tree.map(lambda g, part=part: g * part.weights.sum() / total, of_group)
    expected = share if expected is None else jax.tree.map(jnp.add, expected, share)
  assert difference(gradient, expected) < 1e-5
  assert sums.weight == total


def test_every_chunk_draws_its_own_dropout_and_draws_it_again_when_recomputed():
  """Chunk n is read with n folded into the key of the step, in whichever group it stands."""
  model = tiny.model((functools.partial(tiny.s5, dropout=0.5),))
  params, carry = tiny.init(model, 2)
  batch, rng = tiny.batch((TIME,)), jax.random.key(0)

  def gradients(remat):
    of = functools.partial(
      tbptt.gradients, model, chunk_size=6, backprop_chunks=2, remat_chunks=remat
    )
    return jax.jit(of)(params, carry, batch, batch.weights.sum(), rng)

  gradient, after, sums = gradients(remat=True)
  assert difference(gradient, gradients(remat=False)[0]) < 1e-5
  read, expected = jax.jit(functools.partial(objective.read, objective.PREDICTION, model)), 0.0
  for number in range(4):
    chunk = tiny.cut(batch, 6 * number, 6 * number + 6)
    loss, (carry, _) = read(params, carry, chunk, jax.random.fold_in(rng, number))
    expected += loss
  np.testing.assert_allclose(sums.loss, expected, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(carry), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('backprop_chunks', 'remat'), [(1, False), (4, True), (4, False)])
def test_slices_of_logits_change_no_gradient(backprop_chunks, remat, monkeypatch):
  """Slices of 4 tokens of chunks of 6, whose gradients come with their losses or after them."""
  model, params, carry = built()
  batch = tiny.batch((7, 13, 4))
  total = batch.weights.sum()
  expected, _, sums = gradient_of(6, backprop_chunks, remat)(params, carry, batch, total)
  monkeypatch.setitem(losses._LOGITS_AT_ONCE, 'cpu', 2 * 128 * 4)
  monkeypatch.setattr(losses, '_LOGITS_KEPT', 2 * 128 * 4)
  sliced = functools.partial(
    tbptt.gradients, model, chunk_size=6, backprop_chunks=backprop_chunks, remat_chunks=remat
  )
  gradient, _, same = jax.jit(sliced)(params, carry, batch, total)
  assert difference(gradient, expected) < 1e-5
  np.testing.assert_allclose(sums.loss, same.loss, rtol=1e-6)


def test_gradients_of_a_narrow_copy_add_up_in_float32():
  """Over 64 chunks: what a sum in bfloat16 would have lost, an eighth of it, is there."""

  def read(params, carry, chunk):
    loss = jnp.sum(params.astype(jnp.float32)) * chunk
    return loss, (carry, objective.Sums(loss, loss, loss, {}))

  params = jnp.ones(3, jnp.bfloat16)
  chunks = jnp.asarray([256.0] + [0.5] * 63)
  for backprop in (functools.partial(tbptt._add_recomputed, 8, 1), tbptt._add_saved):
    zeros = tbptt.zero_gradients(params)
    gradient, _, _ = backprop(read, params, jnp.zeros((1, 1)), chunks, zeros)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, 256 + 63 / 2)


def test_gradients_of_the_keys_of_a_document_add_up_in_float32():
  """The first of 64 chunks writes keys in bfloat16, which all read; the last one most of all."""

  def read(params, carry, chunk):
    writes, weight = chunk
    keys = jnp.where(writes, params[None].astype(carry.content.dtype), carry.content)
    loss = weight * jnp.sum(keys.astype(jnp.float32))
    return loss, (OverTime(keys), objective.Sums(loss, loss, loss, {}))

  carry = OverTime(jnp.zeros((1, 3), jnp.bfloat16))
  chunks = jnp.arange(64) == 0, jnp.asarray([0.5] * 63 + [256.0])
  for backprop in (functools.partial(tbptt._add_recomputed, 8, 1), tbptt._add_saved):
    gradient, after, _ = backprop(read, jnp.ones(3), carry, chunks, jnp.zeros(3))
    assert after.content.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, 256 + 63 / 2)


@pytest.mark.invariant(12)
def test_of_many_chunks_few_carries_are_kept():
  """For 64 chunks: 8 carries for the segments and 8 within one, instead of 64, and no gradients."""
  size, count = 2**16, 64

  def read(params, carry, chunk):
    after = jnp.sin(carry * params[None] + chunk)
    return jnp.sum(after), (after, objective.Sums(*[jnp.sum(after)] * 3, {}))

  def memory(backprop):
    def gradient(params, carry, chunks):
      return backprop(read, params, carry, chunks, jnp.zeros_like(params))

    shapes = (jnp.ones(size), jnp.ones((1, size)), jnp.ones(count))
    compiled = jax.jit(gradient).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (4 * size), compiled(*shapes)

  recomputed, found = memory(
    functools.partial(tbptt._add_recomputed, tbptt.segment_length(count), 1)
  )
  all_carries, kept = memory(functools.partial(tbptt._add_recomputed, 1, 1))
  activations, expected = memory(tbptt._add_saved)
  assert recomputed < 8 + 8 + 8 < count <= all_carries < count + 8 <= activations
  for results in zip(*map(jax.tree.leaves, (found, kept, expected)), strict=True):
    for other in results[:2]:
      np.testing.assert_allclose(other, results[2], rtol=1e-5)


def test_the_share_beyond_the_window_is_counted():
  _, params, carry = built()
  batch = tiny.batch((7, 15, 2))
  _, _, sums = gradient_of(12, 2)(params, carry, batch, batch.weights.sum())
  assert sums.beyond_window == np.sum(batch.weights * (batch.positions > tiny.WINDOW)) > 0
