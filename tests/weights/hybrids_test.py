"""Hybrids of other programs: their folders compute their equations, are written, and refused."""

import json
import re

import gin
from hybrid_classes_reference import Gemma3, Lfm2, Mamba2, NemotronH, OlmoHybrid, Qwen35
from hybrid_folders import DELTA, MODELS, loaded, model_of, packed, read, write, written_back
import jax
import llama_reference
import numpy as np
import pytest
from safetensors.numpy import load_file

from valkyrie.config.load import load_gin
from valkyrie.errors import ConfigurationError
from valkyrie.main import CONFIGURABLE_MODULES
from valkyrie.models.language_model import LanguageModel
from valkyrie.weights import huggingface, named_tensors, settings
from valkyrie.weights.initial import InitialWeights
from valkyrie.weights.source import open_source

TOKENS = np.random.default_rng(3).integers(0, 50, 24).astype(np.int32)
DOCUMENTS = (24, 11)  # lengths in a packed row, with a rest of padding
ONE = {'layers': [0], 'num_heads': 4, 'num_kv_heads': None, 'rope_theta': 100.0}


@pytest.mark.parametrize('name', MODELS)
def test_a_folder_computes_its_equations_and_is_written_back(tmp_path, name):
  reference, config = MODELS[name]
  weights = reference.tensors(config)
  folder = write(tmp_path / 'hf', config, weights)
  documents = [TOKENS[:length] for length in DOCUMENTS]
  row = packed(documents)
  expected = np.concatenate([reference.logits(config, weights, one) for one in documents])
  with jax.enable_x64(True):
    model = model_of(folder, tmp_path)
    params, lines = loaded(folder, model)
    assert lines == [f'loaded {model_count(params)} of the {model_count(params)} tensors of the '
                     f'model from {folder}']  # fmt: skip
    for chunk in (7, row[0].shape[1]):
      found = read(model, params, row, chunk)[: len(expected)]
      np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    again = written_back(model, params, tmp_path / 'again')
    back, _ = loaded(again, model)
  jax.tree.map(np.testing.assert_array_equal, back, params)
  theirs = json.loads((again / 'config.json').read_text())
  for field, value in theirs.items():
    is_integer = type(config.get(field)) is int and field != 'expand_v'
    if is_integer and value is not None:  # transformers reads no other type
      assert type(value) is int, field
  found = reference.logits({**config, **theirs}, open_arrays(again), TOKENS)
  np.testing.assert_allclose(found, expected[: len(TOKENS)], rtol=0, atol=1e-12)
  for listed in ('layer_types', 'layers_block_type'):
    # Programs that read the other field find the same layers.
    if listed in theirs and name in ('qwen', 'nemotron'):
      others = {field: value for field, value in theirs.items() if field != listed}
      assert huggingface.plan(others).layers == huggingface.plan(theirs).layers
  gin.clear_config()


def model_count(params):
  return sum(len(leaf.tensors) for leaf in named_tensors.leaves(params))


def open_arrays(folder):
  return load_file(folder / 'model.safetensors')


