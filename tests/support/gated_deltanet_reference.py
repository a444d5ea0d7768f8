"""`gated_deltanet` of flash-linear-attention in float64, from its equations."""

import hybrid_reference as parts
import numpy as np

_NAMES = {
  **{name: f'{name}_proj.weight' for name in 'qkvgabo'},
  **{f'{name}_conv': f'{name}_conv1d.weight' for name in 'qkv'},
  **{'A_log': 'A_log', 'dt_bias': 'dt_bias', 'norm': 'o_norm.weight'},
}


def config(**changes):
  """Layer 1 of four has attention with a window, and layer 3 full attention."""
  attention = {'num_heads': 4, 'num_kv_heads': 2, 'qkv_bias': False}
  return {
    'model_type': 'gated_deltanet', 'vocab_size': 50, 'hidden_size': 24, 'num_hidden_layers': 4,
    'num_heads': 3, 'num_v_heads': 6, 'head_dim': 5, 'expand_v': 1.5, 'conv_size': 3,
    'intermediate_size': 40, 'hidden_ratio': 4, 'norm_eps': 1e-3, 'allow_neg_eigval': True,
    'use_gate': True, 'use_short_conv': True, 'hidden_act': 'swish', 'attn_mode': 'chunk',
    'fuse_norm': True, 'tie_word_embeddings': False, 'max_position_embeddings': 64,
    'attn': [
      {**attention, 'layers': [1], 'window_size': 5, 'rope_theta': 100.0},
      {**attention, 'layers': [3], 'window_size': None, 'rope_theta': 500.0},
    ],
    **changes,
  }  # fmt: skip


def sizes(of):
  return {
    'heads': of['num_heads'],
    'value_heads': of['num_v_heads'] or of['num_heads'],
    'key': of['head_dim'],
    'value': int(of['head_dim'] * of['expand_v']),
  }


def attention_of(of):
  """{layer: its object}."""
  objects = of['attn'] or []
  objects = objects if isinstance(objects, list) else [objects]
  return {layer: one for one in objects for layer in one['layers']}


def tensors(of, seed=0):
  draws, width, mlp = parts.Draws(seed), of['hidden_size'], of['intermediate_size']
  found = {
    'model.embeddings.weight': draws.matrix(of['vocab_size'], width),
    'model.norm.weight': draws.scale(width),
  }
  if not of['tie_word_embeddings']:
    found['lm_head.weight'] = draws.matrix(of['vocab_size'], width)
  for layer in range(of['num_hidden_layers']):
    one = attention_of(of).get(layer)
    if one is None:
      delta = parts.delta_tensors(draws, width, **sizes(of), taps=of['conv_size'])
      mixer = {_NAMES[name]: value for name, value in delta.items()}
    else:
      kv = width // one['num_heads'] * one['num_kv_heads']
      shapes = {'q': (width, width), 'k': (kv, width), 'v': (kv, width), 'o': (width, width)}
      mixer = {f'{name}_proj.weight': draws.matrix(*shape) for name, shape in shapes.items()}
    own = {
      'attn_norm.weight': draws.scale(width),
      'mlp_norm.weight': draws.scale(width),
      'mlp.gate_proj.weight': draws.matrix(mlp, width),
      'mlp.up_proj.weight': draws.matrix(mlp, width),
      'mlp.down_proj.weight': draws.matrix(width, mlp),
      **{f'attn.{name}': value for name, value in mixer.items()},
    }
    found |= {f'model.layers.{layer}.{name}': value for name, value in own.items()}
  return found


def logits(of, weights, tokens):
  """[T, vocabulary] of one document."""
  weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
  epsilon, time = of['norm_eps'], len(tokens)
  x = weights['model.embeddings.weight'][tokens]
  for layer in range(of['num_hidden_layers']):
    prefix = f'model.layers.{layer}.'
    w = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
    h = parts.rms(x, epsilon) * w['attn_norm.weight']
    one = attention_of(of).get(layer)
    if one is None:
      own = {name: w[f'attn.{theirs}'] for name, theirs in _NAMES.items()}
      own['conv'] = np.concatenate([own[f'{name}_conv'] for name in 'qkv'])
      double = of['allow_neg_eigval']
      x = x + parts.gated_delta(h, own, **sizes(of), epsilon=epsilon, double=double)
    else:
      width = of['hidden_size'] // one['num_heads']
      q, k, v = ((h @ w[f'attn.{name}_proj.weight'].T).reshape(time, -1, width) for name in 'qkv')
      q, k = (parts.rotate(part, one['rope_theta']) for part in (q, k))
      y = parts.attend(q, k, v, one['window_size'])
      x = x + y.reshape(time, -1) @ w['attn.o_proj.weight'].T
    h = parts.rms(x, epsilon) * w['mlp_norm.weight']
    gate, hidden = h @ w['mlp.gate_proj.weight'].T, h @ w['mlp.up_proj.weight'].T
    x = x + (parts.silu(gate) * hidden) @ w['mlp.down_proj.weight'].T
  head = weights.get('lm_head.weight', weights['model.embeddings.weight'])
  return parts.rms(x, epsilon) * weights['model.norm.weight'] @ head.T
