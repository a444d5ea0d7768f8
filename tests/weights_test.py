"""Weights from elsewhere: names, files, Llama and Mistral, and what a run begins with."""

import functools
import json
import re

import gin
import jax
import jax.numpy as jnp
import llama_reference
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
import tiny

from valkyrie.config.load import load_gin
from valkyrie.data.vocabularies import fingerprint
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.main import CONFIGURABLE_MODULES
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.training.losses import logits
from valkyrie.weights import huggingface, initial, named_tensors
from valkyrie.weights.initial import InitialWeights

pytestmark = pytest.mark.usefixtures('quick_compiler')
TOKENS = np.random.default_rng(3).integers(0, 50, 40).astype(np.int32)


def write_llama(folder, config=None, weights=None, files=1):
  """A folder as Hugging Face's, with the weights in so many files."""
  config = config or llama_reference.config()
  weights = weights or llama_reference.tensors(config)
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  if files == 1:
    save_file(weights, folder / 'model.safetensors')
    return config, weights
  listed = {}
  for number in range(files):
    file = f'model-{number + 1:05}-of-{files:05}.safetensors'
    part = dict(list(weights.items())[number::files])
    save_file(part, folder / file)
    listed |= dict.fromkeys(part, file)
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': listed}))
  return config, weights


def model_of(config, tmp_path, *flags):
  """The model that the printed gin file describes."""
  file = tmp_path / 'model.gin'
  file.write_text(huggingface.gin_text(config))
  load_gin([str(file)], [f'--gin.{flag}' for flag in flags], modules=CONFIGURABLE_MODULES)
  return language_model.transform(LanguageModel)


def loaded(source, model, make=LanguageModel, vocabulary='bytes', **options):
  """(parameters, complete, lines) of a source."""
  lines = []
  weights = InitialWeights(str(source), **options)
  params, complete = weights.load(model, make, tiny.init(model, 1)[0], vocabulary, lines.append)
  return params, complete, lines


