"""Rows: exact streams, independent of cuts, and pure functions of the position."""

import itertools
import re
import threading
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tiny_run

from valkyrie.data import store_writer, vocabularies
from valkyrie.data.feed import TaskFeed
from valkyrie.data.read_ahead import prefetch
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.types import POSITION_PERIOD as PERIOD
from valkyrie.types import Batch

BYTES = vocabularies.ByteVocabulary()
SHARDS, DOCUMENTS, ROWS, KEYS = 3, 31, 4, 9
EOS = BYTES.eos_id


def _document(number):
  rng = np.random.RandomState(number)
  return rng.randint(3, 259, rng.randint(2, 30))


def _key(number):
  return f'site{number % KEYS}'


def _write(data_dir, documents=DOCUMENTS, prompt=lambda number: 0):
  selection = Selection('letters', 'train', BYTES)
  path = store_path(selection, str(data_dir))
  store_writer.StoreWriter(path, selection, {}, SHARDS).write(
    lambda shard: [
      store_writer.Document(_document(i), len(_document(i)), _key(i), prompt(i))
      for i in range(documents * shard // SHARDS, documents * (shard + 1) // SHARDS)
    ]
  )


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp('data')
  _write(path)
  return path


def _feed(data_dir, seed=7, **options):
  options = {'batch_size': ROWS, 'data_dir': str(data_dir), **options}
  return TaskFeed('letters', 'train', seed=seed, **options)


def _assert_equal(left: Batch, right: Batch):
  for name, a, b in zip(Batch._fields, left, right, strict=True):
    np.testing.assert_array_equal(a, b, err_msg=name)


def _pieces(inputs, starts):
  """The pieces of a row's stream, cut at every true element of `starts`, as tuples."""
  cuts = np.flatnonzero(starts)
  assert cuts[0] == 0
  return [tuple(piece.tolist()) for piece in np.split(inputs, cuts[1:])]


STORED = [(*_document(i).tolist(), EOS) for i in range(DOCUMENTS)]
TOTAL = sum(len(document) for document in STORED)


# Public report huggingface/datasets#7901: a resume that repeats or loses shuffled documents.
@pytest.mark.invariant(9)
@settings(max_examples=100, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12),
  begin=st.integers(0, 2000),
  reset_at=st.sampled_from(['document', 'sequence', 'never']),
  epochs=st.sampled_from([None, 1, 2]),
  pass_carry=st.sampled_from([0, 0.7]),
)
def test_cuts_do_not_change_the_stream(data_dir, lengths, begin, reset_at, epochs, pass_carry):
  options = {'reset_at': reset_at, 'epochs': epochs, 'pass_carry': pass_carry}
  feed = _feed(data_dir, **options)
  cuts = list(itertools.accumulate(lengths, initial=begin))
  parts = [feed.read(at, length) for at, length in zip(cuts, lengths, strict=False)]
  joined = Batch(*(np.concatenate(leaves, axis=1) for leaves in zip(*parts, strict=True)))
  # A new feed reads all in one call: earlier reads change nothing.
  _assert_equal(_feed(data_dir, **options).read(begin, sum(lengths)), joined)


def test_describe_names_the_documents_of_a_read(data_dir):
  feed = _feed(data_dir)
  text = feed.describe(100, 30)
  assert str(data_dir) in text
  for row in range(ROWS):
    numbers = re.search(rf'row {row}: ([\d, ]+)', text).group(1).split(', ')
    documents = [STORED[int(number)] for number in numbers]
    joined = list(itertools.chain(*documents))
    read = feed.read(100, 30, rows=[row]).inputs[0].tolist()
    begins = [i for i in range(len(documents[0])) if joined[i : i + 30] == read]
    assert any(begin + 30 > len(joined) - len(documents[-1]) for begin in begins)


def test_shapes_and_dtypes(data_dir):
  batch = _feed(data_dir).read(3, 50)
  assert {leaf.shape for leaf in batch} == {(ROWS, 50)}
  assert [leaf.dtype.name for leaf in batch] == ['int32', 'int32', 'float32', 'int32', 'int32']


