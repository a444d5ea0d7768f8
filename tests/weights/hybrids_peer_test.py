"""The references of hybrids against Hugging Face's transformers. Needs torch.

pip install -e '.[learn]'
"""

import json

from hybrid_classes_reference import Mamba2, NemotronH, OlmoHybrid, Qwen35
import numpy as np
import pytest
from safetensors.numpy import save_file

REASON = "only pip install '.[learn]' installs torch and transformers"
TOKENS = np.random.default_rng(3).integers(0, 50, 24)


@pytest.mark.parametrize('reference', [Qwen35, OlmoHybrid, Mamba2, NemotronH])
def test_logits_are_those_of_transformers(tmp_path, reference):
  torch = pytest.importorskip('torch', reason=REASON)
  transformers = pytest.importorskip('transformers', reason=REASON)
  config = reference.config(pad_token_id=None)  # as an export says it
  weights = reference.tensors(config)
  (tmp_path / 'config.json').write_text(json.dumps(config))
  save_file(weights, tmp_path / 'model.safetensors')
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, dtype=torch.float64, output_loading_info=True
  )
  assert not report['missing_keys'] and not report['unexpected_keys']
  for module in model.modules():
    if hasattr(module, 'time_step_limit'):
      # Whole sequences have the clamp of `time_step_min` otherwise, and single tokens do not.
      module.time_step_limit = (0.0, float('inf'))
  with torch.no_grad():
    found = model.eval()(torch.tensor(TOKENS)[None]).logits[0].numpy()
  expected = reference.logits(config, weights, TOKENS)
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
