"""Exported models: read back with the same logits, and computed by other programs."""

import functools
import json
import os

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import llama_reference
import numpy as np
import pytest
from safetensors.numpy import load_file
import tiny_run

import valkyrie
from valkyrie import main
from valkyrie.data import vocabularies
from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.rotary import Rotary
from valkyrie.models.block import Block
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.layers import SquaredReLUMLP
from valkyrie.weights import huggingface

LLAMA = """
LanguageModel.pattern = (@Block,)
FullAttention.heads = 4
FullAttention.kv_heads = 2
FullAttention.head_width = 8
FullAttention.max_context = 128
"""
MISTRAL = ('--gin.LongformerAttention.registers=0', '--gin.LongformerAttention.window=6')
LORA = """
LanguageModel.lora = @Lora
Lora.rank = 2
Lora.pattern = 'mlp'
"""


@pytest.fixture
def run(tmp_path, capsys):
  """Trains two steps -> a function that runs a mode on it: (code, errors)."""
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'abc')

  def start(*flags):
    gin.clear_config(clear_constants=True)
    capsys.readouterr()
    code = main.main([f'--model_dir={tmp_path / "run"}', *flags])
    return code, capsys.readouterr().err

  def train(*flags, **options):
    (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data', **options))
    code, said = start(f'--gin_file={tmp_path / "run.gin"}', '--gin.learning_rate=0.1', *flags)
    assert code == 0, said
    return start

  return train


@pytest.mark.parametrize(('mixers', 'more'), [(tiny_run.BOTH, ''), ('(@S5,)', LORA)])
def test_an_export_is_read_back_bit_for_bit(run, tmp_path, mixers, more):
  start = run(mixers=mixers, more=more)
  code, said = start('--run_mode=export', f'--output={tmp_path / "out"}')
  assert code == 0, said
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  assert config['format'] == 'valkyrie' and config['steps'] == [2] and config['eos_id'] == 1
  assert config['version'] == valkyrie.__version__
  assert config['parameters'] == sum(array.size for array in arrays.values())
  assert config['model']['LanguageModel.d_model'] == 16
  assert not any(name.startswith(('TaskFeed', 'train.', 'optax')) for name in config['model'])
  assert arrays['embedding'].shape == (259, 16) and not any('lora' in name for name in arrays)
  assert f'{config["parameters"]:,} parameters' in (tmp_path / 'out' / 'README.md').read_text()

  plain = '\nLanguageModel.lora = None\n' if more else ''
  (tmp_path / 'back.gin').write_text(
    tiny_run.gin_text(tmp_path / 'data', mixers=mixers, more=plain)
  )
  back = [f'--gin.train.initial_weights="{tmp_path / "out"}"', '--gin.train_steps=0']
  back.append('--gin.InitialWeights.any_loss=True')
  gin.clear_config(clear_constants=True)
  arguments = [f'--gin_file={tmp_path / "back.gin"}', f'--model_dir={tmp_path / "back"}']
  assert main.main([*arguments, *back]) == 0
  first, second = (
    valkyrie.load(tmp_path / name).score('abcab')[0].log_probs for name in ('run', 'back')
  )
  if more:  # adapters are merged in float32
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-5)
  else:
    np.testing.assert_array_equal(first, second)

  code, said = start('--run_mode=export', f'--output={tmp_path / "out"}')
  assert code == 74 and f'{tmp_path / "out"} is there already' in said