def read(model, params, tokens, carry=None, start=0):
  """(logits [T, vocabulary], the carry) of tokens of one document, from position `start`."""
  carry = model.initial_carry(1) if carry is None else carry
  row = jnp.asarray(tokens)[None]
  positions = start + jnp.arange(len(tokens))[None]
  features, carry = jax.jit(model.apply)(params, carry, row, positions, jnp.ones_like(row))
  vocabulary = model.about.vocabulary_size
  return np.asarray(logits(features, vocabulary)[0, :, :vocabulary]), carry


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'tie_word_embeddings': True},
    {'rope_scaling': llama_reference.SCALED},
    {'model_type': 'mistral', 'sliding_window': 7, 'vocab_size': 128},
  ],
)
def test_a_folder_of_llama_computes_its_logits_whole_and_in_chunks(tmp_path, changes):
  config, weights = write_llama(tmp_path / 'hf', llama_reference.config(**changes), files=2)
  model = model_of(config, tmp_path)
  params, complete, lines = loaded(tmp_path / 'hf', model)
  assert complete
  assert lines == [f'loaded {len(weights)} of the {len(weights)} tensors of the model from '
                   f'{tmp_path / "hf"}']  # fmt: skip
  expected = llama_reference.logits(config, weights, TOKENS)
  whole, _ = read(model, params, TOKENS)
  np.testing.assert_allclose(whole, expected, atol=1e-5, rtol=1e-5)
  first, carry = read(model, params, TOKENS[:13])
  second, _ = read(model, params, TOKENS[13:], carry, 13)
  np.testing.assert_allclose(np.concatenate([first, second]), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_files_are_read_exactly(tmp_path):
  config = llama_reference.config()
  weights = llama_reference.tensors(config, dtype=ml_dtypes.bfloat16)
  write_llama(tmp_path / 'hf', config, weights)
  model = model_of(config, tmp_path)
  params, _, _ = loaded(tmp_path / 'hf', model)
  query = weights['model.layers.2.self_attn.q_proj.weight'].astype(np.float32).T
  found = params['model/layers/block_0/~/full_attention']['query']
  assert found.dtype == jnp.float32
  np.testing.assert_array_equal(found[2], query)


def test_each_device_reads_its_own_part(tmp_path):
  config, weights = write_llama(tmp_path / 'hf')
  model = model_of(config, tmp_path)
  mesh = jax.make_mesh((2,), ('x',))
  params = tiny.init(model, 1)[0]
  split = jax.tree.map(
    lambda leaf: jax.device_put(
      leaf,
      jax.NamedSharding(
        mesh, jax.P(*(None,) * (leaf.ndim - 1), 'x' if leaf.shape[-1] % 2 == 0 else None)
      ),
    ),
    params,
  )
  found, _ = InitialWeights(str(tmp_path / 'hf')).load(
    model, LanguageModel, split, 'bytes', lambda line: None
  )
  out = found['model/layers/block_0/~/mlp']['out']
  assert out.sharding.spec[-1] == 'x'
  for layer in range(3):
    np.testing.assert_array_equal(
      out[layer], weights[f'model.layers.{layer}.mlp.down_proj.weight'].T
    )


def test_names_do_not_depend_on_the_pattern():
  one = tiny.model(mixers=(tiny.attention,), layers=4)
  single = [name for leaf in named_tensors.leaves(shapes(one)) for name in leaf.tensors]
  block = functools.partial(language_model.Block, mixers=(tiny.attention,), mlp_width=24)
  two = language_model.transform(
    functools.partial(LanguageModel, vocabulary_size=50, d_model=16, layers=4, pattern=(block,) * 2)
  )
  pattern = [name for leaf in named_tensors.leaves(shapes(two)) for name in leaf.tensors]
  assert sorted(pattern) == sorted(single)
  assert 'layers.3.attention.register_keys' in pattern and 'embedding' in pattern
  assert len(set(pattern)) == len(pattern)


def test_a_planner_s_upper_layers_go_on_counting():
  model = tiny.model(planner=tiny.planner, layers=4)
  found = [name for leaf in named_tensors.leaves(shapes(model)) for name in leaf.tensors]
  assert {f'layers.{n}.mlp.out' for n in range(4)} <= set(found)
  assert len(set(found)) == len(found)


def shapes(model):
  return jax.eval_shape(lambda: model.init(jax.random.key(0), 1))[0]


def test_a_hybrid_of_a_llama_begins_with_its_logits_inside_the_window(tmp_path):
  config, weights = write_llama(tmp_path / 'hf')
  window = 9
  attention = functools.partial(
    tiny.LongformerAttention, heads=4, kv_heads=2, head_width=6, window=window
  )
  recurrence = functools.partial(GatedRecurrence, tiny.s5, width=24)
  flags = ['Rotary.base=500.0', 'RMSNorm.epsilon=1e-5']
  load_gin([], [f'--gin.{flag}' for flag in flags], modules=CONFIGURABLE_MODULES)
  block = functools.partial(language_model.Block, mixers=(attention, recurrence), mlp_width=40)
  make = functools.partial(
    LanguageModel, vocabulary_size=50, d_model=24, layers=3, pattern=(block,), tied=False,
    embedding_scale=1.0,
  )  # fmt: skip
  model = language_model.transform(make)
  with pytest.raises(ConfigurationError, match=r'lacks .* of the .* tensors') as error:
    loaded(tmp_path / 'hf', model, make)
  assert 'layers.0.mixer_norm_1.scale' in str(error.value)
  assert 'InitialWeights.partial = True' in str(error.value)
  params, complete, lines = loaded(tmp_path / 'hf', model, make, partial=True)
  assert not complete
  assert 'new, zero: layers.0-2.gated_recurrence.out' in lines
  found, _ = read(model, params, TOKENS)
  expected = llama_reference.logits(config, weights, TOKENS)
  # A token inside the first window sees the whole document, as do all below it.
  np.testing.assert_allclose(found[: window + 1], expected[: window + 1], atol=1e-5, rtol=1e-5)
  assert np.abs(found[20:] - expected[20:]).max() > 0.01


def test_the_vocabulary_is_that_of_the_folder(tmp_path):
  config, _ = write_llama(tmp_path / 'hf')
  model = model_of(config, tmp_path)
  file = tmp_path / 'hf' / 'tokenizer.model'
  file.write_bytes(b'pieces')
  with pytest.raises(ConfigurationError, match=r'vocabulary sentencepiece-.* but bytes is given'):
    loaded(tmp_path / 'hf', model)
  assert loaded(tmp_path / 'hf', model, vocabulary=fingerprint(file, b'pieces'))[1]


def test_more_layers_and_more_tokens_add_nothing_at_first(tmp_path):
  config, weights = write_llama(tmp_path / 'hf')
  larger = {**config, 'num_hidden_layers': 5, 'vocab_size': 60}
  model = model_of(larger, tmp_path)
  with pytest.raises(
    ConfigurationError, match=r'embedding: found \[50, 24\], expected \[128, 24\]'
  ):
    loaded(tmp_path / 'hf', model)
  params, complete, lines = loaded(tmp_path / 'hf', model, partial=True)
  assert not complete
  assert any(line.startswith('new, zero: ') and 'layers.3-4.mlp.out' in line for line in lines)
  found, _ = read(model, params, TOKENS)
  expected = llama_reference.logits(config, weights, TOKENS)
  np.testing.assert_allclose(found[:, :50], expected, atol=1e-5, rtol=1e-5)
  assert np.abs(params['model']['embedding'][50:60]).min() > 0


def test_rules_rename_zero_and_leave_out(tmp_path):
  model = tiny.model(mixers=(tiny.attention,), layers=2)
  first = tiny.init(model, 1)[0]
  tensors = {
    'old_' + name: np.asarray(value[number] if leaf.stacked else value) + 1
    for leaf in named_tensors.leaves(first)
    for value in [first[leaf.module][leaf.name]]
    for number, name in enumerate(leaf.tensors)
  }
  save_file(tensors, tmp_path / 'own.safetensors')
  rules = (('^final_norm', 'zero'), ('register', 'fresh'), ('^(.*)$', r'old_\1'))
  make = functools.partial(LanguageModel, vocabulary_size=50, d_model=16, layers=2, pattern=(
    functools.partial(language_model.Block, mixers=(tiny.attention,), mlp_width=24),))  # fmt: skip
  params, complete, lines = loaded(tmp_path / 'own.safetensors', model, make, rules=rules)
  assert not complete
  assert any(re.match('new, zero: final_norm.scale', line) for line in lines)
  assert any(line.startswith('not loaded from there: old_final_norm.scale') for line in lines)
  again = tiny.init(model, 1)[0]
  np.testing.assert_array_equal(params['model/final_norm']['scale'], 0)
  mlp = 'model/layers/block_0/~/mlp'
  np.testing.assert_array_equal(params[mlp]['out'], again[mlp]['out'] + 1)
  attention = 'model/layers/block_0/~/longformer_attention'
  for name in ('register_keys', 'register_values'):
    np.testing.assert_array_equal(params[attention][name], again[attention][name])


def test_settings_that_shapes_do_not_tell_are_compared(tmp_path):
  config, _ = write_llama(tmp_path / 'hf')
  model = model_of(config, tmp_path, 'Rotary.base=10000.0', 'FullAttention.heads=2',
                   'FullAttention.kv_heads=1', 'FullAttention.head_width=12')  # fmt: skip
  with pytest.raises(ConfigurationError) as error:
    loaded(tmp_path / 'hf', model)
  assert 'Rotary.base = 500.0  # the model has 10000.0' in str(error.value)
  assert 'FullAttention.heads = 4  # the model has 2' in str(error.value)


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    ({'model_type': 'gpt2'}, "of a model of type 'gpt2'"),
    ({'attention_bias': True}, 'attention_bias: true'),
    ({'hidden_act': 'gelu'}, "hidden_act: 'gelu'"),
  ],
)
def test_other_models_are_refused(tmp_path, config, message):
  (tmp_path / 'config.json').write_text(json.dumps(llama_reference.config(**config)))
  with pytest.raises(ConfigurationError, match=message):
    huggingface.configuration(tmp_path)


