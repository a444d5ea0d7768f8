"""Mixtures: shares of tokens, whole units, any cut of the stream, changing weights, and ends."""

import itertools
import types

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tiny_run

from valkyrie.data import build_store, vocabularies
from valkyrie.data import mixture as mixtures
from valkyrie.data.feed import TaskFeed
from valkyrie.data.mixed_rows import MixedRow
from valkyrie.data.mixture import Mixture
from valkyrie.data.rows import Units
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.types import Batch

ROWS = 2
BYTES = vocabularies.ByteVocabulary()
LETTERS = {'web': 'w', 'code': 'c', 'books': 'b'}  # each document is a number and these
LONGEST = {'web': 30, 'code': 15, 'books': 90}
ALL = {name: {'task': name} for name in LETTERS}


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp('data')
  for name, letter in LETTERS.items():
    random = np.random.default_rng(ord(letter))
    lengths = [LONGEST[name], *random.integers(4, LONGEST[name], 20)]
    texts = [f'{number}{letter * length}' for number, length in enumerate(lengths)]
    tiny_run.write_store(path, name, 'train', texts)
  return path


@pytest.fixture(scope='module')
def mixture(data_dir):
  def make(weights, sources=None, begins=None, **options):
    def feed(**given):
      options_of_all = {'split': 'train', 'batch_size': ROWS, 'seed': 3, 'data_dir': str(data_dir)}
      return TaskFeed(**{**options_of_all, **options, **given})

    phases = None if begins is None else lambda: types.SimpleNamespace(begins=begins)
    return Mixture(sources or ALL, weights, feed=feed, phases=phases)

  return make


def documents(batch: Batch, row: int) -> list[str]:
  """The texts of a row's segments, in order; each has one segment id and its own positions."""
  ids = batch.segment_ids[row]
  assert (np.diff(ids[ids > 0]) >= 0).all() and set(np.diff(ids[ids > 0])) <= {0, 1}
  texts = []
  for segment in np.unique(ids[ids > 0]):
    at = ids == segment
    assert (np.diff(batch.positions[row][at]) == 1).all()
    texts.append(BYTES.decode(batch.inputs[row][at].tolist()))
  return texts


def source_of(text: str) -> str:
  return next(name for name, letter in LETTERS.items() if letter in text)


WEIGHTS = {'web': 6, 'code': 1, 'books': 3}


def test_every_source_has_its_share_at_every_place(mixture):
  feed = mixture(WEIGHTS)
  batch = feed.read(0, 20_000)
  bound = sum(longest + 3 for longest in LONGEST.values())
  for row in range(ROWS):
    texts = documents(batch, row)
    counts = dict.fromkeys(LETTERS, 0)
    for text in texts:
      counts[source_of(text)] += len(text) + 1
      total = sum(counts.values())
      for name, weight in WEIGHTS.items():
        assert abs(counts[name] - weight / 10 * total) < bound
    assert batch.positions[row][0] == 0 and total > 19_000
  progress = feed.progress(20_000)
  assert sum(progress[f'tokens/{name}'] for name in LETTERS) == ROWS * 20_000
  assert progress['tokens/web'] == pytest.approx(0.6 * ROWS * 20_000, rel=0.01)
  web = feed.sources['web'].store.tokens
  assert progress['epochs/web'] == progress['tokens/web'] / web