# (model, changed fields, what the refusal says)
FIELDS = [
  *(
    ('delta', {field: value}, f'{field}: ')
    for field, value in (
      ('use_gate', False), ('use_gate', None), ('use_short_conv', False), ('qkv_bias', True),
      ('output_gate_activation', 'sigmoid'), ('hidden_act', 'powlu'), ('attnres_block_size', 4),
      ('norm_first', True), ('num_heads', None), ('num_heads', 2.5), ('head_dim', '5'),
      ('norm_eps', None), ('norm_eps', -1), ('expand_v', True), ('conv_size', 0),
      ('allow_neg_eigval', None), ('allow_neg_eigval', 1), ('tie_word_embeddings', None),
      ('max_position_embeddings', None), ('surprise', False), ('surprise', None),
      ('attn', 'all'), ('attn', [1]), ('num_hidden_layers', 10**6), ('expand_v', 1e308),
      ('expand_v', 0.01),
    )
  ),
  *(
    ('delta', {'attn': {**ONE, **change}}, message)
    for change, message in (
      ({'qkv_bias': True}, 'qkv_bias: true'), ({'surprise': False}, 'surprise: false'),
      ({'layers': [9]}, 'layers'), ({'layers': [0, 0]}, 'layers'), ({'layers': [True]}, 'layers'),
      ({'num_heads': None}, 'num_heads: null'), ({'window_size': 1}, 'window_size: 1'),
      ({'rope_theta': None}, 'rope_theta: null'),
    )
  ),
  *(
    ('qwen', {field: value}, f'{field}: ')
    for field, value in (
      ('attn_output_gate', False), ('attn_output_gate', None), ('attention_bias', True),
      ('hidden_act', 'gelu'), ('output_gate_type', 'sigmoid'), ('use_sliding_window', True),
      ('layer_types', ['full_attention']), ('layer_types', ['conv'] * 4), ('layer_types', 'full'),
      ('head_dim', None), ('linear_key_head_dim', None), ('partial_rotary_factor', None),
      ('surprise', False), ('rms_norm_eps', None), ('num_attention_heads', 2**30),
    )
  ),
  ('qwen', {'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 9.0}}, 'rope_type: "yarn"'),
  ('qwen', {'rope_parameters': {'partial_rotary_factor': 2.0}}, 'partial_rotary_factor: 2'),
  *(
    ('olmo', {field: value}, f'{field}: ')
    for field, value in (
      ('attention_bias', True), ('hidden_act', 'gelu'), ('linear_use_gate', False),
      ('attention_dropout', 0.1), ('linear_allow_neg_eigval', None), ('surprise', None),
      ('layer_types', ['moe'] * 4), ('linear_conv_kernel_dim', None), ('rope_theta', None),
    )
  ),
  *(
    ('mamba', {field: value}, f'{field}: ')
    for field, value in (
      ('use_bias', True), ('hidden_act', 'gelu'), ('time_step_limit', [0.001, float('inf')]),
      ('time_step_limit', [0.0, 0.1]), ('time_step_limit', 3), ('use_conv_bias', None),
      ('n_groups', None), ('state_size', 0), ('head_dim', None), ('surprise', 0),
      ('tie_word_embeddings', 0),
    )
  ),
  *(
    ('nemotron', {field: value}, f'{field}: ')
    for field, value in (
      ('mlp_hidden_act', 'silu'), ('mamba_hidden_act', 'gelu'), ('mlp_bias', True),
      ('mamba_proj_bias', True), ('attention_bias', True), ('tie_word_embeddings', True),
      ('sliding_window', 8), ('time_step_limit', [0.001, 0.1]), ('surprise', False),
      ('attention_head_dim', 4), ('rms_norm_eps', 1e-4), ('norm_eps', 0), ('norm_eps', None),
    )
  ),
  *(
    ('lfm2', {field: value}, f'{field}: ')
    for field, value in (
      ('conv_bias', True), ('conv_bias', None), ('conv_L_cache', None), ('norm_eps', None),
      ('block_auto_adjust_ff_dim', None), ('block_multiple_of', 0), ('block_ff_dim', 41),
      ('tie_embedding', False), ('tie_word_embeddings', None), ('num_key_value_heads', None),
      ('layer_types', ['linear_attention'] * 4), ('layer_types', ['conv']), ('rope_theta', None),
      ('full_attn_idxs', [4]), ('full_attn_idxs', [True]), ('full_attn_idxs', 1),
      ('intermediate_size', None), ('block_ffn_dim_multiplier', 1e308), ('surprise', False),
    )
  ),
  *(
    ('gemma', {field: value}, f'{field}: ')
    for field, value in (
      ('hidden_activation', 'gelu'), ('hidden_activation', None), ('attention_bias', True),
      ('use_bidirectional_attention', True), ('attn_logit_softcapping', 50.0),
      ('final_logit_softcapping', 30.0), ('query_pre_attn_scalar', None), ('head_dim', None),
      ('sliding_window', None), ('sliding_window', 1), ('num_key_value_heads', None),
      ('layer_types', ['full_attention']), ('layer_types', ['conv'] * 4), ('rms_norm_eps', 0),
      ('sliding_window_pattern', 0), ('rope_theta', None), ('rope_local_base_freq', 0),
      ('tie_word_embeddings', None), ('rope_scaling', {'rope_type': 'linear', 'factor': 4.0}),
      ('surprise', False),
    )
  ),
  ('gemma', {'rope_parameters': {'rope_theta': 100.0}}, 'rope_theta: 100.0, which'),
  *(
    ('gemma', {'rope_parameters': {'full_attention': rotary}}, message)
    for rotary, message in (
      ({'rope_type': 'yarn', 'factor': 8.0}, "rope_type 'yarn'"), (3, 'full_attention: 3'),
      ({'rope_type': 'linear'}, "by 'linear' without factor"), ({'beta': None}, 'beta: null'),
    )
  ),
  ('nemotron', {'hybrid_override_pattern': 'M-E*-'}, "layers of 'E'"),
  ('nemotron', {'layers_block_type': ['mamba', 'moe']}, "layers of 'moe'"),
  ('nemotron', {'hybrid_override_pattern': None}, 'layers of no kind'),
]  # fmt: skip


@pytest.mark.parametrize(('name', 'changes', 'message'), FIELDS)
def test_a_configuration_that_is_not_computed_is_refused_by_field(tmp_path, name, changes, message):
  _, config = MODELS[name]
  (tmp_path / 'config.json').write_text(json.dumps({**config, **changes}))
  with pytest.raises(ConfigurationError, match=message):
    huggingface.configuration(tmp_path)


@pytest.mark.parametrize('name', ['vocab_size', 'hidden_size', 'num_heads', 'head_dim'])
def test_a_missing_field_is_named(tmp_path, name):
  config = {field: value for field, value in DELTA.config().items() if field != name}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(ConfigurationError, match=f'lacks {name}, which a gated_deltanet has'):
    huggingface.configuration(tmp_path)


@pytest.mark.parametrize('name', MODELS)
def test_a_tensor_that_is_not_known_is_named(tmp_path, name):
  reference, config = MODELS[name]
  weights = reference.tensors(config)
  last = [*weights][-1]
  beyond = re.sub(r'layers\.\d+', 'layers.7', last)
  for other, message in (
    (beyond, r'has 1 tensors of other layers than the \d of its config.json'),
    (f'other.{last}', r'has 1 tensors that Valkyrie does not know'),
  ):
    folder = write(tmp_path / 'hf', config, weights | {other: weights[last]})
    with pytest.raises(ConfigurationError, match=message) as e:
      open_source(str(folder))
    assert f'  {other}\n' in str(e.value)


def test_half_of_a_joint_tensor_is_named(tmp_path):
  config = DELTA.config()
  weights = DELTA.tensors(config)
  del weights['model.layers.2.attn.k_conv1d.weight']
  with pytest.raises(ConfigurationError, match=r'lacks model.layers.2.attn.k_conv1d.weight. Fetch'):
    open_source(str(write(tmp_path / 'hf', config, weights)))


def test_older_files_of_a_gated_deltanet_are_read(tmp_path):
  config = DELTA.config()
  weights = DELTA.tensors(config)
  expected = open_source(str(write(tmp_path / 'new', config, weights))).tensors
  unused = 'model.layers.0.attn.D'
  older = {**weights, unused: np.ones(6, np.float32)}
  for layer in range(4):
    mlp = f'model.layers.{layer}.mlp.'
    up = older.pop(f'{mlp}up_proj.weight')
    older[f'{mlp}gate_proj.weight'] = np.concatenate([older[f'{mlp}gate_proj.weight'], up])
  found = open_source(str(write(tmp_path / 'old', config, older)))
  assert found.skipped == [unused]
  assert found.tensors.keys() == expected.keys()
  for name, tensor in expected.items():
    np.testing.assert_array_equal(found.tensors[name].whole(), tensor.whole())
    index = tuple(slice(1, 3) for _ in tensor.shape)
    np.testing.assert_array_equal(found.tensors[name].read(index), tensor.whole()[index])
  older['model.layers.2.mlp.gate_proj.weight'] = weights['model.layers.2.mlp.gate_proj.weight'][:9]
  with pytest.raises(ConfigurationError, match='has 9 rows, but its configuration says 40'):
    open_source(str(write(tmp_path / 'old', config, older)))


def other_olmo(weights, config):
  """As transformers 5.24 writes it: the convolution in three equal parts, and other norms."""
  result = {}
  for name, array in weights.items():
    _, _, rest = name.partition('layers.')
    layer = rest.partition('.')[0]
    new = name
    if layer.isdecimal() and config['layer_types'][int(layer)] == 'linear_attention':
      new = new.replace('attention_layer_norm', 'input_layernorm')
      new = new.replace('feedforward_layer_norm', 'post_attention_layernorm')
    else:
      new = new.replace('post_attention_layernorm', 'feedforward_layer_norm')
    result[new] = array
  for layer in (0, 2):
    names = [f'model.layers.{layer}.linear_attn.{part}_conv1d.weight' for part in 'qkv']
    joint = np.concatenate([result[name] for name in names])
    result |= dict(zip(names, np.split(joint, 3), strict=True))
  return result


def joint_olmo(weights, config):
  """As its class holds it: one convolution."""
  result = dict(weights)
  for layer in (0, 2):
    prefix = f'model.layers.{layer}.linear_attn.'
    parts = [result.pop(f'{prefix}{part}_conv1d.weight') for part in 'qkv']
    result[f'{prefix}conv1d.weight'] = np.concatenate(parts)
  return result


def inner_qwen(weights, config):
  """As inside of a model with images, with tensors that are left out."""
  result = {name.replace('model.', 'model.language_model.'): weights[name] for name in weights}
  return result | {'model.visual.one': np.ones(2, np.float32), 'mtp.fc.weight': np.ones((2, 2))}


def inner_gemma(weights, config):
  """As inside of a model with images today."""
  result = {name.replace('model.', 'model.language_model.'): weights[name] for name in weights}
  return result | {'model.vision_tower.encoder.layers.0.bias': np.ones(2, np.float32)}


def published_gemma(weights, config):
  """As the published ones of 4B and more."""
  result = {f'language_model.{name}': weights[name] for name in weights}
  return result | {'multi_modal_projector.mm_soft_emb_norm.weight': np.ones(2, np.float32)}


def other_nemotron(weights, config):
  return {name.replace('backbone.', 'model.'): weights[name] for name in weights}


def older_mamba(weights, config):
  return {name.replace('.embeddings.', '.embedding.'): weights[name] for name in weights}


@pytest.mark.parametrize(('name', 'change'), [
  ('olmo', other_olmo), ('olmo', joint_olmo), ('qwen', inner_qwen), ('nemotron', other_nemotron),
  ('mamba', older_mamba),
])  # fmt: skip
def test_every_spelling_of_names_is_read(tmp_path, name, change):
  reference, config = MODELS[name]
  weights = reference.tensors(config)
  expected = open_source(str(write(tmp_path / 'one', config, weights)))
  found = open_source(str(write(tmp_path / 'other', config, change(weights, config))))
  assert found.tensors.keys() == expected.tensors.keys()
  assert all(one in ('model.visual.one', 'mtp.fc.weight') for one in found.skipped)
  assert len(found.skipped) == (2 if name == 'qwen' else 0)
  for ours, tensor in expected.tensors.items():
    np.testing.assert_array_equal(found.tensors[ours].whole(), tensor.whole(), strict=True)
    index = tuple(slice(1, 4) for _ in tensor.shape)
    np.testing.assert_array_equal(found.tensors[ours].read(index), tensor.whole()[index])


def test_the_text_inside_of_a_model_with_images_is_read(tmp_path):
  inside = Qwen35.config(tie_word_embeddings=True)
  outside = {'model_type': 'qwen3_5', 'text_config': inside, 'vision_config': {'depth': 2}}
  weights = inner_qwen(Qwen35.tensors(Qwen35.config()), inside)
  source = open_source(str(write(tmp_path / 'hf', outside, weights)))
  plan = huggingface.plan(source.config)
  assert plan.bindings['LanguageModel.tied'] is False  # the outer field counts
  (tmp_path / 'hf/config.json').write_text(json.dumps({**outside, 'text_config': [1]}))
  with pytest.raises(ConfigurationError, match='text_config: '):
    open_source(str(tmp_path / 'hf'))
  (tmp_path / 'hf/config.json').write_text(json.dumps({**outside, 'surprise': None}))
  with pytest.raises(ConfigurationError, match='surprise: null'):
    open_source(str(tmp_path / 'hf'))


@pytest.mark.parametrize('change', [inner_gemma, published_gemma])
def test_the_text_inside_of_a_gemma_with_images_is_read(tmp_path, change):
  reference, config = MODELS['gemma']
  weights = reference.tensors(config)
  expected = open_source(str(write(tmp_path / 'one', config, weights)))
  outside = {
    'model_type': 'gemma3', 'vision_config': {'model_type': 'siglip'}, 'mm_tokens_per_image': 256,
    'boi_token_index': 255999, 'eoi_token_index': 256000, 'image_token_index': 262144,
    'tie_word_embeddings': config['tie_word_embeddings'],
  }  # fmt: skip
  inside = change(weights, config)
  found = open_source(str(write(tmp_path / 'hf', {**outside, 'text_config': config}, inside)))
  assert huggingface.plan(found.config) == huggingface.plan(expected.config)
  assert len(found.skipped) == 1
  assert found.tensors.keys() == expected.tensors.keys()
  for ours, tensor in expected.tensors.items():
    np.testing.assert_array_equal(found.tensors[ours].whole(), tensor.whole(), strict=True)


def test_a_published_gemma_lacks_what_its_class_says(tmp_path):
  """The configuration of google/gemma-3-4b-it, in the fields that count."""
  text = {
    'hidden_size': 2560, 'intermediate_size': 10240, 'model_type': 'gemma3_text',
    'num_hidden_layers': 34, 'sliding_window': 1024,
    'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
  }  # fmt: skip
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'gemma3', 'text_config': text}))
  bindings = huggingface.plan(huggingface.configuration(tmp_path)).bindings
  assert bindings['LanguageModel.vocabulary_size'] == 262208
  assert bindings['LanguageModel.tied']
  assert bindings['full_attention/FullAttention.heads'] == 8
  assert bindings['full_attention/FullAttention.max_context'] == 131072
  assert bindings['sliding_attention/LongformerAttention.window'] == 1023
  (tmp_path / 'config.json').write_text(
    json.dumps({'model_type': 'gemma3', 'text_config': {**text, 'model_type': 'gemma2'}})
  )
  with pytest.raises(ConfigurationError, match="an object of the model_type 'gemma3_text'"):
    huggingface.configuration(tmp_path)


