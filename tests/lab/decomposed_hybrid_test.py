"""A hybrid that another program has written is decomposed as a model of a run is."""

import functools

import gin
from hybrid_classes_reference import Qwen35
import hybrid_folders
import numpy as np
import tiny_run

import valkyrie
from valkyrie import main
from valkyrie.lab.decomposition import text_patterns
from valkyrie.weights import huggingface

LAYERS = ['linear_attention', 'full_attention']
ATTENTION = 'layers.1.attention'
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
  (tmp_path / 'own.txt').write_text('abcba' * 8)
  own = f'--gin.components.texts=("{tmp_path / "own.txt"}",)'
  labels = run / 'labels_1'
  labels.mkdir()
  (labels / 'labels.jsonl').write_text('{"id": 1}\n')
  gin.clear_config(clear_constants=True)
  flags = (f'--model_dir={run}', '--run_mode=components')
  assert main.main([*flags, '--gin.components.labeled=1']) == 65
  assert not (labels / 'prompts.jsonl').exists()  # it was refused before anything was harvested
  (labels / 'labels.jsonl').write_text('{"id": "a", "answer": "b"}\n')
  (labels / 'components.jsonl').write_text(
    '{"id": "a", "site": "s", "component": 0, "held_out": []}\n' * 2
  )
  gin.clear_config(clear_constants=True)
  capsys.readouterr()
  assert main.main(flags) == 65
  refused = "components.jsonl, line 2, cannot be used: line 1 has the id 'a', too"
  assert refused in capsys.readouterr().err
  said = start('--run_mode=components', '--gin.components.labeled=1', own)
  assert 'asks for labels of' in said and (run / 'components_1' / 'index.html').exists()
  assert f'"attention":["{ATTENTION}"]' in (run / 'components_1' / 'data' / 'index.js').read_text()
  assert (run / 'components_1' / 'data' / 'attention_0_0.js').exists()

  parts = valkyrie.decomposition(run, bindings=['open_run.chunk_size=16'])
  assert parts.sizes == {KEY: 5, VALUE: 3}
  name = 'model.layers.1.self_attn.v_proj.weight'
  np.testing.assert_allclose(parts.factors(VALUE).w, tensors[name].T, rtol=1e-6)
  text = 'abcba' * 8  # three chunks
  found = parts.compare(text, parts.ablated({VALUE: [0, 1, 2]}))
  first, second = found.hidden_errors['mixers']
  assert first < 1e-9 < second
  assert {*found.pattern_errors} == {ATTENTION}
  assert np.abs(found.pattern_errors[ATTENTION]).max() < 1e-6  # values move no pattern
  without_keys = parts.ablated({KEY: range(5)})
  errors = parts.compare(text, without_keys).pattern_errors[ATTENTION]
  patterns = parts.patterns(text, without_keys)
  assert {*patterns} == {ATTENTION}
  p, q = (np.asarray(weights, np.float64) for weights in patterns[ATTENTION])
  assert p.shape == (len(errors), len(text), 1 + len(text)) and not p[..., 0].any()
  np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-5)
  assert not np.triu(p[0, :, 1:], k=1).any()  # nothing after the query
  divergences = np.sum(p * np.log(np.where(p > 0, p / np.where(q > 0, q, 1), 1)), axis=-1)
  np.testing.assert_allclose(errors, divergences.mean(-1), rtol=1e-3, atol=1e-9)
  assert errors.max() > 1e-9
  assert text_patterns.has_patterns(parts.run.text_rows.reader, parts._params)
  some = parts.patterns(text, without_keys, queries=3)[ATTENTION]
  np.testing.assert_allclose(some.clean, p[:, -3:], atol=1e-5)
  writes = parts.writers(text, VALUE, 1, distance=20).strongest
  assert {write.site for write in writes} == {KEY}
  assert all(write.token <= len(text) - 21 and write.effect for write in writes)
