"""Generated tasks: their answers, their distances, and weights on the answers only."""

import gin
import numpy as np
import pytest

from valkyrie import main
from valkyrie.config.load import load_gin
from valkyrie.data import vocabularies
from valkyrie.data.document_source import TASKS
from valkyrie.data.feed import TaskFeed
from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.tasks.key_value import PAIRS, key_value
from valkyrie.tasks.listops import listops, log_uniform
from valkyrie.tasks.passkey import KEY, passkey
from valkyrie.tasks.selective_copy import COPIED, selective_copy
from valkyrie.tasks.state_tracking import SWAPS, parity, swaps

BYTES = vocabularies.ByteVocabulary()
DISTANCES = (64, 200)


def problems(make, *arguments):
  return [make(np.random.RandomState([0, n]), *arguments) for n in range(40)]


@pytest.mark.parametrize('distance', DISTANCES)
def test_the_passkey_is_exactly_its_distance_before_the_answer(distance):
  for prompt, answer in problems(passkey, distance):
    text = prompt + answer
    digits = [at for at, symbol in enumerate(text) if symbol.isdigit()]
    key, asked = digits[:KEY], digits[KEY:]
    assert asked == [at + distance for at in key] == [*range(len(prompt), len(text))]
    assert [text[at] for at in key] == [text[at] for at in asked]
    assert 16 <= key[0] < 32
    assert prompt.find('?') == len(prompt) - 1
  assert len({answer for _, answer in problems(passkey, distance)}) > 20


@pytest.mark.parametrize('distance', DISTANCES)
def test_the_value_is_exactly_its_distance_before_the_answer(distance):
  places = set()
  for prompt, answer in problems(key_value, distance):
    context, question, asked = prompt.partition('?')
    keys = [at for at, symbol in enumerate(context) if symbol.isupper()]
    pairs = {context[at]: context[at + 1] for at in keys}
    assert (
      question and len(pairs) == len(keys) == PAIRS and set(pairs.values()) <= set('0123456789')
    )
    assert pairs[asked] == answer
    assert context.find(asked) + 1 == len(prompt) - distance
    assert keys[0] >= 16
    places.add(list(pairs).index(asked))
  assert places == set(range(PAIRS))


def test_parity_is_the_product_of_signs():
  found = problems(parity, 33)
  for prompt, answer in found:
    assert len(prompt) == 34 and prompt[-1] == '='
    sign = np.prod([{'0': 1, '1': -1}[bit] for bit in prompt[:-1]])
    assert {'0': 1, '1': -1}[answer] == sign
  assert 10 < sum(answer == '1' for _, answer in found) < 30


def test_items_are_where_the_product_of_permutation_matrices_takes_them():
  answers = []
  for prompt, answer in problems(swaps, 33):
    assert prompt.startswith('01234') and prompt[38:] == '='
    order = np.arange(5)
    for letter in prompt[5:38]:
      matrix = np.eye(5, dtype=int)
      matrix[list(SWAPS[letter])] = matrix[list(reversed(SWAPS[letter]))]
      order = matrix @ order
    assert answer == ''.join(map(str, order[:4]))
    answers.append(answer)
  assert len(set(answers)) > 20
  assert len(set(SWAPS.values())) == len(SWAPS) == 10


@pytest.mark.parametrize('task', ['parity', 'swaps'])
def test_state_tracking_trains_on_short_problems(task):
  source, others = TASKS[f'state_tracking.{task}'].source, 6 if task == 'swaps' else 1
  lengths = [len(d.prompt) - others for d in source.documents('validation', 0, 1)]
  assert min(lengths) == 1 and max(lengths) == 32
  share = np.mean(np.less(lengths, 6))
  expected = np.log(6) / np.log(33) if task == 'swaps' else 5 / 32
  assert abs(share - expected) < 0.05
  (first, *_) = source.documents('256', 0, 64)
  assert len(first.prompt) == 256 + others


@pytest.mark.parametrize('distance', DISTANCES)
def test_the_answer_is_the_digits_of_the_last_tokens(distance):
  first = []
  for prompt, answer in problems(selective_copy, distance):
    digits = [at for at, symbol in enumerate(prompt) if symbol.isdigit()]
    assert ''.join(prompt[at] for at in digits) == answer and len(answer) == COPIED
    first.append(len(prompt) - 1 - digits[0])
    assert prompt.find('?') == len(prompt) - 1
  assert distance / 2 < max(first) <= distance


def evaluated(symbols):
  """(value, depth) of a ListOps expression, by a stack and numpy instead of recursion."""
  operations = {
    'N': np.min,
    'X': np.max,
    'D': lambda values: int(np.median(values)),
    'S': lambda values: np.sum(values) % 10,
  }
  stack, deepest = [[]], 0
  for symbol in symbols:
    if symbol in operations:
      stack.append([operations[symbol]])
      deepest = max(deepest, len(stack))
    elif symbol == ']':
      operation, *values = stack.pop()
      assert 2 <= len(values) <= 10
      stack[-1].append(operation(values))
    else:
      stack[-1].append(int(symbol))
  ((value,),) = stack
  return value, deepest