@pytest.mark.parametrize('reset_at', ['document', 'sequence'])
def test_rows_cover_every_document_once_an_epoch(data_dir, reset_at):
  feed = _feed(data_dir, reset_at=reset_at)
  orders, dealt = [], []
  for epoch in range(3):
    seen = []
    for row in range(ROWS):
      tokens = feed.rows[row].length
      batch = feed.read(epoch * tokens, tokens, rows=[row])
      after_eos = np.roll(batch.inputs[0] == EOS, 1)
      seen.append(_pieces(batch.inputs[0], after_eos))
    orders.append(seen)
    dealt.append([sorted(row) for row in seen])
    assert sorted(itertools.chain(*seen)) == sorted(STORED)
  assert dealt[0] == dealt[1] == dealt[2]  # rows keep their documents
  assert orders[0] != orders[1] != orders[2]  # in a new order each epoch


@pytest.mark.parametrize('reset_at', ['document', 'sequence', 'never'])
def test_targets_and_weights(data_dir, reset_at):
  feed = _feed(data_dir, reset_at=reset_at)
  batch, ahead = feed.read(0, 3 * TOTAL), feed.read(1, 3 * TOTAL)
  np.testing.assert_array_equal(batch.targets, ahead.inputs)
  np.testing.assert_array_equal(batch.weights, batch.inputs != EOS)


@pytest.fixture(scope='module')
def prompted(tmp_path_factory):
  """The same documents; some begin with a prompt, but none of the last shard."""
  path = tmp_path_factory.mktemp('prompted')
  _write(path, prompt=lambda i: i % 3 if i < 20 else 0)
  return path


def test_of_a_prompt_and_its_answer_only_the_answer_has_weights(prompted):
  feed = _feed(prompted, shuffle=False, epochs=2)
  whole = feed.read(0, 2 * feed.row_tokens)
  for row in range(ROWS):
    expected = []
    for i in range(row, DOCUMENTS, ROWS):
      prompt, answer = (i % 3 if i < 20 else 0), len(STORED[i]) - 1
      # The weight is at the position before the token that counts.
      counted = [prompt <= at < answer or (not prompt and at == answer) for at in range(answer + 1)]
      expected += [*counted[1:], False]
    found = whole.weights[row, : 2 * len(expected)]
    assert found.tolist() == 2 * expected
    assert not whole.weights[row, 2 * len(expected) :].any()
  parts = [feed.read(at, 7) for at in range(0, feed.row_tokens, 7)]
  joined = np.concatenate([part.weights for part in parts], axis=1)
  np.testing.assert_array_equal(joined[:, : feed.row_tokens], whole.weights[:, : feed.row_tokens])


def test_a_store_with_prompts_has_no_bits_per_byte(data_dir, prompted):
  plain, asked = _feed(data_dir), _feed(prompted)
  assert plain.tokens_per_byte and asked.tokens_per_byte is None
  assert plain.store.fingerprint != asked.store.fingerprint
  np.testing.assert_array_equal(plain.read(0, 500).inputs, asked.read(0, 500).inputs)


def test_positions_restart_at_each_document(data_dir):
  batch = _feed(data_dir).read(0, 2 * TOTAL)
  for inputs, positions in zip(batch.inputs, batch.positions, strict=True):
    np.testing.assert_array_equal(
      np.flatnonzero(positions == 0), [0, *(np.flatnonzero(inputs[:-1] == EOS) + 1)]
    )
    assert set(np.diff(positions)[positions[1:] > 0]) == {1}


def test_sequences_are_related_documents_in_order(data_dir):
  feed = _feed(data_dir, reset_at='sequence')
  expected = {
    tuple(itertools.chain(*(STORED[i] for i in range(key, DOCUMENTS, KEYS)))) for key in range(KEYS)
  }
  found = []
  for row in range(ROWS):
    batch = feed.read(0, feed.rows[row].length, rows=[row])
    found += _pieces(batch.inputs[0], batch.positions[0] == 0)
    assert set(np.diff(batch.positions[0])[batch.positions[0, 1:] > 0]) == {1}
  assert len(found) == KEYS and set(found) == expected


def test_positions_without_resets_do_not_overflow(data_dir):
  feed = _feed(data_dir, reset_at='never')
  batch = feed.read(0, 2 * TOTAL)
  np.testing.assert_array_equal(batch.positions[1], np.arange(2 * TOTAL))
  assert set(batch.segment_ids.flat) == {1}
  for far in (2**30 - 50, 2**31 - 50, 2**40 + 1):
    positions = feed.read(far, 100).positions[0]
    assert (positions >= 2**29 - 2**26).all() and (positions < 2**30).all()
    np.testing.assert_array_equal(positions % 64, np.arange(far, far + 100) % 64)
    np.testing.assert_array_equal(positions % 700, np.arange(far, far + 100) % 700)
  assert feed.read(2**30 - 2, 3).positions[0].tolist() == [2**30 - 2, 2**30 - 1, 2**30 - PERIOD]


