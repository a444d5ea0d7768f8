"""Weights from elsewhere: names, files, Llama, Mistral and Qwen3, and what a run begins with."""

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

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.load import load_gin
from valkyrie.data.vocabularies import fingerprint
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.main import CONFIGURABLE_MODULES
from valkyrie.models import language_model
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.recurrence.gated import GatedRecurrence
from valkyrie.training.losses import logits
from valkyrie.weights import huggingface, initial, named_tensors, tensor_files
from valkyrie.weights.classes import decoder
from valkyrie.weights.initial import InitialWeights
from valkyrie.weights.source import open_source

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
    {'model_type': 'qwen3', 'use_sliding_window': False, 'layer_types': ['full_attention'] * 3},
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


def test_two_kinds_of_attention_in_one_block_have_names_of_their_own():
  """An export had the arrays of one of them, and an evaluation its patterns."""
  parameters = tiny.model((tiny.attention, tiny.full), layers=2).parameters()
  named = named_tensors.names_of(parameters)
  found = [name for names in named.values() for name in names]
  assert len(set(found)) == len(found)
  assert {'layers.1.full_attention.query', 'layers.1.longformer_attention.query'} <= {*found}


def test_a_planner_s_upper_layers_go_on_counting():
  model = tiny.model(insert=tiny.planner, layers=4)
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


# Of docs/finetune.md, for a model of Llama's layers by another name.
OTHER_RULES = (
  ('^embedding$', 'model.embed_tokens.weight'),
  ('^unembedding$', 'lm_head.weight'),
  ('^final_norm', 'model.norm.weight'),
  ('^layers.([0-9]+).mixer_norm', r'model.layers.\1.input_layernorm.weight'),
  ('^layers.([0-9]+).mlp_norm', r'model.layers.\1.post_attention_layernorm.weight'),
  ('^layers.([0-9]+).attention.query', r'model.layers.\1.self_attn.q_proj.weight.T'),
  ('^layers.([0-9]+).attention.key', r'model.layers.\1.self_attn.k_proj.weight.T'),
  ('^layers.([0-9]+).attention.value', r'model.layers.\1.self_attn.v_proj.weight.T'),
  ('^layers.([0-9]+).attention.out', r'model.layers.\1.self_attn.o_proj.weight.T'),
  ('^layers.([0-9]+).mlp.gate', r'model.layers.\1.mlp.gate_proj.weight.T'),
  ('^layers.([0-9]+).mlp.hidden', r'model.layers.\1.mlp.up_proj.weight.T'),
  ('^layers.([0-9]+).mlp.out', r'model.layers.\1.mlp.down_proj.weight.T'),
)


def test_a_run_or_an_export_of_ours_is_no_folder_of_hugging_face(tmp_path):
  (tmp_path / 'config.json').write_text('{"format": "valkyrie", "model": {}}')
  with pytest.raises(ConfigurationError, match=r'train\.initial_weights takes it as it is'):
    huggingface.configuration(tmp_path)


def test_a_model_of_another_type_is_read_as_its_refusal_advises(tmp_path):
  config, _ = write_llama(tmp_path / 'hf', files=2)
  model = model_of(config, tmp_path)
  expected, _, _ = loaded(tmp_path / 'hf', model)
  (tmp_path / 'hf/config.json').write_text(json.dumps({**config, 'model_type': 'other'}))
  advice = r'set train.initial_weights to its .safetensors file or index .* InitialWeights.rules'
  with pytest.raises(ConfigurationError, match=advice):
    open_source(str(tmp_path / 'hf'))
  index = tmp_path / 'hf/model.safetensors.index.json'
  for partial in (False, True):
    with pytest.raises(ConfigurationError, match='has none of the 30 tensors of the model'):
      loaded(index, model, partial=partial)
  params, complete, lines = loaded(index, model, rules=OTHER_RULES)
  assert complete and len(lines) == 1 and 'loaded 30 of the 30' in lines[0]
  jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
  ('step', 'added', 'number'), [('latest', 2, 2), ('1', 1, 1), (1, 1, 1), (2, 2, 2)]
)
def test_weights_of_any_kept_step_of_a_run_are_named_by_one_binding(tmp_path, step, added, number):
  model = tiny.model(mixers=(tiny.attention,), layers=2)
  first = tiny.init(model, 1)[0]
  with Checkpoints().open(tmp_path / 'run') as checkpoints:
    for saved in (1, 2):
      params = jax.tree.map(lambda leaf, saved=saved: leaf + saved, first)
      checkpoints.save(saved, {'params': params}, {'vocabulary': 'bytes'})
  make = functools.partial(LanguageModel, vocabulary_size=50, d_model=16, layers=2, pattern=(
    functools.partial(language_model.Block, mixers=(tiny.attention,), mlp_width=24),))  # fmt: skip
  params, complete, lines = loaded(tmp_path / 'run', model, make, step=step)
  assert complete and lines[0].endswith(f'run, step {number}')
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + added), params, first)
  with pytest.raises(ConfigurationError, match='step 7'):
    loaded(tmp_path / 'run', model, make, step=7)