class Equal:
  """Endless units of ten tokens."""

  end = None
  longest_unit = 10

  def units(self, begin, end):
    numbers = np.arange(-(-begin // 10), -(-end // 10))
    return Units(10 * numbers, np.full(len(numbers), 10), numbers, np.ones_like(numbers))


def test_rows_do_not_read_the_same_source_at_the_same_time():
  rows = [MixedRow([Equal(), Equal()], row, [(0, [0.8, 0.2])]) for row in range(300)]
  for at in (*range(0, 120, 10), 10**8):
    sources = [row.pieces(at, at + 1)[0].source for row in rows]
    assert 0.1 < np.mean(sources) < 0.3


def test_each_source_has_its_own_order(mixture):
  """The documents of a source come as in its feed alone, whole, with targets and weights."""
  feed = mixture(WEIGHTS)
  batch, ahead = feed.read(0, 5000), feed.read(1, 5000)
  np.testing.assert_array_equal(batch.targets, ahead.inputs)
  np.testing.assert_array_equal(batch.weights, batch.inputs != BYTES.eos_id)
  for row in range(ROWS):
    texts = documents(batch, row)[:-1]
    for name in LETTERS:
      own = [text for text in texts if source_of(text) == name]
      alone = documents(feed.sources[name].read(0, 5000), row)
      assert len(own) > 5 and own == alone[: len(own)]


def test_a_passed_carry_stays_in_its_source(mixture):
  """Joined documents follow one another, and each source joins those that its feed alone does."""
  feed = mixture(WEIGHTS, pass_carry=0.5)
  (batch,) = [feed.read(0, 8000, rows=[1])]
  text, positions, ids = BYTES.decode, batch.positions[0], batch.segment_ids[0]
  starts = np.flatnonzero(positions == 0)
  np.testing.assert_array_equal(np.diff(ids) > 0, np.diff(positions) < 0)
  joined = [text(part.tolist()) for part in np.split(batch.inputs[0], starts[1:])][:-1]
  sources = [{n for n, letter in LETTERS.items() if letter in units} for units in joined]
  assert {len(source) for source in sources} == {1}
  for name in LETTERS:
    alone = feed.sources[name].read(0, 8000, rows=[1])
    begins = np.flatnonzero(alone.positions[0] == 0)[1:]
    expected = [text(part.tolist()) for part in np.split(alone.inputs[0], begins)]
    own = [units for units, source in zip(joined, sources, strict=True) if source == {name}]
    assert len(own) > 5 and own == expected[: len(own)]


STAGES = [
  {'weights': WEIGHTS},
  {'weights': [WEIGHTS, {'books': 5, 'code': 1}], 'begins': [0, 500], 'pass_carry': 0.6},
  {'weights': [{'web': 1}, {'code': 1, 'books': 1}, WEIGHTS], 'begins': [0, 700, 1900]},
  {'weights': WEIGHTS, 'sources': {**ALL, 'code': {'task': 'code', 'epochs': 2}}},
  {
    'weights': [WEIGHTS, {'books': 5, 'code': 1}],
    'begins': [0, 160],
    'sources': {name: {'task': name, 'epochs': 1} for name in LETTERS},
  },
]


@pytest.mark.invariant(9)
@pytest.mark.parametrize('options', STAGES)
@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8), begin=st.integers(0, 3000))
def test_cuts_do_not_change_the_stream(mixture, options, lengths, begin):
  feed = mixture(**options)
  cuts = list(itertools.accumulate(lengths, initial=begin))
  parts = [feed.read(at, length) for at, length in zip(cuts, lengths, strict=False)]
  whole = mixture(**options).read(begin, sum(lengths))
  for name, leaves, expected in zip(Batch._fields, zip(*parts, strict=True), whole, strict=True):
    np.testing.assert_array_equal(np.concatenate(leaves, axis=1), expected, err_msg=name)


def test_far_positions_are_read_without_those_before(mixture):
  feed = mixture(WEIGHTS)
  batch = feed.read(10**9, 400)
  assert all(len(documents(batch, row)) > 5 for row in range(ROWS))
  share = feed.progress(10**9)['tokens/web'] / (ROWS * 10**9)
  assert share == pytest.approx(0.6, abs=1e-6)
  np.testing.assert_array_equal(feed.read(10**9 + 100, 300).inputs, batch.inputs[:, 100:])


# Public report marin-community/levanter#876: a mixture that changes before its phase.
def test_weights_change_with_the_phase(mixture):
  feed = mixture([{'web': 1}, {'code': 3, 'books': 1}], begins=[0, 1000])
  batch = feed.read(0, 20_000)
  for row in range(ROWS):
    texts = documents(batch, row)[:-1]  # the last one is cut
    sources = [source_of(text) for text in texts]
    first = sources.index('code' if 'code' in sources else 'books')
    before = sum(len(text) + 1 for text in texts[:first])
    assert set(sources[:first]) == {'web'} and 'web' not in sources[first + 1 :]
    assert 1000 <= before < 1000 + LONGEST['web'] + 3
    code = sum(len(text) + 1 for text in texts if source_of(text) == 'code')
    assert code / (20_000 - before) == pytest.approx(0.75, abs=0.01)
  assert feed.row_end is None