def test_listops_answers_are_the_values_of_their_expressions():
  found = problems(listops)
  deepest = []
  for prompt, answer in found:
    assert prompt.endswith('=')
    symbols = prompt[:-1]
    assert 500 < len(symbols) < 2000
    value, depth = evaluated(symbols)
    assert str(value) == answer
    deepest.append(depth)
  assert max(deepest) == 10
  assert len({answer for _, answer in found}) >= 8


@pytest.mark.parametrize('longest', [100, 2000])
def test_listops_of_other_lengths_are_log_uniform(longest):
  found = problems(log_uniform, longest)
  assert all(str(evaluated(prompt[:-1])[0]) == answer for prompt, answer in found)
  lengths = np.array([len(prompt) - 1 for prompt, _ in found])
  assert lengths.min() < 8 and 0.6 * longest < lengths.max() <= longest
  assert 0.3 < (lengths < (4 * longest) ** 0.5).mean() < 0.7


def test_a_split_is_reproducible_and_independent_of_shards():
  source = TASKS['passkey.16384'].source
  whole = [*source.documents('train', 0, 1)]
  parts = [document for shard in range(3) for document in source.documents('train', shard, 3)]
  assert whole == parts and len(whole) == 1024
  assert whole[7].prompt == GOLDEN[0] and whole[7].text == GOLDEN[1]
  others = [d.prompt for split in source.splits[1:] for d in source.documents(split, 0, 1)]
  assert len({d.prompt for d in whole} | {*others}) == 1024 + 128 + 128
  # From adjacent to the whole distance, log-uniformly.
  distances = np.array([len(d.prompt) - d.prompt.find(d.text) for d in whole])
  assert distances.min() < 6 and 12_000 < distances.max() <= 16384
  assert 0.4 < (distances < 3 * (16384 / 3) ** 0.5).mean() < 0.6


GOLDEN = ('cxeinekxspgvaowhdjlibkmseyfmlbs59?', '59')


def test_only_the_answers_have_weights(tmp_path):
  options = {'data_dir': str(tmp_path), 'shuffle': False, 'epochs': 1}
  feed = TaskFeed('passkey.1024', 'validation', 2, 0, **options)
  batch = feed.read(0, feed.row_tokens)
  text = np.vectorize(lambda token: chr(max(0, token - 3)))
  asked = (text(batch.inputs) == '?') & (batch.segment_ids > 0)
  expected = asked | np.roll(asked, 1, axis=1)  # two digits each
  np.testing.assert_array_equal(batch.weights, expected)
  assert asked.sum() == 128
  answers = np.char.isdigit(text(batch.targets)) & expected
  np.testing.assert_array_equal(answers, expected)
  # Each answer is the input 1024 tokens earlier, in the same document.
  rows, times = np.nonzero(expected)
  np.testing.assert_array_equal(batch.inputs[rows, times + 1 - 1024], batch.targets[rows, times])
  assert (batch.positions[rows, times] >= 1024).all()


def test_the_passkey_run_needs_memory():
  """The key is beyond the attention window, in another chunk, and not in the document start."""
  load_gin(['gin/passkey_cpu.gin'], modules=main.CONFIGURABLE_MODULES)
  distance = int(gin.query_parameter('task/macro.value').removeprefix('passkey.'))
  window = language_model.transform(LanguageModel).about.window
  layers = gin.query_parameter('LanguageModel.layers')
  assert distance >= 8 * window
  assert layers * window < distance
  assert gin.query_parameter('chunk_size/macro.value') < distance
  assert gin.query_parameter('LongformerAttention.document_start') <= 16
  assert gin.query_parameter('evaluate.cuts') == ('state', 'all')


def test_random_tokens_are_a_pure_function_of_their_place_without_a_store(tmp_path):
  def feed(split='train', **options):
    place = {'options': {'documents': 64, 'tokens': 50} | options, 'data_dir': str(tmp_path)}
    return TaskFeed('synthetic', split, 4, 0, **place)

  whole, parts = feed().read(0, 300), [feed().read(at, 60) for at in range(0, 300, 60)]
  for leaf, *pieces in zip(whole, *parts, strict=True):
    np.testing.assert_array_equal(leaf, np.concatenate(pieces, axis=1))
  is_last = whole.positions == 49
  assert np.all(whole.inputs[is_last] == 1) and np.all(whole.weights == ~is_last)
  everything = np.sort(feed().read(0, 800).inputs, axis=None)  # an epoch of 64 x 50 tokens
  counts = np.bincount(everything, minlength=259)
  assert len(counts) == 259 and counts[2:].max() < 40 and abs(everything.mean() - 126.5) < 5
  assert np.any(feed('validation').read(0, 300).inputs != whole.inputs)
  assert feed('validation', validation=5).store.tokens == 5 * 50
  assert feed().fingerprint != feed(tokens=51).fingerprint
  assert not [*tmp_path.iterdir()]
  for wrong in ({'tokens': 1}, {'documents': 'many'}, {'validation': 0}, {'text': 'x'}):
    with pytest.raises(ConfigurationError, match='synthetic'):
      _ = feed(**wrong).store
