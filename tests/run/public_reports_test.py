"""Kinds of public bug reports that no other test tries (docs/testing.md)."""

import functools

import jax
import jax.numpy as jnp
from letters import Letters, built, text
import numpy as np
import pytest
import sentencepiece
import tiny
import tiny_run

from valkyrie.data import store_location, store_writer, vocabularies
from valkyrie.data.document_source import (
  DocumentSource,
  DocumentTask,
  TextDocument,
  document_reader,
)
from valkyrie.data.feed import TaskFeed
from valkyrie.data.selection import Selection
from valkyrie.inference.generation import Sampling
from valkyrie.run.evaluator import Evaluator, chunk_scores
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training import rounding
from valkyrie.training.curriculum import Curriculum, Phase
from valkyrie.training.optimizers import Optimizer
from valkyrie.training.spikes import LossSpikes
from valkyrie.training.train_state import initial_state
from valkyrie.training.train_step import make_train_step


# Public report huggingface/transformers#18976: a nucleus whose sum is exactly top-p.
# Public report flashinfer-ai/flashinfer#3774: ties at the edge of top-k and top-p.
@pytest.mark.parametrize(
  ('shares', 'options', 'possible'),
  [
    ([0.4, 0.3, 0.3], {'top_k': 2}, {0, 1}),
    ([0.3, 0.3, 0.4], {'top_k': 2}, {2, 0}),
    ([0.25] * 4, {'top_k': 1}, {0}),
    ([0.25] * 4, {'top_p': 0.5}, {0, 1}),
    ([0.25] * 4, {'top_p': 0.51}, {0, 1, 2}),
    ([0.25] * 4, {'top_p': 1e-9}, {0}),
    ([0.5, 0.25, 0.25], {'top_p': 0.75}, {0, 1}),
    ([0.3, 0.1, 0.1, 0.5], {'top_p': 0.8}, {0, 3}),
    ([0.25] * 4, {'top_k': 3, 'top_p': 0.6}, {0, 1}),
  ],
)
def test_equally_likely_tokens_are_no_more_than_asked_for(shares, options, possible):
  draws = 200
  logits = jnp.log(jnp.tile(jnp.asarray([shares], jnp.float32), (draws, 1)))
  keys = jax.random.split(jax.random.key(0), draws)
  found = Sampling(temperature=1.0, **options).choose(logits, jnp.zeros(()), keys)
  assert set(found.tolist()) == possible


@functools.cache
def spaced(folder):
  """A tokenizer that puts a space before every text, as Llama's."""
  lines = folder / 'text'
  lines.write_text('The capital of France is Paris.\nA: Paris Q: what is it? 12 345\n' * 40)
  sentencepiece.SentencePieceTrainer.train(
    input=str(lines), model_prefix=str(folder / 'one'), model_type='bpe', vocab_size=320,
    byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    normalization_rule_name='identity', remove_extra_whitespaces=False,
  )  # fmt: skip
  return vocabularies.load(str(folder / 'one.model'))


class Asked(DocumentSource):
  """Prompts and answers."""

  def __init__(self, *asked):
    super().__init__(('train',))
    self._asked = asked

  def documents(self, split, shard, shards):
    return (TextDocument(answer, '', 'one', prompt) for prompt, answer in self._asked)

  def describe(self, split):
    return {}


# Public report huggingface/transformers#26273: an answer encoded apart from its prompt.
def test_an_answer_gets_no_space_of_its_own(tmp_path, monkeypatch):
  codec = spaced(tmp_path)
  asked = [('A:', ' Paris'), ('A: ', 'Paris'), ('A:\n', 'Paris'), ('Pa', 'ris'), ('', 'Paris')]
  task = DocumentTask(Asked(*asked), prompts=True)
  reader = document_reader(task, Selection('asked', 'train', codec))
  for (prompt, answer), document in zip(asked, reader.documents(0, 1), strict=True):
    count = document.prompt_tokens
    assert document.tokens[:count].tolist() == (codec.encode(prompt) if prompt else [])
    assert codec.decode(document.tokens) == prompt + answer
  monkeypatch.setattr('valkyrie.data.document_source._PIECE', 20)
  long = 'The capital of France is Paris.\nA: Paris Q: what is it? 12 345\n' * 3
  task = DocumentTask(Asked(('', long)), prompts=False)
  reader = document_reader(task, Selection('asked', 'train', codec))
  (document,) = reader.documents(0, 1)
  pieces = [*document.tokens]
  assert len(pieces) > 5
  assert codec.decode(np.concatenate(pieces)) == long