@pytest.mark.parametrize(
  'more',
  [
    'LanguageModel.embedding_scale = 1.0',
    'LanguageModel.tied = False\nRotary.factor = 4.0\nRotary.original_context = 32',
    "LanguageModel.compute_dtype = 'bfloat16'\nLanguageModel.parameter_dtype = 'bfloat16'",
    LORA,
    MISTRAL,
    'FullAttention.query_key_norm = True',
  ],
)
def test_a_decoder_is_a_llama(run, tmp_path, more):
  """Computed from the equations of Llama in float64."""
  if more == MISTRAL:
    start = run(*more, mixers='(@LongformerAttention,)')
  else:
    start = run(mixers='(@FullAttention,)', more=LLAMA + more)
  flags = ('--run_mode=export', '--gin.export.form="huggingface"')
  code, said = start(*flags, f'--output={tmp_path / "out"}')
  assert code == 0, said
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  arrays = load_file(tmp_path / 'out' / 'model.safetensors')
  kind = 'Mistral' if more == MISTRAL else 'Qwen3' if 'norm' in more else 'Llama'
  assert config['architectures'] == [f'{kind}ForCausalLM'] and config['vocab_size'] == 259
  assert config['pad_token_id'] is None and config['eos_token_id'] == 1
  tied = more == 'LanguageModel.embedding_scale = 1.0'
  assert config['tie_word_embeddings'] == tied == ('lm_head.weight' not in arrays)
  loaded = valkyrie.load(tmp_path / 'run')
  tokens = loaded.tokenizer.ids('abcabcaacb' * 4)
  expected = llama_reference.logits(config, arrays, tokens)
  features, _ = jax.jit(loaded.model.apply)(
    loaded.params,
    loaded.model.initial_carry(1),
    tokens[None],
    np.arange(len(tokens))[None],
    np.ones((1, len(tokens)), np.int32),
  )
  found = jnp.matmul(features.hidden[0], features.unembedding[:259].T, precision='highest')
  if more == MISTRAL:
    flags = (*flags, '--gin.export.dtype="bfloat16"', f'--output={tmp_path / "small"}')
    assert start(*flags)[0] == 0
    small = load_file(tmp_path / 'small' / 'model.safetensors')
    for name, array in arrays.items():
      np.testing.assert_array_equal(small[name], array.astype(jnp.bfloat16), strict=True)
    config = json.loads((tmp_path / 'small' / 'config.json').read_text())
    assert config['torch_dtype'] == 'bfloat16'
  if 'bfloat16' in more:  # sums of 2^-9
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert arrays['model.layers.0.mlp.up_proj.weight'].dtype == 'bfloat16' and error < 2**-6
    return
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_hybrid_is_no_llama(trained, tmp_path, capsys):
  def export(*flags):
    gin.clear_config(clear_constants=True)
    code = main.main([f'--model_dir={trained[1]}', '--run_mode=export', *flags])
    return code, capsys.readouterr().err

  output = f'--output={tmp_path / "out"}'
  code, said = export(output, '--gin.export.form="huggingface"')
  assert code == 78 and 'llama, mistral, qwen3: a layer has another mixer' in said
  code, said = export(output, '--gin.export.dtype="bfloat16"')
  assert code == 78 and "is for export.form='huggingface'" in said
  code, said = export(output, '--gin.export.form="onnx"')
  assert code == 78 and "export.form='onnx' is unknown" in said
  assert export()[0] == 2
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
  ('block', 'attention', 'message'),
  [
    ({'mlp': SquaredReLUMLP}, {}, 'MLPs of different widths or without a gate by silu'),
    ({'mlp': None}, {}, 'no MLP, or norms after its parts'),
    ({'norm': 'after'}, {}, 'no MLP, or norms after its parts'),
    ({}, {'output_gate': True}, 'an output gate, or channels that do not turn'),
    ({}, {'query_key_norm': 'whole'}, 'a norm over all heads'),
    ({}, {'rotary': functools.partial(Rotary, share=0.5)}, 'channels that do not turn'),
  ],
)
def test_parts_that_no_llama_has_are_no_llama_s(block, attention, message):
  mixer = functools.partial(FullAttention, heads=2, head_width=8, max_context=8, **attention)
  pattern = (functools.partial(Block, (mixer,), 24, **block),)
  make = functools.partial(LanguageModel, vocabulary_size=50, d_model=16, layers=2, pattern=pattern)
  with pytest.raises(ConfigurationError, match=f'llama, mistral, qwen3: .*{message}'):
    huggingface.export_of(make)


class Own(hk.Module):
  """A mixer without fields, as a user may write it."""

  causal = True
  dropout = 0.0

  def initial_carry(self, batch_size, dtype):
    return ()

  def forward_flops(self, width):
    return width


def test_a_mixer_from_elsewhere_is_of_no_class():
  pattern = (functools.partial(Block, (Own,), 24),)
  make = functools.partial(LanguageModel, vocabulary_size=50, d_model=16, layers=2, pattern=pattern)
  with pytest.raises(ConfigurationError, match='llama, mistral, qwen3: a layer has another mixer'):
    huggingface.export_of(make)


def test_a_tokenizer_goes_with_the_model(run, tmp_path):
  tiny_run.write_tokenizer(tmp_path / 'mine.json')
  beside = {'eos_token': '<|endoftext|>', 'add_bos_token': True, 'bos_token': '!'}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(beside))
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [5, 7]}')
  os.mkfifo(tmp_path / 'special_tokens_map.json')
  folder = tmp_path / 'text'
  folder.mkdir()
  for number in range(40):
    (folder / f'{number}.txt').write_text(f'{number} {tiny_run.TEXT}')
  data = f"""
include 'gin/data/text.gin'
text = '{folder}'
held_out = 0.5
vocabulary = '{tmp_path / 'mine.json'}'
TaskFeed.data_dir = '{tmp_path / 'stores'}'
"""
  (tmp_path / 'data.gin').write_text(data)
  start = run(f'--gin_file={tmp_path / "data.gin"}')
  code, said = start('--run_mode=export', f'--output={tmp_path / "out"}')
  assert code == 0, said
  assert (tmp_path / 'out' / 'tokenizer.json').read_bytes() == (tmp_path / 'mine.json').read_bytes()
  assert (tmp_path / 'out' / 'tokenizer_config.json').exists()
  kept = (tmp_path / 'out' / 'generation_config.json').read_text()
  assert kept == '{"eos_token_id": [5, 7]}'
  assert not (tmp_path / 'out' / 'special_tokens_map.json').exists()
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['bos'] == [0]

  # The run has kept it, too, and moves with it.
  fingerprint = vocabularies.load(str(tmp_path / 'mine.json')).fingerprint
  (tmp_path / 'mine.json').unlink()
  moved = (tmp_path / 'run').rename(tmp_path / 'moved')
  loaded = valkyrie.load(moved)
  assert loaded.tokenizer.fingerprint == fingerprint and loaded.tokenizer.bos == (0,)
  (moved / 'tokenizer_config.json').write_text(json.dumps(beside | {'add_bos_token': False}))
  with pytest.raises(ConfigurationError, match='"add_bos_token" in the tokenizer_config'):
    valkyrie.load(moved)
