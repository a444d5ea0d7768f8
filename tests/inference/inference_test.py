"""Texts read, scored and continued by a model, against the model read at once."""

import types

import jax
import jax.numpy as jnp
from letters import LONG_MIXERS, MIXERS, Letters, built, has_slots, text
import numpy as np
import pytest
import tiny
import tiny_run

from valkyrie.data.vocabularies import ByteVocabulary, load
from valkyrie.errors import ConfigurationError, StorageError, UsageError
from valkyrie.inference import documents
from valkyrie.inference.attribution import Attribution
from valkyrie.inference.generation import Continuation, Sampling
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models.carry_cuts import CUTS, cut_carry

LONGEST = 48  # tokens of a document that is read at once: as many as full attention takes


def features_at_once(loaded, tokens):
  """(hidden [T, D], unembedding) of a document; padding follows it, so that one program does."""
  length = len(tokens)
  row, positions, segment_ids = np.zeros((3, 1, LONGEST), np.int32)
  row[0, :length] = tokens
  positions[0, :length] = np.arange(length)
  segment_ids[0, :length] = 1
  apply = jax.jit(loaded.model.apply)
  carry = loaded.model.initial_carry(1)
  features, _ = apply(loaded.params, carry, row, positions, segment_ids)
  return features.hidden[0, :length], features.unembedding


def at_once(loaded, tokens):
  """The logits of a document, [T, vocabulary size]."""
  hidden, unembedding = features_at_once(loaded, tokens)
  assert unembedding.shape[0] == tiny.VOCABULARY  # no row of padding
  return jnp.matmul(hidden, unembedding.T, precision='highest')


@pytest.mark.parametrize('mixers', MIXERS)
def test_greedy_tokens_are_the_likeliest_of_the_model_read_at_once(mixers):
  """In float64, of prompts of different lengths in one batch: less than a chunk, and more."""
  with jax.enable_x64(True):
    loaded = built(mixers, compute_dtype='float64')
    prompts = [text(1), text(21, 1), text(16, 2)]
    found = loaded.generate(prompts, max_tokens=20, batch_size=3)
    for prompt, made in zip(prompts, found, strict=True):
      tokens = [*loaded.tokenizer.encode(prompt), *made.tokens]
      likeliest = jnp.argmax(at_once(loaded, tokens), axis=-1)
      np.testing.assert_array_equal(likeliest[len(prompt) - 1 : -1], made.tokens)
      assert made.ended == ('length' if len(made.tokens) == 20 else 'eos')
      assert made.text == loaded.tokenizer.decode(made.tokens)


