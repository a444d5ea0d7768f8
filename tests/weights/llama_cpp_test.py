"""Exported hybrids in llama.cpp, against the references.

pip install -e '.[learn]' llama-cpp-python gguf
git clone https://github.com/ggml-org/llama.cpp
LLAMA_CPP=llama.cpp bash scripts/test tests/weights/llama_cpp_test.py
"""

import os
import subprocess
import sys

from hybrid_classes_reference import Lfm2, Mamba2, NemotronH, Qwen35
from hybrid_folders import add_tokenizer, exported
import numpy as np
import pytest

SOURCES = os.environ.get('LLAMA_CPP')  # its converter is in no package
REASON = 'LLAMA_CPP names a folder with the sources of llama.cpp'
TOKENS = np.random.default_rng(3).integers(0, 50, 24)
DELTA = {'linear_num_key_heads': 2, 'linear_num_value_heads': 4, 'linear_key_head_dim': 16,
         'linear_value_head_dim': 16, 'hidden_size': 32}  # fmt: skip
ROTARY = {'rope_type': 'default', 'rope_theta': 100.0, 'partial_rotary_factor': 0.25}
TYPES = ['linear_attention', 'linear_attention', 'full_attention']
# What llama.cpp computes: values as wide as keys, 64 channels that turn, attention in every n-th
# layer, one epsilon for all norms; inner channels in multiples of 64; heads that share the width of
# the stream.
MODELS = {
  'qwen': (Qwen35, Qwen35.config(**DELTA, layer_types=TYPES, num_hidden_layers=3, head_dim=256,
                                 rms_norm_eps=1e-6, rope_parameters=ROTARY, vocab_size=272)),
  'mamba': (Mamba2, Mamba2.config(vocab_size=272)),
  'nemotron': (NemotronH, NemotronH.config(hidden_size=32, mamba_num_heads=8, mamba_head_dim=8,
                                           ssm_state_size=16, head_dim=8, vocab_size=272)),
  'lfm2': (Lfm2, Lfm2.config(hidden_size=32, head_dim=8, vocab_size=272)),
}  # fmt: skip
# The releases that it asks for know none of these classes, so that it reads config.json itself; and
# it converts published tokenizers only.
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + '/gguf-py']
from conversion.base import AutoConfig, TextModel
def refuse(*arguments, **options):
  raise ValueError('an unknown class')
AutoConfig.from_pretrained = refuse
TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0] + '/convert_hf_to_gguf.py', run_name='__main__')
"""


@pytest.mark.skipif(SOURCES is None, reason=REASON)
@pytest.mark.parametrize('name', MODELS)
def test_logits_are_those_of_llama_cpp(tmp_path, name):
  llama_cpp = pytest.importorskip('llama_cpp', reason='llama-cpp-python is in no extra')
  reference, config = MODELS[name]
  written, weights = exported(reference, config, tmp_path)
  add_tokenizer(written)
  file = tmp_path / 'model.gguf'
  options = ['--outtype', 'f32', '--outfile', file] + ['--no-mtp'] * (name == 'qwen')
  subprocess.run([sys.executable, '-c', CONVERT, SOURCES, written, *options], check=True)
  model = llama_cpp.Llama(
    str(file),
    n_ctx=64,
    logits_all=True,
    type_k=llama_cpp.GGML_TYPE_F32,
    type_v=llama_cpp.GGML_TYPE_F32,
    verbose=False,
  )
  expected = reference.logits(config, weights, TOKENS)
  for size in (len(TOKENS), 7, 1):
    model.reset()
    for start in range(0, len(TOKENS), size):
      model.eval(TOKENS[start : start + size].tolist())
    found = model.scores[: len(TOKENS), : expected.shape[1]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)  # all of it is float32