def test_another_scaling_of_positions_is_refused():
  config = llama_reference.config(rope_scaling={'rope_type': 'yarn', 'factor': 4.0})
  with pytest.raises(ConfigurationError, match="rope_type 'yarn'"):
    huggingface.bindings(config)


def test_missing_and_damaged_files_are_named(tmp_path):
  write_llama(tmp_path / 'hf', files=2)
  shard = tmp_path / 'hf' / 'model-00002-of-00002.safetensors'
  whole = shard.read_bytes()
  shard.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(StorageError, match=r'00002-of-00002.safetensors is not a whole'):
    initial.open_source(str(tmp_path / 'hf'))
  shard.unlink()
  with pytest.raises(StorageError, match=r'index.json names model-00002-of-00002.safetensors'):
    initial.open_source(str(tmp_path / 'hf'))
  (tmp_path / 'hf' / 'model.safetensors.index.json').write_text('{half')
  with pytest.raises(StorageError, match=r'index\.json cannot be read'):
    initial.open_source(str(tmp_path / 'hf'))
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ConfigurationError, match=r'has no .safetensors file and no checkpoints'):
    initial.open_source(str(tmp_path / 'empty'))
  with pytest.raises(ConfigurationError, match='nothing are not there'):
    InitialWeights(str(tmp_path / 'nothing')).check_source()


