"""Exports in Hugging Face's transformers, against the references. Needs torch.

pip install -e '.[learn]'
"""

import json

from hybrid_folders import MODELS, exported
import llama_reference
from llama_reference import DECODERS
import numpy as np
import pytest

REASON = "only pip install '.[learn]' installs torch and transformers"
TOKENS = np.random.default_rng(3).integers(0, 50, 24)
# What an export takes from the run's tokenizer; transformers has others for some classes.
SPECIAL_TOKENS = {'bos_token_id': None, 'eos_token_id': 1, 'pad_token_id': None}
EXPORTS = {name: model for name, model in MODELS.items() if 'delta' not in name}
for kind, changes in DECODERS.items():
  EXPORTS[kind] = (llama_reference, llama_reference.config(**changes))


@pytest.mark.parametrize('name', EXPORTS)
def test_logits_are_those_of_transformers(tmp_path, name):
  torch = pytest.importorskip('torch', reason=REASON)
  transformers = pytest.importorskip('transformers', reason=REASON)
  reference, config = EXPORTS[name]
  written, weights = exported(reference, config, tmp_path, np.float64)
  file = written / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | SPECIAL_TOKENS))
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    written, dtype=torch.float64, output_loading_info=True
  )
  assert not report['missing_keys'] and not report['unexpected_keys']
  for module in model.modules():
    if hasattr(module, 'time_step_limit'):
      # Whole sequences have the clamp of `time_step_min` otherwise, and single tokens do not.
      module.time_step_limit = (0.0, float('inf'))
  with torch.no_grad():
    found = model.eval()(torch.tensor(TOKENS)[None]).logits[0].numpy()
  expected = reference.logits(config, weights, TOKENS)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)  # their norms are in float32
