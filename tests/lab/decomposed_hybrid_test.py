"""A hybrid that another program has written is decomposed as a model of a run is."""

import functools

from hybrid_classes_reference import Qwen35
import hybrid_folders
import numpy as np
import tiny_run

import valkyrie
from valkyrie.weights import huggingface

LAYERS = ['linear_attention', 'full_attention']
KEY, VALUE = 'layers.0.gated_delta_net.key', 'layers.1.attention.value'
MORE = """
StepSettings.objective = @Decomposition
Decomposition.seed = 0
Decomposition.train_steps = 1
LanguageModel.sites = @Sites
Sites.components = (('delta_net/key', 5), ('attention/value', 3))
ComponentScores.attacked_tokens = 0
ComponentScores.threshold = 0.0
InitialWeights.any_loss = True
"""


def test_an_imported_hybrid_is_decomposed_shown_and_traced(tmp_path, capsys):
  config = Qwen35.config(vocab_size=264, num_hidden_layers=2, layer_types=LAYERS)
  tensors = Qwen35.tensors(config)
  folder = hybrid_folders.write(tmp_path / 'qwen', config, tensors)
  model = tmp_path / 'qwen.gin'
  model.write_text(huggingface.gin_text(huggingface.configuration(folder)))
  tiny_run.write_stores(tmp_path / 'data', 'letters', 'abc')
  more = f"{MORE}train.initial_weights = '{folder}'\n"
  (tmp_path / 'run.gin').write_text(tiny_run.gin_text(tmp_path / 'data', more=more))
  run = tmp_path / 'run'

  start = functools.partial(tiny_run.output_of, capsys, run)
  start(f'--gin_file={tmp_path / "run.gin"}', f'--gin_file={model}', '--gin.train_steps=1')
  said = start('--run_mode=components', '--gin.components.labeled=1')
  assert 'asks for labels of' in said and (run / 'components_1' / 'index.html').exists()

  parts = valkyrie.decomposition(run, bindings=['open_run.chunk_size=16'])
  assert parts.sizes == {KEY: 5, VALUE: 3}
  name = 'model.layers.1.self_attn.v_proj.weight'
  np.testing.assert_allclose(parts.factors(VALUE).w, tensors[name].T, rtol=1e-6)
  text = 'abcba' * 8  # three chunks
  found = parts.compare(text, parts.ablated({VALUE: [0, 1, 2]}))
  first, second = found.hidden_errors['mixers']
  assert first < 1e-9 < second
  writes = parts.writers(text, VALUE, 1, distance=20).strongest
  assert {write.site for write in writes} == {KEY}
  assert all(write.token <= len(text) - 21 and write.effect for write in writes)