def test_defaults_are_those_of_the_class(tmp_path):
  qwen = {name: value for name, value in Qwen35.config().items() if name != 'layer_types'}
  qwen['rope_parameters'] = {'rope_theta': 100.0}
  plan = huggingface.plan(qwen)
  assert plan.bindings['full_attention/Rotary.share'] == 0.25
  assert [*plan.layers] == ['linear_attention'] * 3 + ['full_attention']
  olmo = OlmoHybrid.config(rope_parameters=None, layer_types=None, linear_key_head_dim=None)
  plan = huggingface.plan(olmo)
  assert plan.bindings['full_attention/Rotary.base'] == 10_000.0
  assert plan.bindings['full_attention/Rotary.share'] == 1.0
  assert plan.bindings['linear_attention/GatedDeltaNet.key_width'] == 6
  nemotron = NemotronH.config(num_hidden_layers=None, use_conv_bias=False)
  (tmp_path / 'config.json').write_text(json.dumps(nemotron))
  plan = huggingface.plan(huggingface.configuration(tmp_path))
  assert plan.bindings['LanguageModel.layers'] == 5  # the list counts
  # As transformers 5.23 writes the list.
  types = ['linear_attention', 'mlp', 'linear_attention', 'full_attention', 'mlp']
  del nemotron['hybrid_override_pattern'], nemotron['num_hidden_layers']
  (tmp_path / 'config.json').write_text(json.dumps({**nemotron, 'layers_block_type': types}))
  assert huggingface.plan(huggingface.configuration(tmp_path)) == plan
  mamba = {name: value for name, value in Mamba2.config().items() if name != 'n_groups'}
  assert huggingface.plan(mamba).bindings['Mamba2.groups'] == 8
  lfm2 = {name: value for name, value in Lfm2.config().items() if 'block_' not in name}
  for name in ('layer_types', 'rope_parameters', 'tie_word_embeddings', 'conv_L_cache'):
    del lfm2[name]
  bindings = huggingface.bindings(lfm2)
  assert bindings['Rotary.base'] == 1e6 and bindings['LanguageModel.tied']
  assert bindings['Block.mlp_width'] == 256  # two thirds of 40, up to a multiple
  plan = huggingface.plan({**lfm2, 'full_attn_idxs': [1], 'block_ffn_dim_multiplier': None})
  assert [*plan.layers] == ['conv', 'full_attention', 'conv', 'conv']
  assert plan.bindings['conv/ShortConvolution.taps'] == 3
  assert plan.bindings['Block.mlp_width'] == 26
  gemma = Gemma3.config(num_hidden_layers=8, rope_parameters=None)
  left_out = ('layer_types', 'head_dim', 'query_pre_attn_scalar', 'sliding_window')
  for name in (*left_out, 'num_key_value_heads', 'tie_word_embeddings', 'hidden_activation'):
    del gemma[name]
  plan = huggingface.plan(gemma)
  assert [number for number, kind in enumerate(plan.layers) if kind == 'full_attention'] == [5]
  bindings = plan.bindings
  assert bindings['sliding_attention/Rotary.base'] == 1e4 and bindings['LanguageModel.tied']
  assert bindings['full_attention/Rotary.base'] == 1e6
  assert bindings['full_attention/FullAttention.kv_heads'] == 4
  assert bindings['sliding_attention/LongformerAttention.head_width'] == 256
  assert bindings['sliding_attention/LongformerAttention.window'] == 4095