@pytest.mark.parametrize('mixers', MIXERS)
def test_scores_are_those_of_the_model_read_at_once(mixers):
  loaded = built(mixers)
  texts = [text(3), text(37, 1), text(16, 2)]
  for found in loaded.score(texts, batch_size=2):
    expected = jax.nn.log_softmax(at_once(loaded, found.tokens), axis=-1)
    picked = np.take_along_axis(expected[:-1], found.tokens[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.log_probs[1:], picked, rtol=1e-4, atol=1e-4)
    assert np.isnan(found.log_probs[0])
    assert found.log_prob == pytest.approx(float(picked.sum()), rel=1e-4)
    np.testing.assert_array_equal(found.greedy[1:], expected[:-1].argmax(-1) == found.tokens[1:])
  other = jax.tree.map(lambda leaf: 2 * leaf, loaded.params)
  (doubled,) = loaded.score(texts[0], params=other)
  assert abs(doubled.log_prob - loaded.score(texts[0])[0].log_prob) > 1e-3


@pytest.mark.parametrize('mixers', MIXERS)
def test_an_embedding_is_the_mean_of_the_features_of_the_model_read_at_once(mixers):
  """Of texts of different lengths in one batch, and of what follows a carry."""
  loaded = built(mixers)
  texts = [text(3), text(37, 1), text(3, 2)]

  def features(whole):
    return np.asarray(features_at_once(loaded, loaded.tokenizer.ids(whole))[0], np.float64)

  found, expected = loaded.embed(texts, batch_size=2), [*map(features, texts)]
  assert found.shape == (3, 16) and found.dtype == np.float32
  means = [each.mean(axis=0) for each in expected]
  np.testing.assert_allclose(found, means, rtol=1e-4, atol=1e-5)
  (later,) = loaded.embed(texts[1][9:], loaded.read(texts[1][:9]))
  np.testing.assert_allclose(later, expected[1][9:].mean(axis=0), rtol=1e-4, atol=1e-5)
  assert loaded.embed([]).shape == (0, 16)
  with pytest.raises(UsageError, match='A text is empty, and has no features'):
    loaded.embed(['A', ''])


def test_progress_is_told_before_each_chunk_and_at_the_end(monkeypatch):
  loaded, told = built(), []
  monkeypatch.setattr(loaded, 'progress', lambda read, total: told.append((read, total)))
  for call in (loaded.read, loaded.score, loaded.embed, loaded.activations):
    told.clear()
    call(text(40))
    assert told == [(0, 40), (16, 40), (32, 40), (40, 40)]
  told.clear()
  document = loaded.read(text(40), keep='log')
  assert told == [(0, 40), (16, 40), (32, 40), (40, 40)]
  told.clear()
  loaded.read(text(50), keep=document)  # goes on after the 32 tokens of a carry that was kept
  assert told == [(32, 50), (48, 50), (50, 50)]


def test_a_file_of_a_carry_that_is_not_what_was_saved_is_refused(tmp_path):
  """Any byte of it; the header is not compared with anything that the file does not hold."""
  loaded = built()
  origin = {'weights': 'a', 'tokenizer': 'b'}
  document = loaded.read(text(40), keep='log')
  file = tmp_path / 'document.safetensors'
  documents.save(file, document, origin)
  whole = file.read_bytes()
  jax.tree.map(
    np.testing.assert_array_equal, documents.load(file, loaded._reader, origin), document
  )
  begin = 8 + int.from_bytes(whole[:8], 'little')
  for place in np.linspace(0, len(whole) - 1, 40).astype(int):
    changed = bytearray(whole)
    changed[place] ^= 4
    file.write_bytes(changed)
    with pytest.raises((StorageError, ConfigurationError)) as error:
      documents.load(file, loaded._reader, origin)
    assert place < begin or 'is damaged: its content has another digest' in str(error.value)


def test_a_text_from_nothing_begins_with_a_line_break():
  """Or with BOS: tests/data/bos_test.py."""
  loaded, break_ = built(), [0]

  class Lines(Letters):
    def encode(self, text):
      return break_ if text == '\n' else super().encode(text)

  place = {'model_dir': '', 'steps': (1,), 'chunk_size': 16}
  lines = LoadedModel(loaded.model, loaded.params, Lines(), **place)
  (made,) = lines.generate(max_tokens=9)
  assert made.tokens == loaded.generate(np.array([0]), max_tokens=9)[0].tokens
  assert ''.join(lines.stream(max_tokens=9)) == made.text
  assert lines.generate(['A', ''], max_tokens=9)[1].tokens == made.tokens
  break_.clear()  # as a tokenizer that takes line breaks for the spaces before a text
  with pytest.raises(UsageError, match='A prompt has no tokens'):
    lines.generate(['A', ''])


def test_a_long_text_is_read_once(tmp_path):
  loaded = built()
  begin, end = text(25), text(9, 1)
  carry = loaded.read(begin[10:], loaded.read(begin[:10]))
  (whole,) = loaded.score(begin + end)
  for _ in range(2):  # the carry stays valid
    first, second = loaded.score([end, end[:4]], carry)
    np.testing.assert_allclose(first.log_probs, whole.log_probs[25:], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(second.log_probs, whole.log_probs[25:29], rtol=1e-4, atol=1e-5)
  alone = loaded.generate(begin + end, max_tokens=8)
  assert loaded.generate(end, carry, max_tokens=8) == alone
  assert ''.join(loaded.stream(end, carry, max_tokens=8)) == alone[0].text
  after = loaded.read(end, carry)
  assert loaded.generate('', after, max_tokens=8) == alone


@pytest.mark.parametrize('cut', CUTS)
def test_a_cut_sets_the_memory_back_before_every_chunk(cut):
  loaded = built()
  whole, carry = text(40), None
  for begin in range(0, 40, 16):  # the model's chunks
    if carry is not None:
      fresh = loaded.model.initial_carry(1)
      carry = carry._replace(carry=cut_carry(carry.carry, fresh, cut))
    carry = loaded.read(whole[begin : begin + 16], carry)
  found = loaded.read(whole, cut=cut)
  for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(carry), strict=True):
    np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
  uncut = loaded.read(whole)
  assert not np.array_equal(found.hidden, uncut.hidden)


def test_prompts_follow_the_rows_of_a_carry():
  loaded = built()
  contexts, prompts = [text(9), text(30, 1), text(4, 2)], [text(3, 3), text(8, 4), '']
  carry = loaded.read(contexts)
  found = loaded.generate(prompts, carry, max_tokens=6, first=5, batch_size=2)
  whole = loaded.generate([a + b for a, b in zip(contexts, prompts, strict=True)], max_tokens=6)
  assert [one.text for one in found] == [one.text for one in whole]
  assert [one.prompt for one in found] == [5, 6, 7]
  last = loaded.generate(prompts[1], loaded.rows(carry, [1]), max_tokens=6)
  assert last[0].text == whole[1].text


@pytest.mark.parametrize('options', [{}, {'insert': tiny.planner, 'layers': 4}])
def test_activations_of_every_layer_add_up_to_the_stream(options):
  loaded = built(**options)
  layers = options.get('layers', 2)
  found = loaded.activations(text(21), ('stream', 'mlp', 'mixers'))
  assert {kind: value.shape for kind, value in found.items()} == dict.fromkeys(
    ('stream', 'mlp', 'mixers'), (layers, 21, 16)
  )
  added = found['mixers'] + found['mlp']
  np.testing.assert_allclose(
    found['stream'][0] + added[1], found['stream'][1], rtol=1e-4, atol=1e-5
  )
  begin = loaded.read(text(21)[:7])
  rest = loaded.activations(text(21)[7:], ('stream',), begin)
  np.testing.assert_allclose(rest['stream'], found['stream'][:, 7:], rtol=1e-4, atol=1e-5)
  with pytest.raises(ConfigurationError, match="kind='heads' is unknown"):
    loaded.activations('A', ('heads',))
  with pytest.raises(UsageError, match='The text is empty'):
    loaded.activations('')


# Public report huggingface/text-generation-inference#1765: a penalty for the padding of a batch.
def test_samples_depend_on_their_numbers_alone():
  loaded = built()
  prompts = [text(5), text(9, 1), text(5)]
  # A penalty counts neither the padding of a batch nor the tokens of other rows.
  options = {'max_tokens': 10, 'sampling': Sampling(temperature=1.0, repetition_penalty=1.5)}
  found = loaded.generate(prompts, samples=2, seed=1, **options)
  assert [(made.prompt, made.sample) for made in found] == [
    (prompt, sample) for prompt in range(3) for sample in range(2)
  ]
  assert len({tuple(made.tokens) for made in found}) == 6
  assert loaded.generate(prompts, samples=2, seed=1, batch_size=1, **options) == found
  assert loaded.generate(prompts[1:], samples=2, seed=1, first=1, **options) == found[2:]
  assert loaded.generate(prompts, samples=2, seed=2, **options) != found


def test_what_cannot_be_continued_is_refused():
  with pytest.raises(ConfigurationError, match=r'49 tokens.* exceeds the 48'):
    built('full').generate(text(29), max_tokens=20)
  with pytest.raises(
    ConfigurationError, match=r'top_p = 0 is out of range. Use a number in \(0, 1\]'
  ):
    Sampling(top_p=0)


LOGITS = np.log([[0.5, 0.25, 0.15, 0.06, 0.04]]).astype(np.float32)


@pytest.mark.parametrize(
  ('options', 'possible'),
  [
    ({}, {0}),
    ({'temperature': 1.0}, {0, 1, 2, 3, 4}),
    ({'temperature': 1.0, 'top_k': 2}, {0, 1}),
    ({'temperature': 1.0, 'top_k': 9}, {0, 1, 2, 3, 4}),
    ({'temperature': 1.0, 'top_p': 0.7}, {0, 1}),
    ({'temperature': 1.0, 'top_p': 0.76}, {0, 1, 2}),
    ({'temperature': 1.0, 'top_p': 0.3}, {0}),
    ({'temperature': 1.0, 'min_p': 0.29}, {0, 1, 2}),
    ({'temperature': 0.5, 'min_p': 0.26}, {0}),  # after the temperature
    ({'repetition_penalty': 3.0}, {1}),  # of token 0, which is in the text
  ],
)
def test_sampling_takes_what_its_rules_leave(options, possible):
  draws = 400
  keys = jax.random.split(jax.random.key(0), draws)
  seen = np.zeros((1, 5), bool)
  seen[0, 0] = True
  many = [np.repeat(each, draws, axis=0) for each in (LOGITS, seen)]
  found = Sampling(**options).choose(*map(jnp.asarray, many), keys)
  assert set(found.tolist()) == possible


def test_shares_of_samples_are_the_probabilities():
  draws = 20_000
  keys = jax.random.split(jax.random.key(1), draws)
  found = Sampling(temperature=1.0, top_k=3).choose(
    jnp.repeat(jnp.asarray(LOGITS), draws, axis=0), jnp.zeros(()), keys
  )
  shares = np.bincount(found, minlength=5) / draws
  np.testing.assert_allclose(shares, np.array([0.5, 0.25, 0.15, 0, 0]) / 0.9, atol=0.015)


def test_a_repetition_penalty_counts_the_prompt_and_what_was_made():
  loaded = built()
  (made,) = loaded.generate(text(5), max_tokens=12, sampling=Sampling(repetition_penalty=1e9))
  assert len({*loaded.tokenizer.encode(text(5)), *made.tokens}) == 5 + len(made.tokens)


def grow(vocabulary, tokens, stop=()):
  """(the pieces, the text, why it ended)."""
  growing = Continuation(vocabulary, stop)
  pieces = []
  for token in tokens:
    if growing.ended is None:
      pieces.append(growing.add(token))
  if growing.ended is None:
    pieces.append(growing.end())
  assert ''.join(pieces) == growing.text
  return pieces, growing.text, growing.ended


def test_characters_come_whole():
  bytes_ = ByteVocabulary()
  pieces, whole, ended = grow(bytes_, bytes_.encode('aé€😀b'))
  assert (whole, ended) == ('aé€😀b', 'length')
  assert [piece for piece in pieces if piece] == ['a', 'é', '€', '😀', 'b']
  _, broken, _ = grow(bytes_, [3 + 0xF0, *bytes_.encode('x' * 9)])
  assert broken == '\N{REPLACEMENT CHARACTER}' + 'x' * 9


def test_a_continuation_ends_at_eos_or_before_a_stop_string():
  bytes_ = ByteVocabulary()
  tokens = [*bytes_.encode('one END'), bytes_.eos_id]
  assert grow(bytes_, tokens)[1:] == ('one END', 'eos')
  assert grow(bytes_, tokens, ['END.'])[1:] == ('one END', 'eos')
  pieces, *found = grow(bytes_, tokens, ['x', ' END'])
  assert found == ['one', 'stop'] and pieces[3] == ''  # ' ' may begin the stop string


def test_text_of_a_tokenizer_is_the_text_decoded_at_once(tmp_path):
  tiny_run.write_tokenizer(tmp_path / 'tokenizer.json')
  vocabulary = load(str(tmp_path / 'tokenizer.json'))
  whole = 'deep roots, Grüße 😀 ' + tiny_run.TEXT
  assert grow(vocabulary, vocabulary.encode(whole))[1] == whole
  decoded = []

  def decode(ids):
    decoded.append(len(ids))
    return vocabulary.decode(ids)

  growing = Continuation(
    types.SimpleNamespace(eos_id=-1, file=None, encode=vocabulary.encode, decode=decode)
  )
  for token in vocabulary.encode(whole * 20):
    growing.add(token)
  assert growing.text and max(decoded) < 20


def test_carries_in_files(tmp_path):
  loaded = built()
  place = {'model_dir': '', 'steps': (1,), 'chunk_size': 16}
  model = (loaded.model, loaded.params, Letters())
  of_run = LoadedModel(*model, **place, origin={'weights': 'a', 'tokenizer': 'b'})
  carry = of_run.read(text(25))
  of_run.save_carry(tmp_path / 'long.safetensors', carry)
  again = of_run.load_carry(tmp_path / 'long.safetensors')
  jax.tree.map(np.testing.assert_array_equal, again, carry)
  assert of_run.generate('A', again, max_tokens=5) == of_run.generate('A', carry, max_tokens=5)
  several = of_run.read([text(25), text(4, 1), text(9, 2)])
  of_run.save_carry(tmp_path / 'several.safetensors', several)
  again = of_run.load_carry(tmp_path / 'several.safetensors')
  jax.tree.map(np.testing.assert_array_equal, again, several)
  document = of_run.read(text(100), keep='log')
  of_run.save_carry(tmp_path / 'document.safetensors', document)
  again = of_run.load_carry(tmp_path / 'document.safetensors')
  jax.tree.map(np.testing.assert_array_equal, again, document)
  changed = of_run.read(text(80) + text(20, 1), keep=again)
  anew = of_run.read(text(80) + text(20, 1), keep='log')
  jax.tree.map(np.testing.assert_array_equal, changed, anew)
  with pytest.raises(StorageError, match='is there already'):
    of_run.save_carry(tmp_path / 'long.safetensors', carry)
  with pytest.raises(StorageError, match='is not a whole file of a carry'):
    of_run.load_carry(tmp_path / 'missing')
  # Also where one of two has what the other lacks.
  of_run.origin = {'weights': 'a', 'tokenizer': 'b', 'first_carry': 'c'}
  of_run.save_carry(tmp_path / 'begun.safetensors', carry)
  of_run.load_carry(tmp_path / 'begun.safetensors')
  for origin, file in (
    (of_run.origin, 'long'),
    ({'weights': 'a', 'tokenizer': 'b'}, 'begun'),
    ({'weights': 'd', 'tokenizer': 'b'}, 'long'),
    ({**of_run.origin, 'bindings': 'e'}, 'begun'),
  ):
    of_run.origin = origin
    with pytest.raises(ConfigurationError, match='was saved with other weights'):
      of_run.load_carry(tmp_path / f'{file}.safetensors')
  of_run.origin = None
  with pytest.raises(UsageError, match='weights have a fingerprint'):
    of_run.load_carry(tmp_path / 'long.safetensors')


@pytest.mark.parametrize('mixers', ['hybrid', *LONG_MIXERS])
def test_a_document_is_read_on_from_any_place(mixers, monkeypatch, tmp_path):
  """Of what precedes a change, at most half, or as much as follows it, is read again, or a chunk.

  The result equals a whole reading, bit for bit. Keys are kept once, unless others replace them.
  """
  loaded, size = built(mixers), 16
  whole = text(150)
  document = loaded.read(whole, keep='log')
  assert [*document.kept] == [16, 32, 64, 80, 112, 128, 144]
  assert has_slots(document.carry) == (mixers in LONG_MIXERS)
  for carry in document.kept.values():
    assert has_slots(carry) == (mixers == 'sliding')
  documents.save(tmp_path / 'document', document, {})
  stored = documents.load(tmp_path / 'document', loaded._reader, {})
  jax.tree.map(np.testing.assert_array_equal, stored, document)
  assert not loaded.read(text(15), keep='log').kept
  jax.tree.map(np.testing.assert_array_equal, tuple(document)[:3], tuple(loaded.read(whole)))
  read, counts = loaded._reader.read, []

  def counted(params, carry, rows, **options):
    counts.append(len(rows[0]))
    return read(params, carry, rows, **options)

  for place in (1, 15, 16, 31, 40, 63, 64, 100, 127, 128, 143, 150):
    for changed in (whole[:place], whole[:place] + text(30, 7)):
      monkeypatch.setattr(loaded._reader, 'read', counted)
      counts.clear()
      found = loaded.read(changed, keep=document)
      monkeypatch.undo()
      kept = {n: carry for n, carry in found.kept.items() if n <= place}
      again = sum(counts) - (len(changed) - place)
      assert again <= max(min(place // 2, len(whole) - place + size), size)
      assert all(document.kept[n] is carry for n, carry in kept.items() if n in document.kept)
      anew = loaded.read(changed, keep='log')
      jax.tree.map(np.testing.assert_array_equal, found[:4], anew[:4])
      assert len(found.kept) <= len(anew.kept) and min(found.kept, default=size) == size
      for n in {*found.kept} & {*anew.kept}:
        jax.tree.map(np.testing.assert_array_equal, found.kept[n], anew.kept[n])


def test_what_cannot_be_kept_is_named():
  loaded = built('hybrid')
  with pytest.raises(ConfigurationError, match="keep='all' is unknown"):
    loaded.read(text(9), keep='all')
  with pytest.raises(UsageError, match='reads one text from its start'):
    loaded.read([text(9), text(8)], keep='log')


def built_in_float64(mixers, **options):
  """With parameters in float64, too, so that no product is rounded to float32."""
  loaded = built(mixers, compute_dtype='float64', **options)
  params = jax.tree.map(lambda leaf: leaf.astype(np.float64), loaded.params)
  place = {'model_dir': '', 'steps': (1,), 'chunk_size': 16}
  return LoadedModel(loaded.model, params, Letters(), **place)


@pytest.mark.parametrize('mixers', MIXERS)
def test_effects_are_gradients_times_embeddings_of_the_model_read_at_once(mixers):
  with jax.enable_x64(True):
    loaded = built_in_float64(mixers)
    parts = text(29), text(6, 1), text(5, 2)
    found = loaded.attribution(*parts)
    tokens = np.asarray(loaded.tokenizer.encode(''.join(parts)))
    rows = loaded.params['model']['embedding'][tokens[None]]

    def log_odds(rows):
      length = len(tokens)
      features, _ = loaded.model.apply(
        loaded.params,
        loaded.model.initial_carry(1),
        rows,
        np.arange(length)[None],
        np.ones((1, length), np.int32),
      )
      logits = jnp.matmul(features.hidden, features.unembedding.T, precision='highest')[0]
      found = jax.nn.log_softmax(logits)[np.arange(34, 39), tokens[35:]]
      return jnp.sum(found - jnp.log1p(-jnp.exp(found))), jnp.sum(found)

    (_, expected), slopes = jax.jit(jax.value_and_grad(log_odds, has_aux=True))(rows)
    np.testing.assert_array_equal(found.tokens, tokens)
    assert found.log_prob == pytest.approx(float(expected), rel=1e-6)
    effects = jnp.sum(rows * slopes, axis=-1)[0]
    np.testing.assert_allclose(found.effects, effects, rtol=1e-6, atol=1e-9)
    sizes = jnp.linalg.norm(rows, axis=-1) * jnp.linalg.norm(slopes, axis=-1)
    np.testing.assert_allclose(found.strengths, sizes[0], rtol=1e-6, atol=1e-9)
    late = loaded.attribution(*parts, since=20)
    np.testing.assert_array_equal(late.effects[:16], 0)
    np.testing.assert_allclose(late.effects[16:], effects[16:], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('ngrams', [None, tiny.ngrams])
def test_effects_sum_to_the_derivative_by_a_factor_on_all_that_is_read(ngrams):
  """x is linear in the tables, so that a factor on them is one on x; n-grams count, too."""
  with jax.enable_x64(True):
    loaded = built_in_float64('hybrid', ngrams=ngrams, tied=False)
    parts = text(29), text(6, 1), text(5, 2)
    found = loaded.attribution(*parts)
    (tokens,) = loaded.text_rows.tokens([''.join(parts)], None)
    answer = len(parts[2])

    def log_odds(factor):
      params = jax.tree.map(lambda leaf: leaf, loaded.params)
      for group in params.values():
        for name in group:
          if name == 'embedding' or name.startswith('table_'):
            group[name] = factor * group[name]
      scores = loaded.logits(tokens, params=params)[-1 - answer : -1]
      log_probs = jax.nn.log_softmax(scores)[np.arange(answer), tokens[-answer:]]
      return jnp.sum(log_probs - jnp.log1p(-jnp.exp(log_probs)))

    slope = jax.grad(log_odds)(1.0)
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(np.sum(found.effects), slope, rtol=1e-6)


def test_what_a_planner_would_not_tell_is_refused():
  loaded = built('hybrid', insert=tiny.planner)
  with pytest.raises(ConfigurationError, match=r'exact gradient .* LanguageModel.insert = None'):
    loaded.attribution(text(29), text(6, 1), text(5, 2))


def test_question_and_answer_are_no_passages_unless_asked_for():
  strengths = np.zeros(40, np.float32)
  strengths[[3, 30, 35, 38]] = 2, 3, 9, 8
  found = Attribution(np.full(40, 3), strengths, strengths, 0.0, Letters(), document=34)
  assert [passage.strength for passage in found.passages(width=4)] == [3, 2]
  assert all(passage.end <= 34 for passage in found.passages(width=16))
  assert found.passages(width=4, everywhere=True)[0].strength == 17
  assert found._replace(document=0).passages() == []
  loaded = built('hybrid')
  assert loaded.attribution(text(29), text(6, 1), text(5, 2)).document == 29


def test_passages_lie_apart_and_the_strongest_is_first(tmp_path):
  strengths = np.zeros(40, np.float32)
  strengths[[3, 4, 20, 33]] = 2, 3, 4, 1
  tokens = np.arange(40) % 26 + 3
  found = Attribution(tokens, strengths, strengths, 0.0, Letters()).passages(count=9, width=4)
  assert [passage.strength for passage in found] == [5, 4, 1]
  assert all(
    passage.text == Letters().decode(tokens[passage.begin : passage.end]) for passage in found
  )
  assert len(found) == 3
  assert 3 in range(*found[0][:2])
  assert all(a.end <= b.begin or b.end <= a.begin for a in found for b in found if a is not b)
  Attribution(tokens, strengths, strengths, 0.0, Letters()).save_picture(tmp_path / 'effects.png')
  assert (tmp_path / 'effects.png').read_bytes()[:4] == b'\x89PNG'
  with pytest.raises(UsageError, match='The answer has 0 tokens'):
    built('hybrid').attribution(text(9), text(3), '')