def test_settings_that_an_export_has_otherwise_are_said(tmp_path):
  config, _ = write_llama(tmp_path / 'hf')
  model = model_of(config, tmp_path)
  params, _, _ = loaded(tmp_path / 'hf', model)
  tensors = named_tensors.of_params(params)
  arrays = {name: t.read((slice(None),) * len(t.shape)) for name, t in tensors.items()}
  bindings = huggingface.bindings(config)
  (tmp_path / 'own').mkdir()
  save_file(arrays, tmp_path / 'own/model.safetensors')
  for change, said in (
    ({}, []),
    ({'Rotary.base': 9.0}, ['Rotary.base = 9.0 (here 500.0)']),
    ({'Rotary.base': 9.0, 'far/Rotary.base': 500.0}, []),
    ({'Block.norm': 'after'}, ["Block.norm = 'after' (here 'before')"]),
  ):
    exported = {'format': 'valkyrie', 'vocabulary': 'bytes', 'model': bindings | change}
    (tmp_path / 'own/config.json').write_text(json.dumps(exported))
    _, complete, lines = loaded(tmp_path / 'own', model)
    assert complete
    assert lines[1:] == [f'warning: the source has other settings: {one}' for one in said]


def test_two_tensors_with_one_name_are_refused(tmp_path):
  config, weights = write_llama(tmp_path / 'hf')
  more = {'layers.0.mlp.out': np.zeros((40, 24), np.float32)}
  write_llama(tmp_path / 'hf', config, {**weights, **more})
  with pytest.raises(ConfigurationError, match=r"Two tensors .* become 'layers.0"):
    open_source(str(tmp_path / 'hf'))


@pytest.mark.parametrize('kind', ['llama', 'mistral', 'qwen3'])
def test_more_layers_than_a_configuration_says_are_refused(tmp_path, kind):
  """A model of the first layers begins from a folder whose configuration has them all."""
  config, weights = write_llama(tmp_path / 'hf', llama_reference.config(model_type=kind))
  small = {**config, 'num_hidden_layers': 2}
  lines = loaded(tmp_path / 'hf', model_of(small, tmp_path))[2]
  assert any(line.startswith('not loaded from there: layers.2.') for line in lines)
  write_llama(tmp_path / 'hf', small, weights)
  with pytest.raises(ConfigurationError, match=r'tensors of other layers than the 2 of its') as e:
    open_source(str(tmp_path / 'hf'))
  assert 'model.layers.2.mlp.down_proj.weight' in str(e.value) and 'layers.1.' not in str(e.value)


def test_settings_that_shapes_do_not_tell_are_compared(tmp_path):
  config, _ = write_llama(tmp_path / 'hf')
  model = model_of(config, tmp_path, 'Rotary.base=10000.0', 'FullAttention.heads=2',
                   'FullAttention.kv_heads=1', 'FullAttention.head_width=12')  # fmt: skip
  with pytest.raises(ConfigurationError) as error:
    loaded(tmp_path / 'hf', model)
  assert 'Rotary.base = 500.0  # the model has 10000.0' in str(error.value)
  assert 'FullAttention.heads = 4  # the model has 2' in str(error.value)


