"""Recall at length: the streams of the task, the runs of the experiment, and its measurement."""

import json
import pathlib
import re
import string
import types

import gin
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from valkyrie import main
from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.load import load_gin
from valkyrie.data import store_builder, store_writer
from valkyrie.data.document_source import TASKS
from valkyrie.data.feed import TaskFeed
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import store_path
from valkyrie.data.vocabularies import ByteVocabulary
from valkyrie.models.features import Features
from valkyrie.models.recurrence.convolution import Tail
from valkyrie.tasks.recall import recall
from valkyrie.training.setup import Setup, StepSettings

ROOT = pathlib.Path(__file__).parents[2]
MIXERS = sorted((ROOT / 'gin' / 'models' / 'recall').glob('*.gin'))
FIRST_KEY, MARK, QUESTION = ByteVocabulary().encode('A!?')


@pytest.fixture
def script():
  import recall  # noqa: PLC0415

  return recall


@pytest.mark.parametrize('pairs', [1, 4, 16])
@pytest.mark.parametrize('distance', [8, 501])
def test_a_stream_asks_for_each_marked_key_and_has_unmarked_look_alikes(pairs, distance):
  orders, lookalikes = set(), []
  for n in range(20):
    problems = recall(np.random.RandomState([0, n]), pairs, distance)
    prompt, *others = [problem.prompt for problem in problems]
    written = dict(re.findall('!([A-Z])([0-9])', prompt))
    assert len(written) == len(problems) == pairs
    # The marked pairs come first, then the distance, then the questions.
    context, question = prompt[: 3 * pairs + distance], prompt[3 * pairs + distance :]
    assert context.rfind('!') == 3 * (pairs - 1) and '?' not in context
    asked = [text.removeprefix('?') for text in (question, *others)]
    assert sorted(asked) == sorted(written) and all(len(key) == 1 for key in asked)
    assert [written[key] for key in asked] == [problem.answer for problem in problems]
    orders.add(tuple(list(written).index(key) for key in asked))
    between = context[3 * pairs :]
    found = re.findall('[A-Z][0-9]', between)
    assert re.sub('[A-Z][0-9]', '', between).strip(string.ascii_lowercase) == ''
    lookalikes += [(key in written, written.get(key) == value) for key, value in found]
  assert len(orders) >= min(pairs, 10)
  if distance > 100:
    assert 0.1 < 2 * len(lookalikes) / (20 * distance) < 0.15
    same_key, same_value = np.mean(lookalikes, axis=0)
    assert same_key == pytest.approx(pairs / 26, abs=0.1)
    assert 0 < same_value < 0.2 * max(same_key, 0.1)


def test_only_the_answers_have_weights_and_a_stream_shares_its_positions(tmp_path):
  selection = Selection('recall', 'validation', tiny_run.BYTES)
  store_builder.build(selection, store_path(selection, str(tmp_path)))
  options = {'reset_at': 'sequence', 'shuffle': False, 'epochs': 1, 'data_dir': str(tmp_path)}
  feed = TaskFeed('recall', 'validation', 2, 0, **options)
  batch = feed.read(0, feed.row_tokens)
  text = np.vectorize(lambda token: chr(max(0, token - 3)))
  inputs = text(batch.inputs)
  asked = (np.roll(inputs, 1, axis=1) == '?') & np.char.isupper(inputs)
  np.testing.assert_array_equal(batch.weights, asked)
  assert np.char.isdigit(text(batch.targets)[asked]).all()
  starts = (batch.positions == 0) & (batch.segment_ids > 0)
  assert starts.sum() == 128 < asked.sum()
  assert (inputs[starts] == '!').all()
  assert 3000 < batch.positions[asked].max() < 8192


def test_most_training_streams_are_short():
  source = TASKS['recall'].source
  documents = [*source.documents('train', 0, 64)]
  first = {document.sequence_key: len(document.prompt) for document in reversed(documents)}
  pairs = np.array([sum(d.sequence_key == key for d in documents) for key in first])
  distances = np.array([*first.values()]) - 3 * pairs - 2
  assert len(first) == 512 and {*pairs} == {1, 4, 16}
  assert distances.min() == 8 and 10 <= np.median(distances) <= 22 and distances.max() > 500