FLA_MAMBA = {
  'model_type': 'mamba2', 'vocab_size': 50, 'hidden_size': 24, 'num_hidden_layers': 2,
  'num_heads': 6, 'head_dim': 8, 'state_size': 5, 'conv_kernel': 3, 'expand': 2, 'use_bias': False,
  'use_conv_bias': True, 'norm_eps': 1e-3, 'hidden_act': 'silu', 'tie_word_embeddings': True,
  'dt_limit': [0.0, {'__float__': 'Infinity'}], 'rmsnorm': True, 'norm_before_gate': False,
  'D_has_hdim': False, 'A_init_range': [1, 16], 'conv_init': None, 'dt_min': 1e-3, 'dt_max': 0.1,
  'dt_init_floor': 1e-4, 'fuse_norm': True, 'fuse_cross_entropy': True, 'use_l2warp': False,
  'fuse_linear_cross_entropy': False, 'chunk_size': 256, 'residual_in_fp32': True,
  'rescale_prenorm_residual': True,
}  # fmt: skip


@pytest.mark.parametrize('groups', [{}, {'n_groups': 2}])
def test_a_mamba2_of_flash_linear_attention_is_that_of_transformers(tmp_path, groups):
  ours = Mamba2.config(**{'n_groups': 1, **groups})
  theirs = huggingface.configuration(write(tmp_path, {**FLA_MAMBA, **groups}, {}))
  assert huggingface.plan(theirs) == huggingface.plan(ours)