WRONG = [
  ({'model_type': 'gpt2'}, "of a model of type 'gpt2'"),
  ({'model_type': ['llama']}, 'of a model of type'),
  ({'hidden_act': 'gelu'}, "hidden_act: 'gelu'"),
  *(
    ({name: value}, f'{name}: .*, which Valkyrie does not compute or does not know')
    for name in ('use_gate', 'attn_output_gate', 'qkv_bias', 'use_rope')
    for value in (False, None, 0, '', [], {})
  ),
  *(
    ({name: None}, f'{name}: null, but .* was expected')
    for name in ('rope_theta', 'rms_norm_eps', 'hidden_act', 'tie_word_embeddings', 'vocab_size')
  ),
  ({'model_type': 'qwen3', 'head_dim': None}, 'head_dim: null, which a Qwen3 cannot have'),
  ({'layer_types': ['full_attention']}, 'layer_types: .*, which Valkyrie does not compute'),
  ({'layer_types': []}, 'layer_types: .*, which Valkyrie does not compute'),
  ({'partial_rotary_factor': None}, 'partial_rotary_factor: null, which Valkyrie does not compute'),
  ({'rope_parameters': {'rope_theta': None}}, 'rope_theta: null, but a number above 0'),
  ({'rope_parameters': {'rope_theta': 5.0}, 'rope_scaling': llama_reference.SCALED},
   'Remove the one that does not count'),
  ({'hidden_act': ['silu']}, 'hidden_act: .* but a string was expected'),
  *(
    ({name: value}, f'{name}: .*, which Valkyrie does not compute')
    for name, value in (
      ('attention_bias', True), ('mlp_bias', True), ('partial_rotary_factor', 0.5),
      ('quantization_config', {'quant_method': 'fp8'}), ('logits_scaling', 8.0),
      ('attention_multiplier', 0.1), ('final_logit_softcapping', 30.0), ('sliding_window', 8),
      ('layer_types', ['full_attention', 'sliding_attention']), ('layer_types', 'full_attention'),
      ('use_sliding_window', True), ('use_qk_norm', True), ('clip_qkv', 6),
    )
  ),
  *(
    ({name: value}, f'{name}: .*, but an integer above 0 was expected')
    for name in (*decoder.NEEDED, 'num_key_value_heads', 'head_dim')
    for value in ('64', 64.5, 0, -4, True, [64], {'a': 1}, 2**40)
  ),
  *(
    ({name: value}, f'{name}: .*, but a number above 0 was expected')
    for name in ('rms_norm_eps', 'rope_theta')
    for value in ('1e-5', -1.0, [1.0], True, float('nan'), float('inf'), 10**400)
  ),
  *(
    ({name: value}, f'{name}: .*, but {kind} was expected')
    for name, kind in (('tie_word_embeddings', 'true or false'), ('rope_scaling', 'an object'))
    for value in ('yes', 1, [1])
  ),
  *(
    ({'rope_scaling': {**llama_reference.SCALED, name: value}}, f'{name}: .* was expected')
    for name in ('factor', 'low_freq_factor', 'original_max_position_embeddings', 'rope_type')
    for value in (['8'], -8, True)
  ),
  ({'rope_scaling': {**llama_reference.SCALED, 'beta_fast': 32}}, 'beta_fast: 32, which'),
]  # fmt: skip


@pytest.mark.parametrize(('config', 'message'), WRONG)
def test_other_models_are_refused(tmp_path, config, message):
  (tmp_path / 'config.json').write_text(json.dumps(llama_reference.config(**config)))
  with pytest.raises(ConfigurationError, match=message):
    huggingface.configuration(tmp_path)


HARMLESS = {
  'architectures': ['LlamaForCausalLM'], 'bos_token_id': 1, 'eos_token_id': [2, 3],
  'use_cache': True,
  'torch_dtype': 'bfloat16', 'transformers_version': '4.44.0', 'initializer_range': 0.02,
  'pretraining_tp': 1, 'attention_dropout': 0.1, '_name_or_path': 'a/b', 'attention_bias': False,
  'partial_rotary_factor': 1.0, 'unsloth_version': '2024.8', 'quantization_config': None,
  'mlp_bias': False, 'rope_interleaved': False, 'is_llama_config': True, 'pad_token_id': None,
  'bad_words_ids': None, 'tf_legacy_loss': False, 'is_encoder_decoder': False, 'pruned_heads': {},
}  # fmt: skip


