"""Layers of the gated delta rule that begin from the attention that they replace."""

import functools
import json

import llama_reference
import numpy as np
import pytest
from safetensors.numpy import save_file
import tiny
import tiny_run

from valkyrie.config.load import load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.recurrence.gated_delta import GatedDeltaNet
from valkyrie.weights import named_tensors
from valkyrie.weights.initial import InitialWeights
from valkyrie.weights.source import open_source

CONFIG = llama_reference.config()  # three layers; four heads of width 6, two of keys and values
WIDTH = 6
FULL = functools.partial(FullAttention, heads=4, kv_heads=2, head_width=WIDTH, max_context=64)
DELTA = functools.partial(GatedDeltaNet, heads=4, key_width=WIDTH, value_width=WIDTH)
TAKEN = [f'layers.0-1.gated_delta_net.{name}' for name in ('query', 'key', 'value', 'out')]
NEW = ('beta', 'causal_convolution.filters', 'gate', 'log_rate', 'norm.scale', 'step', 'step_bias')


@pytest.fixture(autouse=True)
def settings_of_the_reference():
  flags = ['--gin.Rotary.base=500.0', '--gin.RMSNorm.epsilon=1e-5']
  load_gin([], flags, modules=CONFIGURABLE_MODULES)


def write(folder, config=CONFIG, weights=None):
  """A folder as Hugging Face's."""
  weights = weights or llama_reference.tensors(config)
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(config))
  save_file(weights, folder / 'model.safetensors')
  return folder, weights


def decoder_of(*mixers):
  """The class of the reference's model, with a mixer for each of its three layers."""
  blocks = tuple(
    functools.partial(language_model.Block, mixers=(mixer,), mlp_width=40) for mixer in mixers
  )
  return functools.partial(
    LanguageModel, vocabulary_size=50, d_model=24, layers=3, pattern=blocks, tied=False,
    embedding_scale=1.0,
  )  # fmt: skip


def load(source, make, **options):
  """(parameters, the tensors of the model by name, lines)."""
  lines = []
  model = language_model.transform(make)
  weights = InitialWeights(str(source), primed=True, **options)
  weights.check(model, make, 'bytes')
  params, complete = weights.load(model, make, tiny.init(model, 1)[0], 'bytes', lines.append)
  assert not complete
  tensors = {name: tensor.whole() for name, tensor in named_tensors.of_params(params).items()}
  return params, tensors, lines


def for_each_head(rows):
  """Keys or values [J K, D] of two heads, for four heads: [H K, D]."""
  heads = rows.reshape(2, WIDTH, -1)
  return np.repeat(heads, 2, axis=0).reshape(4 * WIDTH, -1)


def test_projections_are_those_of_the_attention_and_grouped_heads_are_repeated(tmp_path):
  folder, weights = write(tmp_path / 'hf')
  make = decoder_of(DELTA, DELTA, FULL)
  _, found, _ = load(folder, make)
  for layer in (0, 1):
    theirs = f'model.layers.{layer}.self_attn'
    ours = f'layers.{layer}.gated_delta_net'
    value = for_each_head(weights[f'{theirs}.v_proj.weight'])
    out = weights[f'{theirs}.o_proj.weight']
    for name, expected in (
      ('query', weights[f'{theirs}.q_proj.weight'].T),
      ('key', for_each_head(weights[f'{theirs}.k_proj.weight']).T),
      ('value', value.T),
      ('out', out.T),
    ):
      np.testing.assert_array_equal(found[f'{ours}.{name}'], expected, err_msg=name)
  query = weights['model.layers.2.self_attn.q_proj.weight'].T
  np.testing.assert_array_equal(found['layers.2.attention.query'], query)
  norm = weights['model.layers.1.input_layernorm.weight']
  np.testing.assert_array_equal(found['layers.1.mixer_norm.scale'], norm)


def test_all_that_has_no_source_keeps_its_initialization_and_is_named(tmp_path):
  config = {**CONFIG, 'model_type': 'qwen3'}
  folder, _ = write(tmp_path / 'hf', config)
  attention = functools.partial(FULL, query_key_norm=True)
  make = decoder_of(DELTA, DELTA, attention)
  _, found, lines = load(folder, make)
  first = tiny.init(language_model.transform(make), 1)[0]
  initial = {name: tensor.whole() for name, tensor in named_tensors.of_params(first).items()}
  for name in NEW:
    for layer in (0, 1):
      whole_name = f'layers.{layer}.gated_delta_net.{name}'
      np.testing.assert_array_equal(found[whole_name], initial[whole_name], err_msg=name)
  named = dict(line.split(': ', 1) for line in lines[1:])
  taken = named['begin from the attention that they replace'].split(', ')
  assert sorted(taken) == sorted(TAKEN)
  new = [f'layers.0-1.gated_delta_net.{name}' for name in NEW]
  assert sorted(named['new, initialized'].split(', ')) == new
  norms = 'layers.0-1.attention.key_norm.scale, layers.0-1.attention.query_norm.scale'
  assert named['not loaded from there'] == norms
  assert 'new, zero' not in named
  count = len(found)
  assert lines[0].startswith(f'loaded {count - 2 * len(NEW)} of the {count} tensors')


