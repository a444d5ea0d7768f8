"""The embedding of n-grams: which rows it reads, in chunks of any size, and what it costs."""

import functools

import haiku as hk
import jax
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError
from valkyrie.models.ngrams import NgramEmbedding

ROWS, WIDTH, D = 13, 4, 6
ORDERS = (2, 4)


def transform(**options):
  def f(tokens, carry, positions, segment_ids):
    embed = NgramEmbedding(**({'rows': ROWS, 'width': WIDTH, 'orders': ORDERS} | options))
    return embed(tokens, carry, D, np.float32, positions=positions, segment_ids=segment_ids)

  return hk.without_apply_rng(hk.transform(f))


def mixed(x):
  """lowbias32 with Python's integers."""
  x = (x ^ x >> 16) * 0x7FEB352D % 2**32
  x = (x ^ x >> 15) * 0x846CA68B % 2**32
  return x ^ x >> 16


def row_of(ngram, rows):
  """The row of an n-gram, its newest token first; 0 stands for no token."""
  digest = ngram[0]
  for lag, token in enumerate(ngram[1:], 1):
    digest = mixed((digest + lag) % 2**32) ^ token
  return mixed(digest) % rows


@pytest.mark.parametrize('chunk', [1, 2, 5, 20])
def test_every_ngram_of_a_document_has_a_row(chunk):
  batch = tiny.batch((7, 1, 2, 5), padding=5)
  pure = transform()
  empty = hk.transform(lambda: NgramEmbedding(ROWS, WIDTH, ORDERS).initial_carry(2))
  carry = empty.apply({}, None)
  fields = ('inputs', 'positions', 'segment_ids')
  inputs, positions, segments = (getattr(batch, name) for name in fields)
  shapes = jax.eval_shape(pure.init, jax.random.key(0), inputs, carry, positions, segments)
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
  found, apply = [], jax.jit(pure.apply)
  for begin in range(0, 20, chunk):
    piece = tiny.cut(batch, begin, begin + chunk)
    out, carry = apply(params, piece.inputs, carry, piece.positions, piece.segment_ids)
    found.append(out)
  found = np.concatenate(found, axis=1)

  ((_, of),) = params.items()
  for row, begins in ((0, (0, 7, 8, 10)), (1, (0, 7, 8, 10))):
    for at in range(15):
      first = max(begin for begin in begins if begin <= at)
      tokens = [1 + int(t) for t in inputs[row, first : at + 1][::-1]] + [0] * 3
      both = [of[f'table_{n}'][row_of(tokens[:n], ROWS)] for n in ORDERS]
      np.testing.assert_allclose(
        found[row, at], np.concatenate(both) @ of['out'], rtol=1e-5, atol=1e-6
      )
  np.testing.assert_array_equal(carry.inputs[..., 0], inputs[:, 12:15])


def test_ngrams_spread_over_all_rows():
  random = np.random.default_rng(0)
  ngrams = {tuple(map(int, ngram)) for ngram in random.integers(1, 300, (6000, 3))}
  counts = np.bincount([row_of(ngram, 64) for ngram in ngrams], minlength=64)
  expected = len(ngrams) / 64
  assert np.sum((counts - expected) ** 2 / expected) < 110  # chi^2 of 63 degrees, p = 2e-4


def test_a_model_counts_its_tables_and_never_decays_them():
  with_tables, without = tiny.model(ngrams=tiny.ngrams), tiny.model()
  assert with_tables.counts()['model/~/ngrams'] == {
    'table_2': 64 * 8,
    'table_3': 64 * 8,
    'out': 16 * 16,
  }
  assert with_tables.about.forward_flops - without.about.forward_flops == 2 * 16 * 16
  params, _ = tiny.init(with_tables, 1)
  kinds = with_tables.kinds(params)['model/~/ngrams']
  assert {name: kind.is_matrix for name, kind in kinds.items()} == {
    'table_2': False, 'table_3': False, 'out': True,
  }  # fmt: skip


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'rows': 0}, 'rows = 0 is out of range'),
    ({'width': 0}, 'width = 0 is out of range'),
    ({'orders': (1, 2)}, 'orders = 1 is out of range'),
    ({'orders': ()}, r'orders = \(\) is out of range'),
  ],
)
def test_sizes_that_cannot_be_are_refused(options, message):
  with pytest.raises(ConfigurationError, match=message):
    tiny.model(ngrams=functools.partial(NgramEmbedding, **({'rows': 8, 'width': 8} | options)))


def test_numbers_have_no_ngrams():
  model = tiny.model(ngrams=tiny.ngrams)
  params, carry = tiny.init(model, 1)
  where = np.arange(4)[None], np.ones((1, 4), np.int32)
  with pytest.raises(ConfigurationError, match='looks up tokens, but the inputs are numbers'):
    model.apply(params, carry, np.zeros((1, 4, 16), np.float32), *where)