@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('reset_at', ['document', 'sequence'])
def test_a_carry_is_passed_on_with_its_probability(data_dir, reset_at, shuffle):
  """The same tokens, some of whose units have no reset, as the resets that are left tell."""
  feeds = [_feed(data_dir, reset_at=reset_at, shuffle=shuffle, pass_carry=p) for p in (0, 0.7)]
  passed, longest = [], 0
  for row in range(ROWS):
    length = feeds[0].rows[row].length
    plain, joined = (feed.read(0, 60 * length, rows=[row]) for feed in feeds)
    for name in ('inputs', 'targets', 'weights'):
      np.testing.assert_array_equal(getattr(plain, name), getattr(joined, name))
    (begins,), (resets,) = plain.positions == 0, joined.positions == 0
    assert begins[resets].all() and resets[::length].all()  # of units only, and of each epoch
    at = np.arange(len(resets))
    since = at - np.maximum.accumulate(np.where(resets, at, 0))
    np.testing.assert_array_equal(joined.positions[0], since)
    np.testing.assert_array_equal(np.diff(joined.segment_ids[0]) > 0, resets[1:])
    inner = begins & (at % length > 0)
    passed.append(~resets[inner])
    assert len(np.unique(resets.reshape(-1, length), axis=0)) > 1  # in other places each epoch
    longest = max(longest, since.max() + 1)
  share = np.concatenate(passed)
  # Three standard deviations of a binomial share.
  assert np.mean(share) == pytest.approx(0.7, abs=3 * np.sqrt(0.21 / len(share)))
  assert feeds[0].longest < longest <= feeds[1].longest <= feeds[1].row_tokens


def test_of_the_joined_units_the_longest_has_a_bound(tmp_path):
  """One unit in a million would join more than 20 others of probability one half."""
  tiny_run.write_store(tmp_path, 'letters', 'train', ['a' * (i % 9 + 1) for i in range(90)])
  feed = TaskFeed('letters', 'train', 1, 0, data_dir=str(tmp_path), pass_carry=0.5)
  assert feed.longest == 10 * 10 + 10 * 9  # the ten longest documents and ten more, with EOS
  often = TaskFeed('letters', 'train', 1, 0, data_dir=str(tmp_path), pass_carry=0.999)
  assert often.longest == often.row_tokens == often.read(0, 1000).positions.max() + 1


def test_another_deal_passes_on_other_carries(data_dir):
  feed = _feed(data_dir, pass_carry=0.5, shuffle=False)
  first, again, second = (feed.dealt(n, ROWS, 0).read(0, 500) for n in (0, 0, 1))
  _assert_equal(feed.read(0, 500), first)
  _assert_equal(again, first)
  np.testing.assert_array_equal(second.inputs, first.inputs)
  assert (second.positions != first.positions).any()


@pytest.mark.parametrize('reset_at', ['document', 'sequence'])
def test_segment_ids_increase_across_epochs(data_dir, reset_at):
  batch = _feed(data_dir, reset_at=reset_at).read(0, 3 * TOTAL)
  np.testing.assert_array_equal(batch.segment_ids, np.cumsum(batch.positions == 0, axis=1))


def test_padding_follows_the_last_epoch(data_dir):
  feed = _feed(data_dir, epochs=1)
  batch = feed.read(0, feed.row_tokens + 10)
  tokens = (batch.segment_ids > 0).sum(axis=1)
  assert tokens.sum() == TOTAL and tokens.max() == feed.row_tokens
  assert batch.weights.sum() == TOTAL - DOCUMENTS
  for row, end in enumerate(tokens):
    assert batch.inputs[row, end - 1] == EOS
    for leaf in batch:
      assert not leaf[row, end:].any()
  for leaf in feed.read(feed.row_tokens, 20):
    assert not leaf.any()


@pytest.mark.invariant(9)
def test_a_read_of_some_rows_is_a_slice_of_the_batch(data_dir):
  feed = _feed(data_dir)
  whole = feed.read(100, 300)
  for rows in (range(1, 3), [3, 0]):
    _assert_equal(feed.read(100, 300, rows=rows), Batch(*(leaf[list(rows)] for leaf in whole)))


