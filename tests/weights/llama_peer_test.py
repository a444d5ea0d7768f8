"""A Llama and a Qwen3 of Hugging Face's transformers against ours, with its own files. Needs torch.

pip install -e '.[learn]'
"""

import jax
import jax.numpy as jnp
import llama_reference
import numpy as np
import pytest
import tiny

from valkyrie.config.load import load_gin
from valkyrie.main import CONFIGURABLE_MODULES
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.training.losses import logits
from valkyrie.weights import huggingface
from valkyrie.weights.initial import InitialWeights

REASON = "only pip install '.[learn]' installs torch and transformers"


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('kind', ['Llama', 'scaled Llama', 'Qwen3'])
@pytest.mark.parametrize('files', ['one', 'sharded in bfloat16'])
def test_logits_are_those_of_transformers(tmp_path, tied, kind, files):
  torch = pytest.importorskip('torch', reason=REASON)
  transformers = pytest.importorskip('transformers', reason=REASON)
  torch.manual_seed(0)
  options = llama_reference.config(tie_word_embeddings=tied, model_type=kind.split()[-1].lower())
  if kind == 'scaled Llama':
    options |= {'rope_scaling': {**llama_reference.SCALED, 'rope_theta': 500.0}}
  config = transformers.AutoConfig.for_model(**options)
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  for name, scale in model.named_parameters():
    if 'norm' in name:
      torch.nn.init.uniform_(scale, 0.5, 1.5)
  if files != 'one':
    model = model.to(torch.bfloat16)
  size = '5GB' if files == 'one' else '20KB'
  model.save_pretrained(tmp_path / 'hf', max_shard_size=size)
  if files != 'one':
    assert len(list((tmp_path / 'hf').glob('*.safetensors'))) > 1
  # Read again: the frequencies of positions were rounded, too, and no file has them.
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf', dtype=torch.float32)

  config = huggingface.configuration(tmp_path / 'hf')
  (tmp_path / 'model.gin').write_text(huggingface.gin_text(config))
  load_gin([str(tmp_path / 'model.gin')], [], modules=CONFIGURABLE_MODULES)
  ours = language_model.transform(LanguageModel)
  params, complete = InitialWeights(str(tmp_path / 'hf')).load(
    ours, LanguageModel, tiny.init(ours, 1)[0], 'bytes', lambda line: None
  )
  assert complete
  tokens = np.random.default_rng(0).integers(0, 50, (1, 60))
  with torch.no_grad():
    expected = model(torch.tensor(tokens)).logits[0].numpy()
  row = jnp.asarray(tokens, jnp.int32)
  features, _ = jax.jit(ours.apply)(
    params, ours.initial_carry(1), row, jnp.arange(60)[None], jnp.ones_like(row)
  )
  np.testing.assert_allclose(logits(features, 50)[0, :, :50], expected, atol=1e-5, rtol=1e-5)