def test_what_is_not_of_a_replaced_layer_must_be_there(tmp_path):
  folder, _ = write(tmp_path / 'hf')
  wider = functools.partial(FULL, query_key_norm=True)
  with pytest.raises(ConfigurationError, match=r'lacks 2 of .*\n  layers.2.attention.key_norm'):
    load(folder, decoder_of(DELTA, DELTA, wider))
  rules = (('gated_delta_net.out', 'fresh'),)
  _, _, lines = load(folder, decoder_of(DELTA, DELTA, FULL), rules=rules)
  assert any(
    line.startswith('new, initialized: ') and 'gated_delta_net.out' in line for line in lines
  )


@pytest.mark.parametrize('changes', [
  {'heads': 2, 'key_width': 12, 'value_width': 12},
  {'heads': 8, 'key_width': 3, 'value_width': 3},
  {'heads': 2},
  {'value_width': 12},
  {'heads': 2, 'value_heads': 4},
])  # fmt: skip
def test_heads_that_do_not_fit_are_refused_by_name(tmp_path, changes):
  folder, _ = write(tmp_path / 'hf')
  message = r'layers.0 of the model has GatedDeltaNet with heads=.* Expected heads=4, key_width=6'
  with pytest.raises(ConfigurationError, match=message):
    load(folder, decoder_of(functools.partial(DELTA, **changes), FULL, FULL))


def test_attention_that_the_source_lacks_is_refused_by_name(tmp_path):
  folder, _ = write(tmp_path / 'hf')
  make = decoder_of(DELTA, FULL, FULL)
  _, tensors, _ = load(folder, make)
  save_file(tensors, tmp_path / 'hybrid.safetensors')
  hybrid = tmp_path / 'hybrid.safetensors'
  message = (r'layers.0 of the model has FullAttention, which needs the attention of '
             r'.*hybrid.safetensors there, but found gated_delta_net, mixer_norm, mlp')  # fmt: skip
  with pytest.raises(ConfigurationError, match=message):
    load(hybrid, decoder_of(FULL, DELTA, FULL), partial=True)
  with pytest.raises(ConfigurationError, match='no layer of the model has GatedDeltaNet where'):
    load(hybrid, make)
  # A second layer can follow the first, whose tensors are loaded as they are.
  _, found, lines = load(hybrid, decoder_of(DELTA, DELTA, FULL))
  first = 'layers.0.gated_delta_net.step'
  np.testing.assert_array_equal(found[first], tensors[first])
  assert any('from the attention' in line and 'layers.1.' in line for line in lines)


def test_a_source_without_bindings_is_told_by_its_shapes(tmp_path):
  folder, _ = write(tmp_path / 'hf')
  found = open_source(str(folder)).tensors
  ours = {name: np.ascontiguousarray(tensor.whole()) for name, tensor in found.items()}
  save_file(ours, tmp_path / 'own.safetensors')
  _, found, _ = load(tmp_path / 'own.safetensors', decoder_of(DELTA, DELTA, FULL))
  np.testing.assert_array_equal(
    found['layers.0.gated_delta_net.query'], ours['layers.0.attention.query']
  )
  message = r'Expected heads x key_width = 24 as the queries of the source, whose keys have 12'
  with pytest.raises(ConfigurationError, match=message):
    load(tmp_path / 'own.safetensors', decoder_of(functools.partial(DELTA, heads=2), FULL, FULL))


RUN = """
train.initial_weights = '{folder}'
InitialWeights.primed = True
InitialWeights.any_loss = True
LanguageModel.d_model = 24
LanguageModel.layers = 3
LanguageModel.unroll = 1
LanguageModel.tied = False
LanguageModel.embedding_scale = 1.0
LanguageModel.pattern = (@delta/Block, @delta/Block, @full/Block)
Block.mlp_width = 40
delta/Block.mixers = (@GatedDeltaNet,)
full/Block.mixers = (@FullAttention,)
GatedDeltaNet.heads = {heads}
GatedDeltaNet.key_width = 6
GatedDeltaNet.value_width = 6
FullAttention.heads = 4
FullAttention.kv_heads = 2
FullAttention.head_width = 6
FullAttention.max_context = 64
Rotary.base = 500.0
RMSNorm.epsilon = 1e-5
"""


def test_a_run_that_begins_from_a_folder_trains(tmp_path):
  folder, _ = write(tmp_path / 'hf', {**CONFIG, 'vocab_size': 259})
  with pytest.raises(ConfigurationError, match=r'layers.0 of the model has GatedDeltaNet'):
    # The task does not exist: whatever reads a text ends with another message.
    tiny_run.train(
      tmp_path / 'wrong', tmp_path / 'nothing', data=RUN.format(folder=folder, heads=2)
    )
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'ab')
  run = tiny_run.train(tmp_path / 'run', tmp_path / 'data', data=RUN.format(folder=folder, heads=4))
  log = (run / 'log.txt').read_text()
  assert 'new, initialized: layers.0-1.gated_delta_net.' in log
  assert tiny_run.metrics(run)[2]['loss'] > 0
