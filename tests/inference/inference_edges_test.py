"""Texts and numbers that a model cannot take, and weights that give no numbers."""

import jax
import jax.numpy as jnp
from letters import Letters, built, text
import numpy as np
import pytest
import tiny

from valkyrie.errors import ConfigurationError, DataError, Diverged, UsageError
from valkyrie.inference.generation import Sampling
from valkyrie.inference.infer import TextSamples
from valkyrie.inference.loaded import LoadedModel
from valkyrie.inference.reader import Reader

SAMPLED = Sampling(temperature=1.0)


@pytest.mark.parametrize('path', ['gs://bucket/carry', '~no_such_user/carry'])
def test_a_carry_goes_to_no_folder_that_is_named_by_an_address_or_a_sign(path):
  with pytest.raises(ConfigurationError, match=path):
    built().save_carry(path, {})


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_weights_that_give_no_numbers_end_with_an_error(value):
  loaded = built()
  leaves, structure = jax.tree.flatten(loaded.params)
  other = LoadedModel(loaded.model, {}, Letters(), model_dir='', steps=(1,), chunk_size=16)
  for number in range(0, len(leaves), 3 if np.isnan(value) else len(leaves)):
    broken = [*leaves]
    broken[number] = leaves[number].at[...].set(value)
    params = jax.tree.unflatten(structure, broken)
    other.params = params
    for ask in (
      lambda: loaded.score(text(20), params=params),  # noqa: B023
      lambda: other.embed(text(20)),
      lambda: other.generate(text(5), max_tokens=3),
      lambda: other.generate(text(5), max_tokens=3, sampling=SAMPLED),
      lambda: list(other.stream(text(5), max_tokens=3)),
    ):
      with pytest.raises(Diverged, match='NaN or infinite'):
        ask()


WRONG = [
  (np.array([3, -1]), 'has the token -1'),
  (np.array([3, tiny.VOCABULARY]), f'the token {tiny.VOCABULARY}'),
  (np.array([2**31, 1]), 'the token 2147483648'),
  (np.array([2**40]), 'the token 1099511627776'),
  (np.array([1.0, 2.5]), 'of float64'),
  (np.array([True, False]), 'of bool'),
  (np.array(['A']), 'of <U1'),
  (np.zeros((2, 3), np.int32), r'array \[2, 3\] of int32'),
  (np.array(3), r'array \[\] of int'),
  ('no letter: ~', 'has the token'),
]


@pytest.mark.parametrize(('wrong', 'message'), WRONG)
def test_tokens_that_the_model_lacks_are_refused(wrong, message):
  loaded = built()
  for ask in (loaded.score, loaded.read, loaded.generate, loaded.activations):
    with pytest.raises(ConfigurationError, match=message):
      ask(wrong if ask == loaded.activations else ['A', wrong])


@pytest.mark.parametrize('wrong', ['\ud83d', 'A\udc80B', '\udfff' * 9])
def test_text_that_is_no_unicode_is_refused(wrong):
  loaded = built()
  for ask in (loaded.score, loaded.read, loaded.generate, loaded.activations):
    with pytest.raises(DataError, match='half of a'):
      ask(wrong)


def test_tokens_of_every_integer_are_read():
  loaded = built()
  expected = loaded.score('BCD')[0].log_probs
  for kind in (np.uint8, np.int16, np.int64, np.uint64):
    np.testing.assert_array_equal(loaded.score([np.array([1, 2, 3], kind)])[0].log_probs, expected)
  np.testing.assert_array_equal(loaded.score([[1, 2, 3]])[0].log_probs, expected)
  made = loaded.generate('BCD', max_tokens=4)
  assert loaded.generate(np.array([1, 2, 3]), max_tokens=4) == made


@pytest.mark.parametrize(('rows', 'texts'), [(3, 5), (3, 1), (2, 3), (5, 4)])
def test_a_carry_has_one_row_or_one_for_each_text(rows, texts):
  loaded = built()
  carry = loaded.read(['A'] * rows)
  for ask in (loaded.score, loaded.embed, loaded.read, loaded.generate):
    with pytest.raises(ConfigurationError, match=f'has {rows} rows, but {texts} texts'):
      ask(['B'] * texts, carry)
  for ask in (loaded.activations, lambda text, carry: list(loaded.stream(text, carry))):
    with pytest.raises(ConfigurationError, match=f'has {rows} rows, but 1 texts'):
      ask('B', carry=carry)
  with pytest.raises(UsageError, match='Found None, expected a text'):
    loaded.score(None)
  for wrong in ([0, rows], [-rows - 1], [1.0], [False, True], [], 0):
    with pytest.raises(IndexError, match='The carry has no rows'):
      loaded.rows(carry, wrong)
  last = loaded.rows(carry, [-1])
  np.testing.assert_array_equal(last.hidden, carry.hidden[-1:])


def test_a_carry_of_another_model_is_named():
  loaded, other = built(), built('full')
  carry, document = other.read('AB'), other.read('AB' * 20, keep='log')
  for ask in (loaded.score, loaded.embed, loaded.read, loaded.generate, loaded.logits):
    for of in (carry, document):
      with pytest.raises(ConfigurationError, match='made by a model of other sizes'):
        ask('B', of)
  with pytest.raises(ConfigurationError, match='made by a model of other sizes'):
    loaded.read('AB' * 30, keep=document)