@pytest.mark.parametrize('changes', [
  {}, {'rope_scaling': llama_reference.SCALED}, {'model_type': 'mistral', 'sliding_window': 7},
  {'model_type': 'qwen3', 'max_window_layers': 28, 'layer_types': ['full_attention'] * 3},
])  # fmt: skip
def test_every_field_that_counts_is_compared(tmp_path, changes):
  """A model of another configuration is refused, though its shapes are the same."""
  config, _ = write_llama(tmp_path / 'hf', llama_reference.config(**changes, **HARMLESS))
  model = model_of(huggingface.configuration(tmp_path / 'hf'), tmp_path)
  _, complete, lines = loaded(tmp_path / 'hf', model)
  assert complete and 'begin without the token 1 (bos_token_id)' in lines[-1]
  other_heads = {'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 12}
  if config['model_type'] == 'qwen3':  # whose norms would be left out
    other_heads = {'model_type': 'llama'}
  others = [
    {'rope_theta': 501.0}, {'rms_norm_eps': 1e-6}, other_heads,
    {'rope_scaling': {**llama_reference.SCALED, 'factor': 4.0}},
  ]  # fmt: skip
  if 'rope_scaling' in changes:
    names = ('low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings')
    others += [{'rope_scaling': {**llama_reference.SCALED, name: 3}} for name in names]
    others.append({'rope_scaling': None})
  if 'sliding_window' in changes:
    others += [{'sliding_window': 8}, {'sliding_window': None}]
  else:
    others += [{'model_type': 'mistral', 'sliding_window': 7}, {'model_type': 'mistral'}]
  for other in others:
    gin.clear_config()
    model = model_of({**config, **other}, tmp_path)
    with pytest.raises(ConfigurationError, match=r'config.json differs from the model. Bind:'):
      loaded(tmp_path / 'hf', model)


def test_long_rotary_periods_are_read(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(llama_reference.config(rope_theta=4.5e10)))
  assert huggingface.bindings(huggingface.configuration(tmp_path))['Rotary.base'] == 4.5e10


def test_a_qwen3_has_its_defaults():
  config = llama_reference.config(model_type='qwen3', num_attention_heads=64)
  del config['num_key_value_heads'], config['head_dim']
  found = huggingface.bindings(config)
  assert (found['FullAttention.head_width'], found['FullAttention.kv_heads']) == (128, 32)


@pytest.mark.parametrize('kind', ['llama', 'mistral', 'qwen3'])
def test_no_number_of_key_value_heads_means_all(tmp_path, kind):
  config = llama_reference.config(model_type=kind, num_key_value_heads=None, sliding_window=None)
  (tmp_path / 'config.json').write_text(json.dumps(config))
  assert huggingface.bindings(huggingface.configuration(tmp_path))['FullAttention.kv_heads'] == 4


@pytest.mark.parametrize('fields', [{'use_sliding_window': False}, {}])
def test_a_qwen3_without_windows_has_full_attention_whatever_their_size(tmp_path, fields):
  config = llama_reference.config(model_type='qwen3', sliding_window=7, **fields)
  (tmp_path / 'config.json').write_text(json.dumps(config))
  found = huggingface.plan(huggingface.configuration(tmp_path))
  assert {kind.mixers for kind in found.kinds.values()} == {('FullAttention',)}


def test_a_mistral_has_its_defaults():
  config = llama_reference.config(model_type='mistral', num_attention_heads=16)
  del config['num_key_value_heads']
  found = huggingface.bindings(config)
  assert (found['LongformerAttention.window'], found['LongformerAttention.kv_heads']) == (4095, 8)


def test_a_mistral_whose_tokens_see_only_themselves_is_refused(tmp_path):
  config = llama_reference.config(model_type='mistral', sliding_window=1)
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ConfigurationError, match='sliding_window: 1, with which a token sees only'):
    huggingface.configuration(tmp_path)


@pytest.mark.parametrize('kind', ['F8_E4M3', 'F8_E5M2', 'I8', 'U8', 'I64', 'BOOL'])
def test_quantized_tensors_are_refused(tmp_path, kind):
  config, weights = write_llama(tmp_path / 'hf')
  name = 'model.layers.1.mlp.up_proj.weight'
  small = weights[name].astype(np.int64 if kind == 'I64' else np.int8)
  write_llama(tmp_path / 'hf', config, {**weights, name: small})
  file = tmp_path / 'hf' / 'model.safetensors'
  content = file.read_bytes()
  size = int.from_bytes(content[:8], 'little')
  header = json.loads(content[8 : 8 + size])
  header[name]['dtype'] = kind
  text = json.dumps(header).encode()
  file.write_bytes(len(text).to_bytes(8, 'little') + text + content[8 + size :])
  with pytest.raises(ConfigurationError, match=f'layers.1.mlp.hidden: found {kind}, expected F64'):
    loaded(tmp_path / 'hf', model_of(config, tmp_path))


@pytest.mark.parametrize('parts', [
  {'a': (24, 4)}, {'b': (4, 24)}, {'a': (24, 4), 'b': (5, 24)}, {'a': (23, 4), 'b': (4, 24)},
  {'a': (24, 4), 'b': (4, 23)}, {'a': (24,), 'b': (4, 24)}, {'a': (24, 4), 'b': ()},
])  # fmt: skip
@pytest.mark.parametrize('name', ['layers.0.attention.query', 'nothing'])
def test_half_an_adapter_is_refused(parts, name):
  def tensor(*shape):
    return tensor_files.Tensor(shape, np.ones(shape, np.float32).__getitem__)

  tensors = {'layers.0.attention.query': tensor(24, 24)}
  tensors |= {f'{name}_lora_{half}': tensor(*shape) for half, shape in parts.items()}
  with pytest.raises(ConfigurationError, match='An adapter is not whole, or of another model'):
    named_tensors.merged(tensors)