@pytest.mark.parametrize(('field', 'value'), [
  ('rmsnorm', False), ('rmsnorm', None), ('norm_before_gate', True), ('D_has_hdim', True),
  ('dt_limit', [0.0, 0.1]), ('dt_limit', 3), ('norm_eps', None), ('norm_eps', 0),
  ('use_bias', True), ('hidden_act', 'gelu'), ('num_heads', None), ('n_groups', 0),
  ('tie_word_embeddings', None), ('surprise', False), ('layer_norm_epsilon', 1e-5),
])  # fmt: skip
def test_a_mamba2_of_flash_linear_attention_that_is_not_computed_is_refused(tmp_path, field, value):
  folder = write(tmp_path, {**FLA_MAMBA, field: value}, {})
  with pytest.raises(ConfigurationError, match=f'config.json has {field}: '):
    huggingface.configuration(folder)


def test_the_scale_of_queries_holds_the_divisor_of_scores(tmp_path):
  config = Gemma3.config(query_pre_attn_scalar=12)
  weights = Gemma3.tensors(config)
  found = open_source(str(write(tmp_path / 'hf', config, weights))).tensors
  theirs = weights['model.layers.1.self_attn.q_norm.weight']
  scale = found['layers.1.attention.query_norm.scale']
  expected = (1 + theirs.astype(np.float64)) * np.sqrt(8 / 12)
  np.testing.assert_allclose(scale.whole(), expected, rtol=2**-23)
  np.testing.assert_array_equal(found['layers.1.attention.key_norm.scale'].whole(),
                                1 + weights['model.layers.1.self_attn.k_norm.weight'])  # fmt: skip
  again = huggingface.written(config, {'layers.1.attention.query_norm.scale': scale})
  written = again['model.layers.1.self_attn.q_norm.weight'].whole()
  np.testing.assert_allclose(written, theirs, rtol=0, atol=2**-22)