RANGES = [
  ('seed', (-1, 2**32, 2**40, 1.5, True)),
  ('max_tokens', (-1, 2.0)),
  ('samples', (0, -3, 2**32)),
  ('batch_size', (0, -1, 1.0)),
  ('first', (-1, 2**32)),
]


@pytest.mark.parametrize(('name', 'value'), [(n, v) for n, values in RANGES for v in values])
def test_numbers_out_of_range_are_refused(name, value):
  with pytest.raises(ConfigurationError, match='Use an integer in'):
    built().generate(['A', 'B'], **{name: value})
  if name == 'batch_size':
    with pytest.raises(ConfigurationError, match='Use an integer in'):
      built().score('A', batch_size=value)


def test_other_settings_out_of_range_are_refused():
  with pytest.raises(ConfigurationError, match=r'chunk_size = 0 .* an integer in \[1, '):
    Reader(built().model, 0)
  with pytest.raises(ConfigurationError, match=r"cut='states' is unknown"):
    built().read('A', cut='states')
  with pytest.raises(ConfigurationError, match=r'every = 0 .* an integer in \[1, '):
    TextSamples(['A'], 0, model=None, vocabulary='bytes', chunk_size=16)
  for wrong in (
    {'temperature': -1.0}, {'temperature': np.nan}, {'top_p': np.nan}, {'min_p': 1.1}, {'top_k': 0},
    {'top_k': 1.5}, {'repetition_penalty': 1e-46}, {'repetition_penalty': np.inf},
  ):  # fmt: skip
    with pytest.raises(ConfigurationError, match='out of range'):
      Sampling(**wrong)


def test_samples_of_any_numbers_differ():
  loaded = built()
  reader, numbers = Reader(loaded.model, 16), [0, 1, 4096, 2**20, 2**32 - 1]
  rows = [(prompt, sample) for prompt in numbers for sample in numbers]
  carry = loaded.rows(loaded.read('A'), [0] * len(rows))
  made = reader.generate(
    loaded.params, carry, [], Sampling(temperature=9.0), seed=0, numbers=rows, count=16
  )
  assert len({*zip(*(tuple(step.tolist()) for step in made), strict=True)}) == len(rows)


@pytest.mark.parametrize('size', [1e-4, 1.0, 1e6, 1e37])
@pytest.mark.parametrize(
  'options',
  [
    *({'temperature': 10.0**-power} for power in (15, 30, 37, 38, 40, 46, 300)),
    *({'temperature': 1e-38, **rule} for rule in ({'top_k': 2}, {'top_p': 0.5}, {'min_p': 0.5})),
    *({'temperature': 1.0, 'top_p': 10.0**-power} for power in (30, 38, 46, 300)),
    {'temperature': 1.0, 'min_p': 1.0},
    {'temperature': 1.0, 'top_k': 1},
  ],
)
def test_the_limits_of_sampling_are_greedy(size, options):
  logits = size * np.random.default_rng(0).uniform(-3, 3, (200, 50)).astype(np.float32)
  keys = jax.random.split(jax.random.key(0), 200)
  found = Sampling(**options).choose(jnp.asarray(logits), jnp.zeros(()), keys)
  np.testing.assert_array_equal(found, logits.argmax(-1))


@pytest.mark.parametrize('length', [1, 15, 37])
def test_logits_are_those_of_the_scores_without_padding(length):
  loaded = built()
  tokens = loaded.tokenizer.ids(text(length))
  begin = loaded.read(text(5, 1))
  found = loaded.logits(text(length), begin)
  assert found.shape == (length, tiny.VOCABULARY) and np.isfinite(found).all()
  (score,) = loaded.score(text(length), begin)
  log_probs = np.asarray(jax.nn.log_softmax(found))
  np.testing.assert_allclose(
    log_probs[np.arange(length - 1), tokens[1:]], score.log_probs[1:], rtol=1e-4, atol=1e-5
  )
  with pytest.raises(ConfigurationError, match='has the token 50'):
    loaded.logits(np.array([50]))


def test_a_gradient_through_logits_is_that_of_a_difference():
  loaded = built()
  tokens = loaded.tokenizer.ids(text(20))

  def loss(params):
    log_probs = jax.nn.log_softmax(loaded.logits(tokens, params=params)[:-1])
    return -log_probs[np.arange(19), tokens[1:]].mean()

  gradient = jax.grad(loss)(loaded.params)
  assert float(loss(loaded.params)) == pytest.approx(
    -loaded.score(tokens)[0].log_prob / 19, rel=1e-4
  )
  direction = jax.tree.map(jnp.sign, gradient)
  slope = sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(gradient))
  size = 1e-4
  ahead, behind = (
    float(loss(jax.tree.map(lambda p, d, s=s: p + s * d, loaded.params, direction)))
    for s in (size, -size)
  )
  assert (ahead - behind) / (2 * size) == pytest.approx(slope, rel=0.02)