def test_the_order_depends_on_the_seed(data_dir):
  _assert_equal(_feed(data_dir, seed=7).read(0, 500), _feed(data_dir, seed=7).read(0, 500))
  other = _feed(data_dir, seed=8).read(0, 500)
  assert (other.inputs != _feed(data_dir, seed=7).read(0, 500).inputs).any()


def test_rows_without_shuffling_have_the_order_of_the_store(data_dir):
  feed = _feed(data_dir, shuffle=False, epochs=1)
  batch = feed.read(0, feed.row_tokens)
  for row in range(ROWS):
    expected = list(itertools.chain(*STORED[row::ROWS]))
    assert batch.inputs[row, : len(expected)].tolist() == expected


def test_attributes_of_a_feed(data_dir):
  feed = _feed(data_dir)
  assert feed.vocabulary_size == 259
  assert feed.tokens_per_byte == TOTAL / (TOTAL - DOCUMENTS)
  assert feed.fingerprint == _feed(data_dir, seed=1, reset_at='never').fingerprint


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'reset_at': 'line'}, "reset_at='line' is unknown. Use one of document, sequence, never"),
    ({'seed': -1}, 'TaskFeed.seed = -1 is out of range'),
    ({'epochs': 0}, r'epochs = 0 is out of range. Use an integer in \[1, '),
    ({'epochs': 2.5}, 'epochs = 2.5 is'),
    ({'pass_carry': 1}, r'TaskFeed.pass_carry = 1 is out of range. Use a number in \[0, 1\)'),
    ({'batch_size': True}, 'batch_size = True is'),
    ({'batch_size': '8'}, "batch_size = '8' is"),
    ({'vocabulary': 'words'}, "The vocabulary 'words' is unknown"),
  ],
)
def test_invalid_arguments(data_dir, options, message):
  with pytest.raises(ConfigurationError, match=message):
    _feed(data_dir, **options)


@pytest.mark.parametrize(
  ('reset_at', 'message'),
  [('document', f'{DOCUMENTS} documents, fewer'), ('sequence', f'{KEYS} sequences of documents')],
)
def test_fewer_units_than_rows(data_dir, reset_at, message):
  with pytest.raises(ConfigurationError, match=f'{message}.* batch_size={DOCUMENTS + 1}'):
    _feed(data_dir, batch_size=DOCUMENTS + 1, reset_at=reset_at).read(0, 1)


@pytest.mark.parametrize(
  ('task', 'meant'), [('python_stdlb', 'python_stdlib'), ('fineweb-edu', r'fineweb\.edu')]
)
def test_a_failed_build_raises_its_error(tmp_path, task, meant):
  with pytest.raises(ConfigurationError, match=f'Did you mean {meant}\\?'):
    TaskFeed(task, 'train', 1, 0, data_dir=str(tmp_path)).read(0, 1)


def _threads():
  return [thread for thread in threading.enumerate() if thread.name.startswith('prefetch')]


def test_prefetch_reads_the_spans_in_order(data_dir):
  feed = _feed(data_dir)
  spans = [(0, 5), (5, 7), (100, 3), (12, 9)]
  ahead = list(prefetch(feed, spans, rows=[2]))
  assert len(ahead) == len(spans)
  for batch, span in zip(ahead, spans, strict=True):
    _assert_equal(batch, feed.read(*span, rows=[2]))
  assert not _threads()


def test_tokens_to_learn_at_padding_are_named(data_dir):
  class Miscounting:
    """A feed of a user's own that counts documents from 0."""

    batch_size = ROWS

    def read(self, *span):
      batch = _feed(data_dir).read(*span)
      return batch._replace(segment_ids=batch.segment_ids - 1)

  feed: Any = Miscounting()
  with pytest.raises(
    DataError, match=r'The feed Miscounting has a token to learn .* row 0 at token'
  ):
    next(prefetch(feed, [(0, 9)]))


