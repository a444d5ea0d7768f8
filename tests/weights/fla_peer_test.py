"""Models of flash-linear-attention, and exports in it, with its kernels in Triton's interpreter.

pip install -e '.[learn]' flash-linear-attention
TRITON_INTERPRET=1 bash scripts/test tests/weights/fla_peer_test.py
"""

import os

import gated_deltanet_reference
from hybrid_folders import exported, loaded, model_of, packed, read
import jax
import numpy as np
import pytest

INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
REASON = 'flash-linear-attention is in no extra'
TOKENS = np.random.default_rng(3).integers(0, 50, 60)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason='needs TRITON_INTERPRET=1')


@pytest.fixture
def fla(monkeypatch):
  """The package, whose kernels take their first configuration: timing them needs a GPU."""
  autotuner = pytest.importorskip('triton.runtime.autotuner', reason=REASON)

  def equally_fast(kernel, quantiles):
    return [0.0] * len(quantiles)

  monkeypatch.setattr(autotuner.Autotuner, 'do_bench', property(lambda tuner: equally_fast))
  return pytest.importorskip('fla', reason=REASON)


def test_an_export_is_opened(fla, tmp_path):
  torch = pytest.importorskip('torch', reason=REASON)
  reference = gated_deltanet_reference
  config = reference.config(attn=None, num_v_heads=None, num_hidden_layers=2)
  written, weights = exported(reference, config, tmp_path)
  model, report = fla.models.GatedDeltaNetForCausalLM.from_pretrained(
    written, dtype=torch.float32, output_loading_info=True
  )
  assert not any(report.values())
  with torch.no_grad():
    found = model.eval()(torch.tensor(TOKENS)[None]).logits[0].numpy()
  expected = reference.logits(config, weights, TOKENS)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)  # all of it is float32


def test_a_mamba2_is_read(fla, tmp_path):
  torch = pytest.importorskip('torch', reason=REASON)
  torch.manual_seed(0)
  # Its form without a GPU gives the heads of more groups than one the B and C of other groups.
  sizes = {'num_heads': 8, 'head_dim': 8, 'state_size': 16, 'n_groups': 1}
  config = fla.models.Mamba2Config(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, norm_eps=1e-3, **sizes
  )
  model = fla.models.Mamba2ForCausalLM(config).float().eval()
  for parameter in model.parameters():
    parameter.data += 0.1 * torch.randn_like(parameter)
  model.save_pretrained(tmp_path / 'hf')
  with torch.no_grad():
    expected = model(torch.tensor(TOKENS)[None]).logits[0].numpy()
  with jax.enable_x64(True):
    ours = model_of(tmp_path / 'hf', tmp_path)
    params, _ = loaded(tmp_path / 'hf', ours)
    found = read(ours, params, packed([TOKENS]), chunk=7)[: len(TOKENS)]
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)  # theirs is float32