def test_the_share_of_a_source_that_ends_goes_to_the_others(mixture):
  feed = mixture(WEIGHTS, sources={**ALL, 'code': {'task': 'code', 'epochs': 2}})
  assert feed.row_end is None
  batch = feed.read(0, 30_000)
  code = feed.sources['code'].store
  texts = [text for row in range(ROWS) for text in documents(batch, row)[:-1]]
  of_code = [text for text in texts if source_of(text) == 'code']
  assert len(of_code) == 2 * len(code.lengths) and len(set(of_code)) == len(code.lengths)
  assert feed.progress(30_000)['epochs/code'] == 2
  web = feed.progress(30_000)['tokens/web'] - feed.progress(20_000)['tokens/web']
  assert web / (ROWS * 10_000) == pytest.approx(6 / 9, abs=0.01)


def test_a_mixture_of_sources_that_end_is_each_of_them_once(mixture):
  sources = {name: {'task': name, 'epochs': 1} for name in LETTERS}
  feed = mixture(WEIGHTS, sources=sources)
  end = feed.row_end
  batch = feed.read(0, end + 50)
  texts = [text for row in range(ROWS) for text in documents(batch, row)]
  total = sum(source.store.tokens for source in feed.sources.values())
  assert len(texts) == len(set(texts)) == sum(len(f.store.lengths) for f in feed.sources.values())
  assert int((batch.segment_ids > 0).sum()) == total
  for leaf in feed.read(end, 20):
    assert not leaf.any()
  assert batch.segment_ids[:, end - 1].any()


def test_attributes(mixture, data_dir):
  feed = mixture({'web': 1, 'code': 1, 'books': 0})
  ratios = [feed.sources[name].tokens_per_byte for name in ('web', 'code')]
  assert feed.tokens_per_byte == pytest.approx(2 / sum(1 / ratio for ratio in ratios))
  assert feed.weights == {'web': 0.5, 'code': 0.5, 'books': 0}
  assert feed.fingerprint == mixture({'books': 0, 'code': 2, 'web': 2}).fingerprint
  assert feed.fingerprint != mixture({'web': 2, 'code': 1, 'books': 0}).fingerprint
  assert mixture([{'web': 1}, {'code': 1, 'books': 0}], begins=[0, 9]).tokens_per_byte is None
  said = feed.describe(100, 60)
  assert f'web is {data_dir}' in said and 'row 1: ' in said


SEQIO_MIXTURE = """
import seqio
from valkyrie.data import seqio_tasks

seqio_tasks.publish()
seqio.MixtureRegistry.add('both', [('key_value.64', 3), ('passkey.64', 1.5)])
"""


def test_a_seqio_mixture(tmp_path, monkeypatch):
  (tmp_path / 'their_mixtures.py').write_text(SEQIO_MIXTURE)
  monkeypatch.syspath_prepend(tmp_path)
  made = []

  def feed(**given):
    made.append(given)
    return TaskFeed(**given, split='train', batch_size=1, seed=0, data_dir=str(tmp_path))

  found = Mixture('their_mixtures:both', feed=feed)
  assert made == [{'task': 'their_mixtures:key_value.64'}, {'task': 'their_mixtures:passkey.64'}]
  assert [*found.weights.values()] == pytest.approx([2 / 3, 1 / 3])
  with pytest.raises(ConfigurationError, match=r'no seqio mixture .bot.* Did you mean both'):
    Mixture('their_mixtures:bot', feed=feed)
  (tmp_path / 'early_mixtures.py').write_text(SEQIO_MIXTURE.replace('seqio_tasks.publish()', ''))
  with pytest.raises(ConfigurationError, match=r'registered: key_value.64.*seqio_tasks.publish'):
    Mixture('early_mixtures:both', feed=feed)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'weights': None}, r'Mixture\.weights has no value\. Give each of web, code, books a number'),
    ({'weights': {'web': 0, 'code': 0}}, r"'code': 0.*at least one above 0"),
    ({'weights': {'web': -1, 'code': 2}}, 'numbers of 0 or more'),
    ({'weights': {'web': '1'}}, 'numbers of 0 or more'),
    ({'weights': {'wiki': 1}}, 'names wiki, but Mixture.sources has web, code, books'),
    ({'weights': [{'web': 1}, {'code': 1}]}, 'of 2 phases, but the curriculum has 1'),
    ({'weights': {'web': 1, 'code': 3}}, r'does not name the source books\. Give it a number'),
    ({'weights': [{'web': 1}, {'code': 1}], 'begins': [0, 9]}, 'does not name the source books'),
    ({'weights': {'web': True, 'code': 1, 'books': 1}}, 'numbers of 0 or more'),
    ({'weights': WEIGHTS, 'reset_at': 'never'}, "Set it to 'document' or 'sequence'"),
    (
      {'weights': WEIGHTS, 'sources': {**ALL, 'code': {'task': 'code', 'batch_size': 1}}},
      'share batch_size, but code has 1 and web has 2',
    ),
  ],
)
def test_what_does_not_fit(mixture, options, message):
  with pytest.raises(ConfigurationError, match=message):
    mixture(**options)


