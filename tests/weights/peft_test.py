"""Adapters in the format of PEFT, added to the folder that the run began with."""

import functools
import json

import gin
from hybrid_folders import MODELS, model_of, write
import jax
import llama_reference
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import tiny
import tiny_run

from valkyrie import main
from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.weights import huggingface, named_tensors, peft, tensor_writer
from valkyrie.weights.initial import InitialWeights

REASON = "only pip install '.[learn]' peft installs torch, transformers and peft"
LORA = """
LanguageModel.lora = @Lora
Lora.rank = 2
Lora.pattern = %r
"""


def adapted(tmp_path, name, pattern):
  """(configuration, tensors) of a class with random adapters."""
  reference, config = MODELS[name]
  folder = write(tmp_path / 'hf', config, reference.tensors(config))
  model_of(folder, tmp_path)
  with gin.unlock_config():
    gin.parse_config(LORA % pattern)
  params = tiny.init(language_model.transform(LanguageModel), 1)[0]
  random = np.random.default_rng(5)
  params = jax.tree.map(
    lambda leaf: (random.normal(size=leaf.shape) / 4).astype(np.float32), params
  )
  config, _ = huggingface.export_of(LanguageModel)
  return config, named_tensors.of_params(params)


@pytest.mark.parametrize(
  ('name', 'pattern'),
  [
    ('qwen', r'(attention|delta_net)/(query|value|out)$'),
    ('delta hybrid', r'(attention|delta_net)/(key|gate)$'),
    ('olmo', r'mlp/(gate|out)$'),
    ('mamba', 'xbc$'),
    ('nemotron', r'attention/(query|out)$'),
  ],
)
def test_an_adapter_there_adds_what_ours_adds(tmp_path, name, pattern):
  config, tensors = adapted(tmp_path, name, pattern)
  found = {key: tensor.whole() for key, tensor in peft.adapters(config, tensors).items()}
  plain = {key: one for key, one in tensors.items() if not named_tensors.is_adapter(key)}
  before = huggingface.written(config, plain)
  after = huggingface.written(config, named_tensors.merged(tensors))
  changed = 0
  for key, tensor in after.items():
    expected = tensor.whole() - before[key].whole()
    module = 'base_model.model.' + key.removesuffix('.weight')
    if name == 'nemotron':  # transformers has another name for its decoder than folders have
      module = module.replace('backbone', 'model')
    if f'{module}.lora_A.weight' not in found:
      assert not expected.any()
      continue
    changed += 1
    product = found[f'{module}.lora_B.weight'] @ found[f'{module}.lora_A.weight']
    np.testing.assert_allclose(product, expected, atol=1e-4)
  assert len(found) == 2 * changed > 0
  written = peft.configuration(peft.adapters(config, tensors), 'there')
  assert len(written['target_modules']) == changed and written['r'] == written['lora_alpha'] == 2
  if name == 'qwen':  # queries and values are rows of one tensor there
    assert {4} == {*written['rank_pattern'].values()} == {*written['alpha_pattern'].values()}


@pytest.mark.parametrize(
  ('name', 'pattern'),
  [('qwen', r'(query|out)$'), ('olmo', r'(value|gate)$'), ('mamba', 'xbc$'), ('nemotron', 'key$')],
)
def test_logits_in_peft_are_those_of_the_merged_model(tmp_path, name, pattern):
  torch = pytest.importorskip('torch', reason=REASON)
  there = pytest.importorskip('peft', reason=REASON)
  transformers = pytest.importorskip('transformers', reason=REASON)
  config, tensors = adapted(tmp_path, name, pattern)
  config |= {'vocab_size': 128, 'bos_token_id': None, 'eos_token_id': 1, 'pad_token_id': None}
  plain = {key: one for key, one in tensors.items() if not named_tensors.is_adapter(key)}
  for folder, content in (('base', plain), ('merged', named_tensors.merged(tensors))):
    written = {}
    for key, tensor in huggingface.written(config, content).items():
      written[key] = np.ascontiguousarray(tensor.whole())
    write(tmp_path / folder, config, written)
  (tmp_path / 'adapter').mkdir()
  adapters = peft.adapters(config, tensors)
  tensor_writer.write_folder(tmp_path / 'adapter', adapters, 'adapter_model')
  text = json.dumps(peft.configuration(adapters, str(tmp_path / 'base')))
  (tmp_path / 'adapter' / 'adapter_config.json').write_text(text)

  def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / folder, dtype=torch.float64
    ).eval()

  def logits(model):
    with torch.no_grad():
      return model(torch.arange(2, 26)[None]).logits.numpy()

  before = logits(opened('base'))
  expected = logits(opened('merged'))
  found = logits(there.PeftModel.from_pretrained(opened('base'), tmp_path / 'adapter'))
  assert np.abs(before - expected).max() > 0.01
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_a_gemma_with_images_has_its_layers_below_its_language_model():
  """As transformers opens the folder; the folder of a qwen3_5 opens without its images."""
  tensor = 'model.layers.0.self_attn.q_proj.weight'
  found = peft._module({'model_type': 'gemma3'}, tensor)
  assert found == 'model.language_model.layers.0.self_attn.q_proj'
  assert peft._module({'model_type': 'qwen3_5'}, tensor) == tensor.removesuffix('.weight')