def test_another_scale_of_embeddings_than_its_class_has_is_written_into_them(tmp_path):
  (tmp_path / 'model.gin').write_text(huggingface.gin_text(Gemma3.config()))
  flags = ['--gin.LanguageModel.embedding_scale=3.0']
  load_gin([str(tmp_path / 'model.gin')], flags, modules=CONFIGURABLE_MODULES)
  config, scale = huggingface.export_of(LanguageModel)
  assert not config['tie_word_embeddings'] and scale == 3 / 24**0.5
  gin.clear_config()


@pytest.mark.parametrize('name', MODELS)
def test_a_missing_tensor_is_named(tmp_path, name):
  reference, config = MODELS[name]
  weights = reference.tensors(config)
  missing = next(one for one in reversed(weights) if 'up_proj' in one or 'out_proj' in one)
  del weights[missing]
  folder = write(tmp_path / 'hf', config, weights)
  with jax.enable_x64(True):
    model = model_of(folder, tmp_path)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), 1))[0]
    with pytest.raises(
      ConfigurationError, match=r'lacks 1 of the .* tensors of the model:\n  layers'
    ):
      InitialWeights(str(folder)).load(model, LanguageModel, shapes, 'bytes', lambda line: None)
  gin.clear_config()


# Bindings of a model that its class has not, and the message about each.
UNLIKE_GEMMA = [
  ('full_attention/Rotary.share = 0.5', 'Rotary.share = 0.5 in layer 1'),
  ('sliding_attention/LongformerAttention.registers = 2', 'LongformerAttention.registers = 2'),
  ("sliding_attention/Block.norm = 'before'", "Block.norm = 'before' in layer 0"),
  ("GatedMLP.activation = 'silu'", "GatedMLP.activation = 'silu' in layer 0"),
  ('full_attention/FullAttention.query_key_norm = False', 'FullAttention.query_key_norm = False'),
]
UNLIKE = [
  ("linear/GatedDeltaNet.write_gate = 'hard'", "GatedDeltaNet.write_gate = 'hard' in layer 0"),
  ('linear/GatedDeltaNet.norm_epsilon = 1e-5', 'GatedDeltaNet.norm_epsilon = 1e-05 in layer 0'),
  ('linear/GatedDeltaNet.convolution_bias = True', 'GatedDeltaNet.convolution_bias = True'),
  ('attention_0/LongformerAttention.registers = 2', 'LongformerAttention.registers = 2 in layer 1'),
  ('attention_1/FullAttention.output_gate = True', 'FullAttention.output_gate = True in layer 3'),
  ('attention_1/FullAttention.head_width = 8', 'FullAttention.head_width = 8 in layer 3'),
  ('attention_1/Rotary.share = 0.5', 'Rotary.share = 0.5 in layer 3'),
  ("linear/Block.norm = 'both'", "Block.norm = 'both' in layer 0"),
  ('linear/Block.mlp = @SquaredReLUMLP', 'Block.mlp = @SquaredReLUMLP in layer 0'),
  ('attention_0/Block.mixers = (@S5,)', r'Block.mixers = \(@S5,\) in layer 1'),
  ('LanguageModel.ngrams = @NgramEmbedding', 'LanguageModel.ngrams = '),
  ('LanguageModel.learned_carry = True', 'LanguageModel.learned_carry = True'),
]


