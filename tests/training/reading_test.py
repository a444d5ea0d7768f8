"""Reading: the tokens of each step, also after a resume with other rows or other chunks."""

import types

import numpy as np
import pytest
import tiny_run

from valkyrie.data import vocabularies
from valkyrie.data.feed import TaskFeed
from valkyrie.data.mixture import Mixture
from valkyrie.errors import ConfigurationError
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.reading import Reading, Stretch

BYTES = vocabularies.ByteVocabulary()
TEXTS = {
  name: [f'{number}{letter * (5 + number)}' for number in range(24)]
  for name, letter in {'code': 'c', 'web': 'w'}.items()
}
TOKENS = sum(len(text) + 1 for text in TEXTS['web'])  # each ends with EOS
STEPS = Curriculum([Phase(chunk_size=8, chunks=2, backprop_chunks=2)])
LONGER = Curriculum([Phase(chunk_size=16, chunks=2, backprop_chunks=2)])


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp('data')
  for name, texts in TEXTS.items():
    tiny_run.write_store(path, name, 'train', texts)
  return path


@pytest.fixture
def feed(data_dir):
  def make(rows, task='web', **options):
    return TaskFeed(task, 'train', rows, seed=3, data_dir=str(data_dir), **options)

  return make


def resumed(reading, feed, rows, step, curriculum=STEPS):
  """The reading of a run that continues from the checkpoint after `step`."""
  return Reading(
    curriculum,
    feed,
    rows,
    step=step,
    position=reading.position(step),
    stretches=[list(stretch) for stretch in reading.stretches],  # as JSON has them
  )


def read(reading, steps):
  """The tokens of the rows, over some steps."""
  parts = [
    reading.feed.read(reading.place(n), reading.curriculum.phase(n).tokens_per_row) for n in steps
  ]
  return np.concatenate([part.inputs for part in parts], axis=1)


def test_a_run_without_changes(feed):
  reading = Reading(STEPS, feed(4), 4)
  assert (reading.position(3), reading.place(3), reading.tokens(3)) == (48, 48, 192)
  assert reading.progress(3) == {'epochs': 192 / TOKENS}
  again = resumed(reading, feed(4), 4, step=3)
  assert again.stretches == [Stretch(0, 0, 4)] and again.change(3) is None
  np.testing.assert_array_equal(read(again, [3, 4]), feed(4).read(48, 32).inputs)


@pytest.mark.invariant(9)
def test_other_rows_deal_the_documents_anew(feed):
  before = Reading(STEPS, feed(4), 4)
  reading = resumed(before, feed(2), 2, step=3)
  assert reading.stretches == [Stretch(0, 0, 4), Stretch(3, 48, 2)]
  assert (reading.position(5), reading.place(5), reading.tokens(5)) == (80, 32, 192 + 64)
  assert reading.progress(5)['epochs'] == pytest.approx((192 + 64) / TOKENS)

  # Both rows together read every document once, in an order that a first deal does not have.
  rows = reading.feed.read(0, TOKENS, rows=[0, 1])
  lengths = [reading.feed.rows[row].length for row in range(2)]
  texts = [BYTES.decode(rows.inputs[row][: lengths[row]].tolist()) for row in range(2)]
  firsts = [feed(2).read(0, n).inputs[row].tolist() for row, n in enumerate(lengths)]
  assert sum(lengths) == TOKENS
  assert sorted(''.join(texts)) == sorted(''.join(TEXTS['web']))
  assert texts != [BYTES.decode(tokens) for tokens in firsts]

  # A later process that resumes, and one that goes back to four rows.
  np.testing.assert_array_equal(read(resumed(reading, feed(2), 2, 5), [5]), read(reading, [5]))
  back = resumed(reading, feed(4), 4, step=5)
  assert back.stretches[-1] == Stretch(5, 80, 4) and back.tokens(6) == 192 + 64 + 64
  assert (read(back, range(5, 8)) != read(before, range(3))).any()


def test_the_tokens_that_are_read_again_are_named(feed):
  before = Reading(STEPS, feed(4), 4)
  step = TOKENS // 4 // 16 + 2  # in the second epoch
  reading = resumed(before, feed(2), 2, step)
  rows = [feed(4).rows[row].length for row in range(4)]
  again = sum(16 * step % length for length in rows)
  assert 0 < again < TOKENS
  assert reading.change(step) == (
    'the documents are now dealt over 2 rows instead of 4, and carries begin empty: '
    f'{again:,} tokens of the unfinished epoch are read again'
  )
  assert reading.change(step + 1) is None  # said once


def test_other_chunks_read_each_row_on(feed):
  before = Reading(STEPS, feed(2), 2)
  reading = resumed(before, feed(2), 2, step=3, curriculum=LONGER)
  assert reading.change(3) == 'each row is read on from its token 48'
  assert (reading.position(4), reading.tokens(4)) == (48 + 32, 2 * 80)
  joined = np.concatenate([read(before, range(3)), read(reading, [3, 4])], axis=1)
  np.testing.assert_array_equal(joined, feed(2).read(0, 48 + 64).inputs)


def test_a_feed_that_ends(feed):
  reading = Reading(STEPS, feed(4, epochs=1), 4)
  with pytest.raises(ConfigurationError, match=r'epochs=1.*Keep the batch_size'):
    resumed(reading, feed(2, epochs=1), 2, step=3)
  end = feed(4, epochs=1).row_end
  longer = resumed(reading, feed(4, epochs=1), 4, step=3, curriculum=LONGER)
  last = 3 - (48 - end) // 32  # the step that reads the last token
  assert 'epochs' in longer.plan(last)
  with pytest.raises(ConfigurationError, match=f'Set train_steps={last}, '):
    longer.plan(last + 1)


def test_a_mixture_keeps_its_phases(feed):
  def mixture(rows):
    return Mixture(
      {name: {'task': name} for name in TEXTS},
      [{'web': 1}, {'code': 1}],
      feed=lambda **given: feed(rows, **given),
      phases=lambda: types.SimpleNamespace(begins=[0, 80]),
    )

  before = Reading(STEPS, mixture(4), 4)
  reading = resumed(before, mixture(2), 2, step=3)
  assert reading.feed.fingerprint == before.feed.fingerprint
  rows = read(reading, range(3, 20))
  for row in rows:  # the second phase begins at token 80 of a row, at the next document
    texts = BYTES.decode(row.tolist())
    assert 80 - 48 <= texts.index('c') < 80 - 48 + max(map(len, TEXTS['web'])) + 2
    assert 'w' not in texts[texts.index('c') :]
  assert reading.progress(20)['tokens/web'] + reading.progress(20)['tokens/code'] == (
    4 * 48 + 2 * 17 * 16
  )
  assert '192 tokens' in reading.change(3)


def test_a_run_of_no_steps_reads_nothing_of_a_feed_that_ends(feed):
  """Also where the phases have more tokens than the feed."""
  long_first = Curriculum([Phase(8, 2, 2, steps=10_000), Phase(1, 1, 1)])
  reading = Reading(long_first, feed(1, epochs=1), 1)
  assert reading.plan(0).startswith('0 steps read 0 tokens of each row')
  with pytest.raises(ConfigurationError, match='but train_steps=10001'):
    reading.plan(10_001)