def write_a_part(data_dir, split):
  """The store of the split's first streams, one in 16: tests need no more."""
  source = TASKS['recall'].source
  encode = tiny_run.BYTES.encode
  selection = Selection('recall', split, tiny_run.BYTES)
  path = store_path(selection, str(data_dir))
  store_writer.StoreWriter(path, selection, source.describe(split), shards=1).write(
    lambda shard: [
      store_writer.Document(
        np.asarray(encode(document.prompt + document.text)),
        len(document.prompt + document.text),
        document.sequence_key,
        len(document.prompt),
      )
      for document in source.documents(split, shard, 16)
    ]
  )


def test_the_second_phase_reads_streams_of_all_lengths_alike(tmp_path):
  for split in ('train', 'train_far'):
    write_a_part(tmp_path, split)
  flags = [f"--gin.TaskFeed.data_dir='{tmp_path}'", '--gin.near/Phase.steps=2']
  load_gin(['gin/recall_cpu.gin'], flags, modules=main.CONFIGURABLE_MODULES)
  feed = gin.get_configurable('Mixture')()
  begin = 2 * 4 * 256
  near, far = feed.read(0, begin), feed.read(begin + 8192, 20 * begin)

  def share(batch):
    return batch.weights.sum() / batch.weights.size

  assert share(near) > 5 * share(far) > 0
  assert far.positions.max() > 6000


@pytest.mark.parametrize('file', MIXERS, ids=lambda file: file.stem)
def test_every_mixer_of_the_script_builds_a_train_step(file):
  load_gin(['gin/recall_cpu.gin', str(file)], modules=main.CONFIGURABLE_MODULES)
  setup = Setup(StepSettings())
  phase = setup.curriculum.phases[0]
  assert phase.tokens_per_row <= 8192
  setup.trace(phase)


def remembers_marked_values(vocabulary_size=259):
  """A model without parameters: its state is the value of every marked key."""

  def read(values, token, two):
    before, last = two
    marked = (before == MARK) & (last >= FIRST_KEY) & (last < FIRST_KEY + 26)
    values = jnp.where(marked, values.at[last - FIRST_KEY].set(token), values)
    answer = jnp.where(last == QUESTION, values[jnp.clip(token - FIRST_KEY, 0, 25)], 0)
    return values, answer, jnp.stack([last, token])

  def apply(params, carry, inputs, positions, segment_ids):
    del params, positions, segment_ids

    def step(carry, tokens):
      values, answers, two = jax.vmap(read)(carry['values'], tokens, carry['tail'].inputs)
      return {'values': values, 'tail': Tail(two)}, answers

    carry, answers = lax.scan(step, carry, inputs.T)
    return Features(jax.nn.one_hot(answers.T, vocabulary_size), jnp.eye(vocabulary_size)), carry

  def initial_carry(rows):
    zeros = jnp.zeros((rows, 26), jnp.int32)
    return {'values': zeros, 'tail': Tail(jnp.zeros((rows, 2), jnp.int32))}

  about = types.SimpleNamespace(vocabulary_size=vocabulary_size, window=0)
  return types.SimpleNamespace(apply=apply, initial_carry=initial_carry, about=about)


@pytest.mark.parametrize(('cut', 'accuracy'), [(None, 1.0), ('state', 0.0)])
@pytest.mark.parametrize('block', [2**20, 64])
def test_a_model_that_remembers_is_right_until_its_state_is_cut(
  script, tmp_path, monkeypatch, block, cut, accuracy
):
  monkeypatch.setattr(script, 'BLOCK', block)
  streams = script.Streams(300, {1: 2, 4: 1, 16: 1})
  assert streams.length == 16 * 3 + 300 + 16 * 4
  found = script.measure(remembers_marked_values(), {}, streams, 32, cut, tmp_path / 'saved')
  assert found == {1: accuracy, 4: accuracy, 16: accuracy}


def test_an_answer_within_the_chunk_of_its_pair_survives_the_cut(script, tmp_path):
  streams = script.Streams(8, {1: 3})
  saved = tmp_path / 'saved'
  assert script.measure(remembers_marked_values(), {}, streams, 64, 'state', saved) == {1: 1.0}


