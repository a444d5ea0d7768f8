"""Llama in float64 from its equations (Touvron et al. 2023), with the tensors of Hugging Face.

Mistral has a window, and Qwen3 a norm of its queries and keys (Yang et al. 2025). Rotary positions
as in Llama 3.1 where the configuration says so (rope_type 'llama3').
"""

import math

import numpy as np


def config(**changes):
  """The configuration of a model of a few thousand parameters, as config.json has it."""
  return {
    'model_type': 'llama',
    'hidden_size': 24,
    'intermediate_size': 40,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 6,
    'vocab_size': 50,
    'max_position_embeddings': 64,
    'rms_norm_eps': 1e-5,
    'rope_theta': 500.0,
    'tie_word_embeddings': False,
    **changes,
  }


SCALED = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}

# What `config` changes for a model of each class.
DECODERS = {
  'llama': {'rope_scaling': SCALED},
  'mistral': {'model_type': 'mistral', 'sliding_window': 8},
  'qwen3': {'model_type': 'qwen3'},
}


def tensors(of, seed=0, dtype=np.float32):
  """Random weights."""
  random = np.random.default_rng(seed)
  d, mlp, k = of['hidden_size'], of['intermediate_size'], of['head_dim']
  heads, kv = of['num_attention_heads'] * k, of['num_key_value_heads'] * k

  def matrix(outputs, inputs):
    return (random.normal(size=(outputs, inputs)) / math.sqrt(inputs)).astype(dtype)

  def scale(width=d):
    return random.uniform(0.5, 1.5, width).astype(dtype)

  found = {'model.embed_tokens.weight': matrix(of['vocab_size'], d), 'model.norm.weight': scale()}
  if not of['tie_word_embeddings']:
    found['lm_head.weight'] = matrix(of['vocab_size'], d)
  for layer in range(of['num_hidden_layers']):
    of_layer = {
      'input_layernorm': scale(),
      'post_attention_layernorm': scale(),
      'self_attn.q_proj': matrix(heads, d),
      'self_attn.k_proj': matrix(kv, d),
      'self_attn.v_proj': matrix(kv, d),
      'self_attn.o_proj': matrix(d, heads),
      'mlp.gate_proj': matrix(mlp, d),
      'mlp.up_proj': matrix(mlp, d),
      'mlp.down_proj': matrix(d, mlp),
    }
    if of['model_type'] == 'qwen3':
      of_layer |= {'self_attn.q_norm': scale(k), 'self_attn.k_norm': scale(k)}
    found |= {f'model.layers.{layer}.{name}.weight': value for name, value in of_layer.items()}
  return found


def _frequencies(of):
  width, scaling = of['head_dim'], of.get('rope_scaling')
  found = []
  for i in range(width // 2):
    frequency = of['rope_theta'] ** (-2 * i / width)
    if scaling:
      wavelength, context = 2 * math.pi / frequency, scaling['original_max_position_embeddings']
      low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
      if wavelength > context / low:
        frequency /= scaling['factor']
      elif wavelength > context / high:
        smooth = (context / wavelength - low) / (high - low)
        frequency = (1 - smooth) * frequency / scaling['factor'] + smooth * frequency
    found.append(frequency)
  return np.array(found)


def logits(of, weights, tokens):
  """[T, vocabulary] for tokens [T] of one document."""
  weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
  heads, kv, width = of['num_attention_heads'], of['num_key_value_heads'], of['head_dim']
  time = len(tokens)
  angle = np.arange(time)[:, None, None] * _frequencies(of)
  steps = np.arange(time)[:, None] - np.arange(time)[None]
  seen = (steps >= 0) & (steps < (of.get('sliding_window') or time))

  def norm(x, name):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + of['rms_norm_eps']) * weights[name]

  def rotate(x):
    a, b = np.split(x, 2, axis=-1)
    c, s = np.cos(angle), np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

  x = weights['model.embed_tokens.weight'][tokens]
  for layer in range(of['num_hidden_layers']):

    def read(x, name, layer=layer):
      return x @ weights[f'model.layers.{layer}.{name}.weight'].T

    h = norm(x, f'model.layers.{layer}.input_layernorm.weight')
    q = read(h, 'self_attn.q_proj').reshape(time, heads, width)
    k = read(h, 'self_attn.k_proj').reshape(time, kv, width)
    v = read(h, 'self_attn.v_proj').reshape(time, kv, width)
    if of['model_type'] == 'qwen3':
      q = norm(q, f'model.layers.{layer}.self_attn.q_norm.weight')
      k = norm(k, f'model.layers.{layer}.self_attn.k_norm.weight')
    q, k = rotate(q), rotate(k)
    k, v = (np.repeat(part, heads // kv, axis=1) for part in (k, v))
    scores = np.where(seen, np.einsum('qhk,nhk->hqn', q, k) / math.sqrt(width), -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    x = x + read(np.einsum('hqn,nhk->qhk', shares, v).reshape(time, -1), 'self_attn.o_proj')
    h = norm(x, f'model.layers.{layer}.post_attention_layernorm.weight')
    gate = read(h, 'mlp.gate_proj')
    x = x + read(gate / (1 + np.exp(-gate)) * read(h, 'mlp.up_proj'), 'mlp.down_proj')
  head = weights.get('lm_head.weight', weights['model.embed_tokens.weight'])
  return norm(x, 'model.norm.weight') @ head.T