class Prefixed(Letters):
  """Puts an 'A' before every text."""

  def encode(self, letters):
    return super().encode(f'A{letters}') if letters else []


# Public report ggml-org/llama.cpp#3664: a prefix space where a cached text goes on.
def test_a_text_after_a_carry_is_not_begun_anew(monkeypatch):
  loaded = built('full')
  monkeypatch.setattr(loaded, 'tokenizer', Prefixed())
  (rest,) = loaded.score(text(5, 1), loaded.read(text(9)))
  assert rest.tokens.tolist() == Letters().encode(text(5, 1))
  (begun,) = loaded.score(text(5, 1), loaded.read(''))
  assert begun.tokens.tolist() == Letters().encode('A' + text(5, 1))


@pytest.fixture
def store(tmp_path):
  """Writes the texts of a task; returns its feeds."""

  def write(texts, task='own'):
    tiny_run.write_store(tmp_path, task, 'train', texts)
    return functools.partial(TaskFeed, task, 'train', data_dir=str(tmp_path))

  return write


# Public report mosaicml/composer#744: streams of unequal length.
def test_rows_that_repeat_much_more_often_are_said(store, caplog):
  book, notes = 'b' * 4000, ['n' * (50 + n) for n in range(7)]
  feed = store([book, *notes])
  assert feed(8, 0).row_tokens == 4001
  (warning,) = caplog.messages
  assert 'shortest of the 8 rows has 51 tokens and repeats 78.5 times' in warning
  caplog.clear()
  assert feed(1, 0).row_tokens == feed(8, 0, epochs=1).store.tokens  # the advice: fewer rows
  assert feed(8, 0, epochs=1).row_end == 4001  # nothing repeats
  assert not caplog.messages
  pieces = [book[n : n + 100] for n in range(0, 4000, 100)]  # the advice: text_cut
  assert store([*pieces, *notes], 'cut')(8, 0).row_tokens < 1000
  assert not caplog.messages


# Public report pytorch/pytorch#25162: repeated samples in a last batch.
def test_an_epoch_has_every_target_once_and_the_next_another_order(store):
  texts = [f'{number}{"x" * number}' for number in range(3, 27)]
  feed = store(texts)
  once = feed(5, 0, epochs=1)
  parts = [once.read(begin, 7) for begin in range(0, once.row_end, 7)]
  assert sum(part.weights.sum() for part in parts) == sum(map(len, texts))  # EOS is a target
  endless = feed(5, 0)
  for row in endless.rows:
    first, second = (row.documents(n * row.length, (n + 1) * row.length) for n in (0, 1))
    assert sorted(first.numbers) == sorted(second.numbers)
  assert any(
    row.documents(0, row.length).numbers.tolist()
    != row.documents(row.length, 2 * row.length).numbers.tolist()
    for row in endless.rows
  )


# Public report Open-Athena/marin-dna#499: weights applied twice in an evaluation.
def test_weights_that_are_no_flags_count_once():
  model = tiny.model((tiny.s5,), layers=1)
  params, carry = tiny.init(model, 2)
  batch = tiny.batch((9, 15))
  scores = jax.jit(lambda batch: chunk_scores(model, params, carry, batch)[0])
  plain, scaled = scores(batch), scores(batch._replace(weights=0.1 * batch.weights))
  for field in ('loss', 'weight', 'right'):
    np.testing.assert_allclose(getattr(scaled, field), 0.1 * getattr(plain, field), rtol=1e-5)