@pytest.mark.parametrize('size', [7, 32, 200])
def test_streams_of_blocks_are_read_in_any_chunks(script, monkeypatch, size):
  monkeypatch.setattr(script, 'BLOCK', 64)
  pairs, distance = 4, 301
  streams = script.Streams(distance, {pairs: 2})
  whole = streams.chunk(0, streams.length)
  for begin in range(0, streams.length, size):
    part = streams.chunk(begin, size)
    for leaf, of_whole in zip(part[:3], whole[:3], strict=True):
      expected = of_whole[:, begin : begin + size]
      np.testing.assert_array_equal(leaf[:, : expected.shape[1]], expected)
  for tokens, weights, targets in zip(whole.inputs, whole.weights, whole.targets, strict=True):
    text = ByteVocabulary().decode(tokens.tolist())
    marked, between, asked = text[: 3 * pairs], text[3 * pairs :][:distance], text[-3 * pairs :]
    written = dict(re.findall('!([A-Z])([0-9])', marked))
    assert len(written) == pairs and '?' not in between and '!' not in between
    assert len(set(between[i : i + 20] for i in range(0, distance, 64))) == 5  # all blocks differ
    keys = [chr(key - 3) for key in tokens[weights > 0]]
    answers = [chr(answer - 3) for answer in targets[weights > 0]]
    assert sorted(keys) == sorted(written) and [written[key] for key in keys] == answers
    assert asked.count('?') == pairs


class Interrupted(Exception):
  """The end of a process in the middle of a measurement."""


def test_an_interrupted_measurement_goes_on_where_it_was_saved(script, tmp_path, monkeypatch):
  monkeypatch.setattr(script, 'SAVE_SECONDS', 0)
  saved, read = tmp_path / 'saved', []

  class Counted(script.Streams):
    def chunk(self, begin, size):
      read.append(begin)
      if len(read) == 13:  # the first questions were in the chunk before
        raise Interrupted
      return super().chunk(begin, size)

  def measure(key):
    model = remembers_marked_values()
    return script.measure(model, {}, Counted(400, {16: 2}), 40, None, saved, key)

  with pytest.raises(Interrupted):
    measure('a')
  before = saved.read_bytes()
  assert measure('a') == {16: 1.0} and not saved.exists()
  assert read == [*range(0, 512, 40), 480]
  saved.write_bytes(before)
  read[:] = [-1] * 13
  assert measure('b') == {16: 1.0}  # of another measurement
  assert read[13] == 0


def test_the_table_has_a_row_for_each_mixer_and_number_of_keys(script):
  records = [
    {'mixer': mixer, 'distance': distance, 'cut': cut, 'accuracy': {'1': a, '4': 0.5, '16': 0.25}}
    for mixer in ('s5', 'mamba2')
    for distance in (2**20, 2**14)
    for cut, a in ((None, 1.0), ('state', 0.104))
    if (mixer, distance, cut) != ('mamba2', 2**20, 'state')
  ]
  assert script.table(records).splitlines() == [
    '| mixer | keys | 16,384 | cut | 1,048,576 | cut |',
    '| --- | --- | --- | --- | --- | --- |',
    '| s5 | 1 | 100% | 10% | 100% | 10% |',
    '| s5 | 4 | 50% | 50% | 50% | 50% |',
    '| s5 | 16 | 25% | 25% | 25% | 25% |',
    '| mamba2 | 1 | 100% | 10% | 100% |  |',
    '| mamba2 | 4 | 50% | 50% | 50% |  |',
    '| mamba2 | 16 | 25% | 25% | 25% |  |',
  ]


def test_a_trained_model_is_measured_once_at_each_distance(script, tmp_path, monkeypatch, capsys):
  """The training writes the initial parameters; the rest of the script is the real one."""
  flags = ['--gin.LanguageModel.d_model=16', '--gin.Block.mlp_width=16']

  def train(file, model_dir, gin_flags):
    gin.clear_config(clear_constants=True)
    load_gin([script.RUN, file], gin_flags, modules=main.CONFIGURABLE_MODULES)
    state = Setup(StepSettings()).initial_state()
    with Checkpoints().open(model_dir) as checkpoints:
      checkpoints.save(1, state, {'vocabulary': ByteVocabulary.fingerprint})

  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(script, 'train', train)
  arguments = ['--mixers', 'gin/models/recall/s5.gin', f'--runs={tmp_path}', '--streams']
  arguments += ['1', '1', '1', '--chunk_size=32', *flags, '--distances', '40']
  script.main(arguments)
  assert '| s5 | 16 |' in capsys.readouterr().out
  lines = (tmp_path / 'results.jsonl').read_text().splitlines()
  assert len(lines) == 2  # whole, and with the states cut
  script.main(arguments)
  assert (tmp_path / 'results.jsonl').read_text().splitlines() == lines
  monkeypatch.setattr(script, 'train', lambda *_: None)  # the run is finished
  script.main([*arguments, '--streams', '0', '2', '0', '--distances', '41'])
  more = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
  assert [(r['distance'], [*r['accuracy']]) for r in more[2:]] == 2 * [(41, ['4'])]