def test_a_damaged_configuration_is_named(tmp_path, capsys):
  for text, message in (
    ('{half', 'cannot be read'),
    ('[]', 'a JSON object was expected'),
    ('{"model_type": "llama"}', 'lacks vocab_size, hidden_size'),
  ):
    (tmp_path / 'config.json').write_text(text)
    assert huggingface.main([str(tmp_path)]) in (74, 78)
    assert message in capsys.readouterr().err


def test_a_tensor_of_another_shape_is_named(tmp_path):
  config, weights = write_llama(tmp_path / 'hf')
  weights['model.layers.1.mlp.up_proj.weight'] = np.zeros((41, 24), np.float32)
  write_llama(tmp_path / 'hf', config, weights)
  with pytest.raises(ConfigurationError) as error:
    loaded(tmp_path / 'hf', model_of(config, tmp_path))
  assert 'layers.1.mlp.hidden: found [24, 41], expected [24, 40]' in str(error.value)


@pytest.mark.parametrize('rules', [(('(', 'fresh'),), ('embedding',), ((1, 'fresh'),)])
def test_rules_are_pairs_of_a_regular_expression_and_a_name(rules):
  with pytest.raises(ConfigurationError, match=r'InitialWeights.rules (contains|has)'):
    InitialWeights('.', rules=rules)


def test_a_rule_for_no_tensor_is_refused(tmp_path):
  config, _ = write_llama(tmp_path / 'hf')
  with pytest.raises(ConfigurationError, match="'embeding', which is found in no name of the"):
    loaded(tmp_path / 'hf', model_of(config, tmp_path), rules=[('embeding', 'fresh')])


def test_a_loss_like_a_guess_ends_the_run_where_every_weight_was_loaded():
  assert 'is 1.0000' in initial.check_loss(1.0, 50, strict=True)
  assert initial.check_loss(3.9, 50, strict=False).startswith('warning: ')
  with pytest.raises(ConfigurationError, match=r'not clearly below the 3.9120 of a guess'):
    initial.check_loss(3.9, 50, strict=True)


def test_the_gin_file_of_a_folder_is_printed(tmp_path, capsys):
  config, _ = write_llama(tmp_path / 'hf')
  assert huggingface.main([str(tmp_path / 'hf')]) == 0
  assert capsys.readouterr().out == huggingface.gin_text(config)
  assert huggingface.main([str(tmp_path)]) == ConfigurationError.exit_code
  assert 'has no config.json' in capsys.readouterr().err
  assert huggingface.main([]) == 2
  gin.clear_config()


def test_a_file_of_tensors_has_the_bits_of_its_arrays_or_an_error(tmp_path, monkeypatch):
  arrays = {
    'wide': np.arange(12, dtype=np.float32).reshape(3, 4).T,
    'narrow': np.full(3, -0.0, ml_dtypes.bfloat16),
    'one': np.array(np.nan, np.float32),
  }
  named_tensors.write(tmp_path / 'whole.safetensors', arrays, {'a': 'b'})
  found = named_tensors.in_files(tmp_path / 'whole.safetensors')
  assert found.keys() == arrays.keys()
  np.testing.assert_array_equal(
    found['wide'].read((slice(None), slice(1, 3))), arrays['wide'][:, 1:3]
  )

  def save(change):
    monkeypatch.setattr(named_tensors, 'save_file', change)
    with pytest.raises(OSError):
      named_tensors.write(tmp_path / 'broken.safetensors', arrays, {})

  def cut(a, path, metadata):
    save_file(a, path, metadata)
    path.write_bytes(path.read_bytes()[:-1])

  def flip(a, path, metadata):
    save_file(a, path, metadata)
    path.write_bytes(path.read_bytes()[:-1] + b'\1')

  save(cut)
  save(flip)
  save(lambda a, path, metadata: save_file({'wide': a['wide']}, path, metadata))