@pytest.mark.parametrize(
  ('field', 'change', 'said'),
  [
    ('targets', lambda x: x[:, 1:], r'int32\[4, 8\].* for 4 rows of 9 tokens .*\(4, 8\)'),
    ('weights', lambda x: x.astype(int), 'weights of floats, and otherwise integers'),
    ('inputs', lambda x: x.astype(float), 'float64.* expected <class .int'),
  ],
)
def test_arrays_of_a_feed_that_are_no_batch_are_named(data_dir, field, change, said):
  class Own:
    batch_size = ROWS

    def read(self, *span):
      batch = _feed(data_dir).read(*span)
      return batch._replace(**{field: change(getattr(batch, field))})

  feed: Any = Own()
  with pytest.raises(DataError, match=f'The feed Own returned .*{said}'):
    next(prefetch(feed, [(0, 9)]))


def test_too_many_rows_are_refused_at_once(data_dir):
  for reset_at in 'document', 'sequence':
    feed = TaskFeed('letters', 'train', 2**31 - 1, 0, reset_at=reset_at, data_dir=str(data_dir))
    with pytest.raises(ConfigurationError, match=r'fewer than batch_size=2147483647, but'):
      _ = feed.rows


def test_prefetch_ends_when_closed(data_dir):
  batches = prefetch(_feed(data_dir), ((i, 5) for i in itertools.count()))
  next(batches)
  assert _threads()
  batches.close()
  assert not _threads()


def test_prefetch_raises_an_error_in_place_of_its_batch(tmp_path):
  _write(tmp_path)
  feed = _feed(tmp_path, shuffle=False)
  file = feed.store.path / 'shard-00002-of-00003' / 'tokens.npy'
  tokens = np.load(file, mmap_mode='r+')
  tokens[-1] = 999
  tokens.flush()
  batches = prefetch(feed, [(0, 4), (0, TOTAL)])
  next(batches)
  with pytest.raises(DataError, match='token 999'):
    next(batches)
  assert not _threads()


def test_damaged_documents_are_passed_over_within_a_budget(data_dir, tmp_path, caplog):
  _write(tmp_path)
  whole = _feed(tmp_path, shuffle=False).read(0, TOTAL)
  path = _feed(tmp_path).store.path
  tokens = np.load(path / 'shard-00000-of-00003' / 'tokens.npy', mmap_mode='r+')
  lengths = np.load(path / 'shard-00000-of-00003' / 'offsets.npy')
  tokens[lengths[0] : lengths[1] : 5] = 7  # in the first document of row 0
  tokens[lengths[1]] = 258  # in the first document of row 1
  tokens.flush()
  with pytest.raises(DataError, match=r'Row 0 reads 1 damaged .*: document 0 of shard-00000'):
    _feed(tmp_path, shuffle=False).read(0, 5)
  feed = _feed(tmp_path, shuffle=False, bad_documents=1)
  expected = [leaf.copy() for leaf in whole]
  for row in (0, 1):
    length = int(feed.store.lengths[row])
    again = range(0, TOTAL, feed.rows[row].length)
    for begin in again:
      expected[0][row, begin : begin + length] = EOS
      expected[1][row, max(begin - 1, 0) : begin + length - 1] = EOS
      expected[2][row, begin : begin + length] = 0
  for begin in (0, 3, 40):
    found = feed.read(begin, 20)
    _assert_equal(found, Batch(*(leaf[:, begin : begin + 20] for leaf in expected)))
  assert caplog.text.count('Passing over document 0 of shard-00000-of-00003') == 1
  tokens[lengths[4] + 1] ^= 1  # in the second document of row 0
  tokens.flush()
  with pytest.raises(DataError, match='Row 0 reads 2 damaged documents at once'):
    _feed(tmp_path, shuffle=False, bad_documents=1).read(0, TOTAL)
  _feed(tmp_path, shuffle=False, bad_documents=2).read(0, TOTAL)


@pytest.mark.parametrize('epochs', [2**20, 2**31, 2**40])
def test_segment_ids_stay_positive_and_differ_from_their_neighbors(data_dir, epochs):
  """Runs of any length: 2^31 documents of a row gave negative ids, which are those of padding."""
  feed = _feed(data_dir)
  for row in range(ROWS):
    begin = feed.rows[row].length * epochs - 50
    batch = feed.read(begin, 100, rows=[row])
    ids = batch.segment_ids[0]
    assert ids.dtype == np.int32 and (ids > 0).all()
    falls = np.diff(batch.positions[0]) < 0  # at the first token of a document
    assert falls.any()
    np.testing.assert_array_equal(np.diff(ids) != 0, falls)