def model_with_adapters(folder, tmp_path, pattern):
  gin.clear_config()
  model_of(folder, tmp_path)
  with gin.unlock_config():
    gin.parse_config(LORA % pattern)
  return language_model.transform(LanguageModel)


def test_adapters_may_be_new_and_those_that_the_model_lacks_are_added(tmp_path):
  reference, config = MODELS['qwen']
  folder = write(tmp_path / 'hf', config, reference.tensors(config))
  model = model_with_adapters(folder, tmp_path, r'attention/(query|value)$')
  first = tiny.init(model, 1)[0]
  params, complete = InitialWeights(str(folder)).load(
    model, LanguageModel, first, 'bytes', lambda line: None
  )
  assert complete
  random = np.random.default_rng(3)
  params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), params)
  tensors = named_tensors.of_params(params)
  arrays = {name: tensor.whole() for name, tensor in tensors.items()}
  save_file(arrays, tmp_path / 'run.safetensors')

  narrower = model_with_adapters(folder, tmp_path, r'attention/query$')
  fresh = tiny.init(narrower, 1)[0]
  source = InitialWeights(str(tmp_path / 'run.safetensors'))
  after, complete = source.load(narrower, LanguageModel, fresh, 'bytes', lambda line: None)
  assert complete
  expected = named_tensors.merged(tensors)
  found = named_tensors.of_params(after)
  assert sum(map(named_tensors.is_adapter, found)) > 0
  for name, tensor in named_tensors.merged(found).items():
    np.testing.assert_allclose(tensor.whole(), expected[name].whole(), rtol=1e-5, atol=1e-5)


def test_a_module_that_peft_refuses_is_named(tmp_path):
  config, tensors = adapted(tmp_path, 'mamba', r'out$')
  with pytest.raises(
    ConfigurationError, match=r'PEFT has no adapter for layers.0-.*out in a mamba2'
  ):
    peft.adapters(config, tensors)


def test_a_model_that_is_not_the_base_with_adapters_is_refused(tmp_path):
  _, tensors = adapted(tmp_path, 'qwen', r'query$')
  base = peft.open_base(str(tmp_path / 'hf'))
  with pytest.raises(ConfigurationError, match=r'RMSNorm\.epsilon = 0\.1'):
    peft.check_base(base._replace(config={**base.config, 'rms_norm_eps': 0.1}), LanguageModel, {})
  with pytest.raises(ConfigurationError, match=r'tensors are not what .*hf has.* layers\.0'):
    peft.check_base(base, LanguageModel, tensors)


@pytest.mark.parametrize('weights', [None, 'run', 'model.safetensors'])
def test_a_run_that_began_with_no_folder_there_is_refused(tmp_path, weights):
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  save_file({'x': np.zeros(1)}, tmp_path / 'model.safetensors')
  path = weights and str(tmp_path / weights)
  with pytest.raises(ConfigurationError, match='began with a folder of Hugging Face'):
    peft.open_base(path)


def test_a_run_leaves_its_adapters_in_a_folder(tmp_path, capsys):
  config = llama_reference.config(vocab_size=259)
  (tmp_path / 'hf').mkdir()
  (tmp_path / 'hf' / 'config.json').write_text(json.dumps(config))
  weights = llama_reference.tensors(config)
  save_file(weights, tmp_path / 'hf' / 'model.safetensors')
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'abc')
  text = huggingface.gin_text(huggingface.configuration(tmp_path / 'hf'))
  (tmp_path / 'llama.gin').write_text(text)
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data'))
  start = functools.partial(run_mode, tmp_path, capsys)
  code, said = start(
    *(f'--gin_file={tmp_path / file}' for file in ('run.gin', 'llama.gin')),
    '--gin_file=gin/optimizers/lora.gin',
    f'--gin.train.initial_weights="{tmp_path / "hf"}"',
    '--gin.InitialWeights.any_loss=True',
    '--gin.Lora.rank=2',
  )
  assert code == 0, said
  export = ('--run_mode=export', '--gin.export.form="peft"', f'--output={tmp_path / "out"}')
  code, said = start(*export)
  assert code == 0, said
  written = json.loads((tmp_path / 'out' / 'adapter_config.json').read_text())
  assert written['base_model_name_or_path'] == str(tmp_path / 'hf') and not written['rank_pattern']
  arrays = load_file(tmp_path / 'out' / 'adapter_model.safetensors')
  assert len(arrays) == 2 * len(written['target_modules']) == 8 * config['num_hidden_layers']
  for module in written['target_modules']:
    assert f'{module}.weight' in weights

  changed = dict(weights)
  changed['model.norm.weight'] = 2 * changed['model.norm.weight']
  save_file(changed, tmp_path / 'hf' / 'model.safetensors')
  code, said = start(*export[:2], f'--output={tmp_path / "other"}')
  assert code == 78 and 'would be another model: final_norm.scale.' in said
  assert not (tmp_path / 'other').exists()


def run_mode(tmp_path, capsys, *flags):
  gin.clear_config(clear_constants=True)
  capsys.readouterr()
  code = main.main([f'--model_dir={tmp_path / "run"}', *flags])
  return code, capsys.readouterr().err