@pytest.mark.parametrize(('config', 'binding', 'message'), [
  *((DELTA.config(), *one) for one in UNLIKE), *((Gemma3.config(), *one) for one in UNLIKE_GEMMA),
])  # fmt: skip
def test_an_export_names_the_binding_that_its_class_has_not(tmp_path, config, binding, message):
  text = huggingface.gin_text(config)
  more = 'S5.state_size = 4\nNgramEmbedding.rows = 8\nNgramEmbedding.width = 4\n'
  (tmp_path / 'model.gin').write_text(text)
  (tmp_path / 'change.gin').write_text(f'{more}{binding}\n')
  files = [str(tmp_path / name) for name in ('model.gin', 'change.gin')]
  load_gin(files, [], modules=CONFIGURABLE_MODULES)
  with pytest.raises(ConfigurationError, match=rf'{config["model_type"]}(, \w+)*: {message}'):
    huggingface.export_of(LanguageModel)
  gin.clear_config()


def exported_config(tmp_path, config):
  """The config.json that the model of another one is written with."""
  (tmp_path / 'model.gin').write_text(huggingface.gin_text(config))
  load_gin([str(tmp_path / 'model.gin')], [], modules=CONFIGURABLE_MODULES)
  exported, _ = huggingface.export_of(LanguageModel)
  return exported


@pytest.mark.parametrize('config', [
  llama_reference.config(model_type='mistral', sliding_window=8),
  Gemma3.config(layer_types=['sliding_attention'] * 4),
  NemotronH.config(hybrid_override_pattern='M-M', num_hidden_layers=3),
  DELTA.config(attn=None),
])  # fmt: skip
def test_a_model_without_a_limit_of_its_context_says_one_whose_angles_fit_in_memory(
  tmp_path, config
):
  exported = exported_config(tmp_path, config)
  assert exported['model_type'] == config['model_type']
  assert exported['max_position_embeddings'] == 2**17