@pytest.mark.parametrize('index', [
  {}, {'weight_map': None}, {'weight_map': []}, {'weight_map': 'model.safetensors'},
  {'weight_map': {'a': 1}}, {'weight_map': {'a': ['one']}}, {'weight_map': {'a': None}},
  {'weight_map': {'a': '../model.safetensors'}}, [], 'text', 3, None, '[' * 100_000,
])  # fmt: skip
def test_an_index_of_another_type_is_named(tmp_path, index):
  write_llama(tmp_path / 'hf')
  text = index if isinstance(index, str) and len(index) > 9 else json.dumps(index)
  (tmp_path / 'hf' / 'model.safetensors.index.json').write_text(text)
  with pytest.raises(StorageError, match=r'index\.json (names|has|cannot be read)'):
    open_source(str(tmp_path / 'hf'))


def test_positions_that_one_factor_slows_are_written_as_they_were_read(tmp_path):
  scaling = {'rope_type': 'linear', 'factor': 4.0}
  text = huggingface.gin_text(llama_reference.config(rope_scaling=scaling))
  (tmp_path / 'llama.gin').write_text(text)
  load_gin([str(tmp_path / 'llama.gin')], [], modules=CONFIGURABLE_MODULES)
  np.testing.assert_allclose(Rotary().frequencies(6), 500.0 ** (-np.arange(3) / 3) / 4)
  assert huggingface.export_of(LanguageModel).config['rope_scaling'] == scaling
  gin.clear_config()


def test_another_scaling_of_positions_is_refused():
  scaling = {'type': 'default', 'rope_type': 'linear', 'factor': 4.0}
  both = llama_reference.config(rope_scaling=scaling)
  with pytest.raises(ConfigurationError, match="rope_type 'linear' and of type 'default'"):
    huggingface.gin_text(both)
  config = llama_reference.config(rope_scaling={'rope_type': 'yarn', 'factor': 4.0})
  with pytest.raises(ConfigurationError, match="rope_type 'yarn'"):
    huggingface.bindings(config)


def test_missing_and_damaged_files_are_named(tmp_path):
  write_llama(tmp_path / 'hf', files=2)
  shard = tmp_path / 'hf' / 'model-00002-of-00002.safetensors'
  whole = shard.read_bytes()
  shard.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(StorageError, match=r'00002-of-00002.safetensors is not a whole'):
    open_source(str(tmp_path / 'hf'))
  shard.unlink()
  with pytest.raises(StorageError, match=r'index.json names model-00002-of-00002.safetensors'):
    open_source(str(tmp_path / 'hf'))
  (tmp_path / 'hf' / 'model.safetensors.index.json').write_text('{half')
  with pytest.raises(StorageError, match=r'index\.json cannot be read'):
    open_source(str(tmp_path / 'hf'))
  (tmp_path / 'empty').mkdir()
  with pytest.raises(ConfigurationError, match=r'has no .safetensors file and no checkpoints'):
    open_source(str(tmp_path / 'empty'))
  with pytest.raises(ConfigurationError, match='nothing are not there'):
    open_source(str(tmp_path / 'nothing'))


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


@pytest.mark.parametrize(
  'rules', [(('(', 'fresh'),), ('embedding',), ((1, 'fresh'),), (('a', r'\1'),), (('a', 1),)]
)
def test_rules_are_pairs_of_a_regular_expression_and_a_name(rules):
  with pytest.raises(ConfigurationError, match=r'InitialWeights.rules (contains|has)'):
    InitialWeights('.', rules=rules)


def test_a_rule_for_no_tensor_is_refused(tmp_path):
  config, _ = write_llama(tmp_path / 'hf')
  model = model_of(config, tmp_path)
  message = r"'embeding', which is found in none .* Did you mean embedding\?"
  with pytest.raises(ConfigurationError, match=message):
    loaded(tmp_path / 'hf', model, rules=[('embeding', 'fresh')])
  rules = [('mlp', 'fresh'), (r'mlp\.out$', 'zero')]
  with pytest.raises(ConfigurationError, match='but earlier ones choose all'):
    loaded(tmp_path / 'hf', model, rules=rules)


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