# Public report NVIDIA-NeMo/Automodel#3796: an optimizer step without a target.
def test_a_step_without_a_target_is_only_read():
  """Long prompts: of three steps one has targets, and its loss is no spike among losses of 0."""
  model = tiny.model((tiny.s5,), layers=1, remat_policy=None)
  optimizer = Optimizer(0.01, 0, 100)
  spikes, phase = LossSpikes('skip', window=6), Phase(8, 1, 1)
  step = jax.jit(
    make_train_step(
      model, optimizer, Curriculum([phase]), phase, seed=0, remat_chunks=False, spikes=spikes
    )
  )
  state = initial_state(model, optimizer, 0, 2, spikes.initial())
  losses = []
  for number in range(24):
    batch = tiny.batch((8,), seed=number)
    if has_targets := number % 3 == 2:
      batch = batch._replace(positions=batch.positions + 8)
    else:
      batch = batch._replace(weights=0 * batch.weights)
    before, (state, metrics) = state, step(state, batch)
    same = jax.tree.map(
      np.array_equal,
      (before.params, before.optimizer_state),
      (state.params, state.optimizer_state),
    )
    assert all(jax.tree.leaves(same)) == (not has_targets)
    losses += [float(metrics.sums.loss / metrics.sums.weight)] * has_targets
    assert not np.array_equal(*(s.carry['model']['carry'][0][0].re for s in (before, state)))
  assert (int(state.step), int(state.skipped)) == (24, 0)
  np.testing.assert_allclose(np.roll(state.recent.losses, -2), losses[-6:], rtol=1e-5)
  assert int(state.recent.count) == len(losses) == 8


# Public report karpathy/llm.c#601: equal seeds of stochastic rounding.
def test_no_two_parameters_or_steps_round_alike():
  wide = {name: jnp.full(1000, 1.001) for name in 'ab'}
  narrow = {name: leaf.astype(jnp.bfloat16) for name, leaf in wide.items()}
  first, second = (rounding.stored(wide, narrow, lambda key=n: jax.random.key(key)) for n in (0, 1))
  found = [np.asarray(one, np.float32) for one in (first['a'], first['b'], second['a'])]
  for n, one in enumerate(found):
    assert 50 < np.sum(one > 1) < 250  # 1.001 lies at 0.13 of the way from 1 to the next number
    assert not any(np.array_equal(one, other) for other in found[:n])


# Public report huggingface/trl#1053: a quick validation without a target.
def test_a_quick_evaluation_reads_up_to_a_target(tmp_path):
  """Prompts may be longer than its chunks."""
  texts = ['$' * 21 + '%&*%', '$' * 30 + '&&'] * 2
  selection = Selection('asked', 'validation', tiny_run.BYTES)
  documents = [
    store_writer.Document(tiny_run.BYTES.ids(text), len(text), None, text.count('$'))
    for text in texts
  ]
  place = store_location.store_path(selection, str(tmp_path))
  store_writer.StoreWriter(place, selection, {}, shards=1).write(lambda _: documents)

  def feed():
    tokens = TaskFeed('asked', 'validation', 2, 0, shuffle=False, epochs=1, data_dir=str(tmp_path))
    tokens.vocabulary_size = tiny.VOCABULARY
    return tokens

  model = tiny.model((tiny.s5,), layers=1)
  params, carry = tiny.init(model, 2)
  evaluator = Evaluator(model, Partitioner((('data', 1),), (), ()), feed, 2, 8, chunks=1)
  evaluator.open()
  found = evaluator(params, whole=False)
  assert not feed().read(0, 16).weights.any()
  scores = jax.jit(lambda batch: chunk_scores(model, params, carry, batch)[0])(feed().read(0, 24))
  expected = scores.loss.sum() / scores.weight.sum()
  assert found['loss'] == pytest.approx(float(expected), rel=1e-5)