def test_an_lfm2_has_the_widths_that_vllm_reads(tmp_path):
  config = exported_config(tmp_path, Lfm2.config())
  assert config['block_dim'] == config['conv_dim'] == config['hidden_size']


def test_mamba2_with_channels_of_another_width_is_written_as_nemotron_h(tmp_path):
  """The class mamba2 has a whole multiple of the width, whose factor transformers reads."""
  config = exported_config(tmp_path, Mamba2.config(num_heads=4))
  assert config['model_type'] == 'nemotron_h' and config['mamba_num_heads'] == 4


def test_a_nemotron_h_may_name_code_of_its_folder_and_its_epsilon_again(tmp_path):
  config = NemotronH.config(auto_map={'AutoConfig': 'configuration_nemotron_h.NemotronHConfig'})
  config |= {'rms_norm_eps': config['layer_norm_epsilon'], 'norm_eps': config['layer_norm_epsilon']}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  found = huggingface.plan(huggingface.configuration(tmp_path))
  assert found.shared['RMSNorm.epsilon'] == config['layer_norm_epsilon']


def test_a_width_that_is_null_follows_from_the_ratio():
  config = DELTA.config(intermediate_size=None, hidden_ratio=None, hidden_size=2048)
  assert huggingface.bindings(config)['Block.mlp_width'] == 5632


def test_a_setting_by_its_default_and_by_its_value_is_the_same(tmp_path):
  config = DELTA.config()
  folder = write(tmp_path / 'hf', config, DELTA.tensors(config))
  plan = huggingface.plan(huggingface.configuration(folder))
  model_of(folder, tmp_path, '--gin.linear/GatedDeltaNet.norm_epsilon=1e-3')
  assert settings.differences(plan, settings.settings_of(LanguageModel)) == []
  gin.clear_config()
  model_of(folder, tmp_path, '--gin.linear/GatedDeltaNet.norm_epsilon=1e-4')
  found = settings.differences(plan, settings.settings_of(LanguageModel))
  assert [name for name, _ in found] == ['GatedDeltaNet.norm_epsilon']


def test_a_model_with_fewer_tokens_than_the_tables_of_a_folder_is_refused(tmp_path):
  """Its softmax would lack them, though the padded tables hold as many rows."""
  config = DELTA.config()
  folder = write(tmp_path / 'hf', config, DELTA.tensors(config))
  fewer = config['vocab_size'] - 1
  model = model_of(folder, tmp_path, f'--gin.LanguageModel.vocabulary_size={fewer}')
  expected = rf'vocabulary_size = {fewer + 1}  # the model has {fewer}'
  with pytest.raises(ConfigurationError, match=expected):
    InitialWeights(str(folder)).check(model, LanguageModel, 'bytes')
  InitialWeights(str(folder), partial=True).check(model, LanguageModel, 'bytes')


def test_the_epsilon_of_a_teacher_is_that_of_its_scope(tmp_path):
  config = DELTA.config()
  folder = write(tmp_path / 'hf', config, DELTA.tensors(config))
  plan = huggingface.plan(huggingface.configuration(folder))
  teacher = ('--gin.Distillation.teacher=@teacher/LanguageModel', '--gin.RMSNorm.epsilon=0.5')
  for epsilon, expected in (1e-3, []), (0.5, ['RMSNorm.epsilon']):
    gin.clear_config()
    model_of(folder, tmp_path, *teacher, f'--gin.teacher/RMSNorm.epsilon={epsilon}')
    make = gin.get_bindings('Distillation')['teacher']
    found = settings.differences(plan, settings.settings_of(make))
    assert [name for name, _ in found] == expected


def test_settings_of_layers_are_compared_layer_by_layer(tmp_path):
  config = DELTA.config()
  folder = write(tmp_path / 'hf', config, DELTA.tensors(config))
  other = DELTA.config(allow_neg_eigval=False, norm_eps=1e-6)
  other['attn'] = [{**config['attn'][0], 'rope_theta': 7.0}, config['attn'][1]]
  model_of(write(tmp_path / 'other', other, DELTA.tensors(config)), tmp_path)
  plan = huggingface.plan(huggingface.configuration(folder))
  found = settings.differences(plan, settings.settings_of(LanguageModel))
  assert [line for _, line in found] == [
    'RMSNorm.epsilon = 0.001  # the model has 1e-06',
    "linear/GatedDeltaNet.write_gate = 'double'  # the model has 'sigmoid'",
    'attention_0/Rotary.base = 100.0  # the model has 7.0',
  ]
  gin.clear_config()