def test_a_source_that_is_not_trained_on_is_named(mixture, caplog):
  mixtures._warn_once.cache_clear()
  mixture({'web': 1, 'code': 1, 'books': 0})
  assert 'has 0 for books: it is evaluated, and not trained on' in caplog.text


SAME = 'share {} files, such as'
HELD = 'share [123] files, such as .*, which one source holds out'


@pytest.mark.parametrize(
  ('a', 'held_of_a', 'b', 'said', 'refused'),
  [
    ('d', '0.1', 'e', '', ''),
    ('d', '0.1', 'd', SAME.format(3), ''),
    ('d', '0.1', 'd/1.txt', SAME.format(1), ''),
    ('d/1.txt', '0.1', 'd', SAME.format(1), ''),
    ('d', '0.1', 'd/*.txt', SAME.format(3), ''),
    ('d', '0.1', 'link', SAME.format(3), ''),
    ('link.txt', '0.1', 'd', SAME.format(1), ''),
    ('d', 'h', 'e', '', ''),
    ('d', 'h', 'h', '', HELD),
    ('d', 'h', 'h/1.txt', '', HELD),
    ('d', 'h/1.txt', 'h', '', HELD),
    ('d', 'h/*.txt', 'h/**', '', HELD),
    ('d', 'link_h', 'h', '', HELD),
    ('d', 'h', 'link_h/2.txt', '', HELD),
  ],
)
def test_sources_of_the_same_files(tmp_path, caplog, a, held_of_a, b, said, refused):
  for folder in ('d', 'e', 'h'):
    (tmp_path / folder).mkdir()
    for number in range(3):
      (tmp_path / folder / f'{number}.txt').write_text(f'{folder} {number} of a text\n' * 9)
  (tmp_path / 'link').symlink_to(tmp_path / 'd')
  (tmp_path / 'link_h').symlink_to('h')
  (tmp_path / 'link.txt').symlink_to(tmp_path / 'd' / '2.txt')
  held = held_of_a if held_of_a == '0.1' else str(tmp_path / held_of_a)
  options = {'a': {'held_out': held}, 'b': {'held_out': '0.2', 'cut': '100'}}
  sources = {name: {'source': str(tmp_path / source), 'options': options[name]}
             for name, source in {'a': a, 'b': b}.items()}  # fmt: skip
  for source in sources.values():
    flags = [f'--option={name}={value}' for name, value in source['options'].items()]
    line = ['--task=text', f'--source={source["source"]}', f'--data_dir={tmp_path / "stores"}']
    assert build_store.main([*line, *flags, '--shards=1']) == 0

  def feed(**given):
    return TaskFeed('text', 'train', 1, 0, data_dir=str(tmp_path / 'stores'), **given)

  mixture = Mixture(sources, {'a': 1, 'b': 1}, feed=feed)
  if refused:
    with pytest.raises(DataError, match=refused):
      mixture.read(0, 8)
  else:
    mixture.read(0, 8)
  assert ('share' in caplog.text) == bool(said) and said in caplog.text
