"""Classes of transformers in float64: Qwen3.5, OLMo Hybrid, Mamba-2, Nemotron-H, LFM2 and Gemma 3.

Each has `config`, `tensors` and `logits`, from the equations of their layers.
"""

import hybrid_reference as parts
import numpy as np


def _wide(weights):
  return {name: np.asarray(value, np.float64) for name, value in weights.items()}


def _inside(weights, prefix):
  return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}


def _project(x, weight, width):
  return (x @ weight.T).reshape(len(x), -1, width)


def _gated_mlp(x, w):
  gate = parts.silu(x @ w['mlp.gate_proj.weight'].T)
  return (gate * (x @ w['mlp.up_proj.weight'].T)) @ w['mlp.down_proj.weight'].T


def _mlp_tensors(draws, width, inner):
  return {
    'mlp.gate_proj.weight': draws.matrix(inner, width),
    'mlp.up_proj.weight': draws.matrix(inner, width),
    'mlp.down_proj.weight': draws.matrix(width, inner),
  }


def _delta_sizes(of):
  return {
    'heads': of['linear_num_key_heads'],
    'value_heads': of['linear_num_value_heads'],
    'key': of['linear_key_head_dim'],
    'value': of['linear_value_head_dim'],
  }


_TYPES = ['linear_attention', 'full_attention', 'linear_attention', 'full_attention']
_SHARED = {
  'vocab_size': 50, 'hidden_size': 24, 'num_hidden_layers': 4, 'intermediate_size': 40,
  'num_attention_heads': 4, 'num_key_value_heads': 2, 'max_position_embeddings': 64,
  'rms_norm_eps': 1e-3, 'tie_word_embeddings': False, 'layer_types': _TYPES, 'hidden_act': 'silu',
  'attention_bias': False, 'linear_num_key_heads': 3, 'linear_num_value_heads': 6,
  'linear_key_head_dim': 5, 'linear_value_head_dim': 7, 'linear_conv_kernel_dim': 3,
}  # fmt: skip


class Qwen35:
  """`qwen3_5_text`: centred norms, an output gate, and a share of the channels turns."""

  @staticmethod
  def config(**changes):
    rotary = {'rope_type': 'default', 'rope_theta': 100.0, 'partial_rotary_factor': 0.5}
    return {
      'model_type': 'qwen3_5_text', **_SHARED, 'head_dim': 8, 'rope_parameters': rotary,
      'attn_output_gate': True, 'mamba_ssm_dtype': 'float32', **changes,
    }  # fmt: skip

  @staticmethod
  def tensors(of, seed=1):
    draws, width, head = parts.Draws(seed), of['hidden_size'], of['head_dim']
    heads, kv = of['num_attention_heads'], of['num_key_value_heads']
    found = {
      'model.embed_tokens.weight': draws.matrix(of['vocab_size'], width),
      'model.norm.weight': draws.scale(width, 0),
    }
    if not of['tie_word_embeddings']:
      found['lm_head.weight'] = draws.matrix(of['vocab_size'], width)
    for layer, kind in enumerate(of['layer_types']):
      own = {
        'input_layernorm.weight': draws.scale(width, 0),
        'post_attention_layernorm.weight': draws.scale(width, 0),
        **_mlp_tensors(draws, width, of['intermediate_size']),
      }
      if kind == 'linear_attention':
        taps = of['linear_conv_kernel_dim']
        delta = parts.delta_tensors(draws, width, **_delta_sizes(of), taps=taps)
        conv = np.concatenate([delta[f'{name}_conv'] for name in 'qkv'])
        own |= {
          'linear_attn.in_proj_qkv.weight': np.concatenate([delta[name] for name in 'qkv']),
          'linear_attn.in_proj_z.weight': delta['g'],
          'linear_attn.in_proj_a.weight': delta['a'],
          'linear_attn.in_proj_b.weight': delta['b'],
          'linear_attn.out_proj.weight': delta['o'],
          'linear_attn.conv1d.weight': conv,
          'linear_attn.A_log': delta['A_log'],
          'linear_attn.dt_bias': delta['dt_bias'],
          'linear_attn.norm.weight': delta['norm'],
        }
      else:
        own |= {
          'self_attn.q_proj.weight': draws.matrix(2 * heads * head, width),
          'self_attn.k_proj.weight': draws.matrix(kv * head, width),
          'self_attn.v_proj.weight': draws.matrix(kv * head, width),
          'self_attn.o_proj.weight': draws.matrix(width, heads * head),
          'self_attn.q_norm.weight': draws.scale(head, 0),
          'self_attn.k_norm.weight': draws.scale(head, 0),
        }
      found |= {f'model.layers.{layer}.{name}': value for name, value in own.items()}
    return found

  @staticmethod
  def logits(of, weights, tokens):
    weights, epsilon, head = _wide(weights), of['rms_norm_eps'], of['head_dim']
    rotary = of['rope_parameters']
    x = weights['model.embed_tokens.weight'][tokens]
    for layer, kind in enumerate(of['layer_types']):
      w = _inside(weights, f'model.layers.{layer}.')
      h = parts.rms(x, epsilon) * (1 + w['input_layernorm.weight'])
      if kind == 'linear_attention':
        sizes = _delta_sizes(of)
        own = _inside(w, 'linear_attn.')
        keys = sizes['heads'] * sizes['key']
        q, k, v = np.split(own['in_proj_qkv.weight'], (keys, 2 * keys))
        own |= {'q': q, 'k': k, 'v': v, 'g': own['in_proj_z.weight'], 'conv': own['conv1d.weight']}
        own |= {'a': own['in_proj_a.weight'], 'b': own['in_proj_b.weight']}
        own |= {'o': own['out_proj.weight'], 'norm': own['norm.weight']}
        x = x + parts.gated_delta(h, own, **sizes, epsilon=epsilon)
      else:
        joint = _project(h, w['self_attn.q_proj.weight'], 2 * head)
        q, gate = joint[..., :head], joint[..., head:]
        k, v = (_project(h, w[f'self_attn.{name}_proj.weight'], head) for name in 'kv')
        q = parts.rms(q, epsilon) * (1 + w['self_attn.q_norm.weight'])
        k = parts.rms(k, epsilon) * (1 + w['self_attn.k_norm.weight'])
        turns = rotary['rope_theta'], rotary.get('partial_rotary_factor', 0.25)
        q, k = (parts.rotate(part, *turns) for part in (q, k))
        y = (parts.attend(q, k, v) * parts.sigmoid(gate)).reshape(len(x), -1)
        x = x + y @ w['self_attn.o_proj.weight'].T
      x = x + _gated_mlp(parts.rms(x, epsilon) * (1 + w['post_attention_layernorm.weight']), w)
    head = weights.get('lm_head.weight', weights['model.embed_tokens.weight'])
    return parts.rms(x, epsilon) * (1 + weights['model.norm.weight']) @ head.T


class OlmoHybrid:
  """`olmo_hybrid`: norms after attention, and of all its heads together."""

  @staticmethod
  def config(**changes):
    rotary = {'rope_type': 'default', 'rope_theta': None}
    return {
      'model_type': 'olmo_hybrid', **_SHARED, 'rope_parameters': rotary,
      'linear_allow_neg_eigval': True, 'attention_dropout': 0.0, **changes,
    }  # fmt: skip

  @staticmethod
  def tensors(of, seed=2):
    draws, width = parts.Draws(seed), of['hidden_size']
    kv = width // of['num_attention_heads'] * of['num_key_value_heads']
    found = {
      'model.embed_tokens.weight': draws.matrix(of['vocab_size'], width),
      'model.norm.weight': draws.scale(width),
    }
    if not of['tie_word_embeddings']:
      found['lm_head.weight'] = draws.matrix(of['vocab_size'], width)
    for layer, kind in enumerate(of['layer_types']):
      own = _mlp_tensors(draws, width, of['intermediate_size'])
      if kind == 'linear_attention':
        taps = of['linear_conv_kernel_dim']
        delta = parts.delta_tensors(draws, width, **_delta_sizes(of), taps=taps)
        # Small outputs, so that the epsilon of the inner norm decides.
        delta['v'] = delta['v'] * np.float32(2**-10)
        own |= {
          'attention_layer_norm.weight': draws.scale(width),
          'feedforward_layer_norm.weight': draws.scale(width),
          **{f'linear_attn.{name}_proj.weight': delta[name] for name in 'qkvgabo'},
          **{f'linear_attn.{name}_conv1d.weight': delta[f'{name}_conv'] for name in 'qkv'},
          'linear_attn.A_log': delta['A_log'],
          'linear_attn.dt_bias': delta['dt_bias'],
          'linear_attn.o_norm.weight': delta['norm'],
        }
      else:
        own |= {
          'post_attention_layernorm.weight': draws.scale(width),
          'post_feedforward_layernorm.weight': draws.scale(width),
          'self_attn.q_proj.weight': draws.matrix(width, width),
          'self_attn.k_proj.weight': draws.matrix(kv, width),
          'self_attn.v_proj.weight': draws.matrix(kv, width),
          'self_attn.o_proj.weight': draws.matrix(width, width),
          'self_attn.q_norm.weight': draws.scale(width),
          'self_attn.k_norm.weight': draws.scale(kv),
        }
      found |= {f'model.layers.{layer}.{name}': value for name, value in own.items()}
    return found

  @staticmethod
  def logits(of, weights, tokens):
    weights, epsilon = _wide(weights), of['rms_norm_eps']
    head = of['hidden_size'] // of['num_attention_heads']
    base = of['rope_parameters']['rope_theta']
    x = weights['model.embed_tokens.weight'][tokens]
    for layer, kind in enumerate(of['layer_types']):
      w = _inside(weights, f'model.layers.{layer}.')
      if kind == 'linear_attention':
        own = _inside(w, 'linear_attn.')
        own |= {name: own[f'{name}_proj.weight'] for name in 'qkvgabo'}
        own['conv'] = np.concatenate([own[f'{name}_conv1d.weight'] for name in 'qkv'])
        own['norm'] = own['o_norm.weight']
        h = parts.rms(x, epsilon) * w['attention_layer_norm.weight']
        double = of['linear_allow_neg_eigval']
        x = x + parts.gated_delta(h, own, **_delta_sizes(of), epsilon=1e-5, double=double)
        x = x + _gated_mlp(parts.rms(x, epsilon) * w['feedforward_layer_norm.weight'], w)
        continue
      q, k, v = (x @ w[f'self_attn.{name}_proj.weight'].T for name in 'qkv')
      q = parts.rms(q, epsilon) * w['self_attn.q_norm.weight']
      k = parts.rms(k, epsilon) * w['self_attn.k_norm.weight']
      q, k, v = (part.reshape(len(x), -1, head) for part in (q, k, v))
      if base is not None:
        q, k = (parts.rotate(part, base) for part in (q, k))
      y = parts.attend(q, k, v).reshape(len(x), -1) @ w['self_attn.o_proj.weight'].T
      x = x + parts.rms(y, epsilon) * w['post_attention_layernorm.weight']
      y = _gated_mlp(x, w)
      x = x + parts.rms(y, epsilon) * w['post_feedforward_layernorm.weight']
    head = weights.get('lm_head.weight', weights['model.embed_tokens.weight'])
    return parts.rms(x, epsilon) * weights['model.norm.weight'] @ head.T


def _mamba_tensors(draws, width, *, heads, head, states, groups, taps, bias):
  inner = heads * head
  convolved = inner + 2 * groups * states
  found = {
    'in_proj.weight': draws.matrix(inner + convolved + heads, width),
    'conv1d.weight': draws.filters(convolved, taps),
    'A_log': draws.spread(heads, -2, 1),
    'dt_bias': draws.spread(heads, -3, 1),
    'D': draws.spread(heads, -1, 1),
    'norm.weight': draws.scale(inner),
    'out_proj.weight': draws.matrix(width, inner),
  }
  if bias:
    found['conv1d.bias'] = draws.spread(convolved, -1, 1)
  return found


def _mamba(x, w, *, heads, head, states, groups, epsilon):
  own = {
    'in_proj': w['in_proj.weight'],
    'conv': w['conv1d.weight'],
    'conv_bias': w.get('conv1d.bias', 0),
    'norm': w['norm.weight'],
    'out_proj': w['out_proj.weight'],
    **{name: w[name] for name in ('A_log', 'dt_bias', 'D')},
  }
  sizes = {'heads': heads, 'width': head, 'states': states, 'groups': groups}
  return parts.mamba2(x, own, **sizes, epsilon=epsilon)


class Mamba2:
  """`mamba2`: layers without MLPs."""

  @staticmethod
  def config(**changes):
    return {
      'model_type': 'mamba2', 'vocab_size': 50, 'hidden_size': 24, 'num_hidden_layers': 2,
      'num_heads': 6, 'head_dim': 8, 'state_size': 5, 'n_groups': 2, 'conv_kernel': 3, 'expand': 2,
      'use_conv_bias': True, 'use_bias': False, 'layer_norm_epsilon': 1e-3, 'hidden_act': 'silu',
      'tie_word_embeddings': True, 'time_step_limit': [0.0, float('inf')], 'chunk_size': 256,
      'residual_in_fp32': True, **changes,
    }  # fmt: skip

  @staticmethod
  def _sizes(of):
    return {
      'heads': of['num_heads'], 'head': of['head_dim'], 'states': of['state_size'],
      'groups': of['n_groups'],
    }  # fmt: skip

  @classmethod
  def tensors(cls, of, seed=3):
    draws, width = parts.Draws(seed), of['hidden_size']
    found = {
      'backbone.embeddings.weight': draws.matrix(of['vocab_size'], width),
      'backbone.norm_f.weight': draws.scale(width),
    }
    if not of['tie_word_embeddings']:
      found['lm_head.weight'] = draws.matrix(of['vocab_size'], width)
    more = {'taps': of['conv_kernel'], 'bias': of['use_conv_bias']}
    for layer in range(of['num_hidden_layers']):
      prefix = f'backbone.layers.{layer}.'
      found[f'{prefix}norm.weight'] = draws.scale(width)
      own = _mamba_tensors(draws, width, **cls._sizes(of), **more)
      found |= {f'{prefix}mixer.{name}': value for name, value in own.items()}
    return found

  @classmethod
  def logits(cls, of, weights, tokens):
    weights, epsilon = _wide(weights), of['layer_norm_epsilon']
    x = weights['backbone.embeddings.weight'][tokens]
    for layer in range(of['num_hidden_layers']):
      w = _inside(weights, f'backbone.layers.{layer}.')
      h = parts.rms(x, epsilon) * w['norm.weight']
      x = x + _mamba(h, _inside(w, 'mixer.'), **cls._sizes(of), epsilon=epsilon)
    head = weights.get('lm_head.weight', weights['backbone.embeddings.weight'])
    return parts.rms(x, epsilon) * weights['backbone.norm_f.weight'] @ head.T


class NemotronH:
  """`nemotron_h` without experts: a layer is Mamba-2, attention or an MLP."""

  @staticmethod
  def config(**changes):
    return {
      'model_type': 'nemotron_h', 'vocab_size': 50, 'hidden_size': 24, 'num_hidden_layers': 5,
      'hybrid_override_pattern': 'M-M*-', 'intermediate_size': 41, 'num_attention_heads': 4,
      'num_key_value_heads': 2, 'head_dim': 10, 'mamba_num_heads': 6, 'mamba_head_dim': 7,
      'ssm_state_size': 5, 'n_groups': 2, 'conv_kernel': 4, 'use_conv_bias': True,
      'layer_norm_epsilon': 1e-3, 'max_position_embeddings': 64, 'mlp_hidden_act': 'relu2',
      'mamba_hidden_act': 'silu', 'tie_word_embeddings': False, 'mlp_bias': False, 'expand': 2,
      'time_step_limit': [0.0, {'__float__': 'Infinity'}], 'time_step_min': 0.001, **changes,
    }  # fmt: skip

  @staticmethod
  def _sizes(of):
    return {
      'heads': of['mamba_num_heads'], 'head': of['mamba_head_dim'],
      'states': of['ssm_state_size'], 'groups': of['n_groups'],
    }  # fmt: skip

  @classmethod
  def tensors(cls, of, seed=4):
    draws, width, inner = parts.Draws(seed), of['hidden_size'], of['intermediate_size']
    found = {
      'backbone.embeddings.weight': draws.matrix(of['vocab_size'], width),
      'backbone.norm_f.weight': draws.scale(width),
      'lm_head.weight': draws.matrix(of['vocab_size'], width),
    }
    queries = of['num_attention_heads'] * of['head_dim']
    keys = of['num_key_value_heads'] * of['head_dim']
    more = {'taps': of['conv_kernel'], 'bias': of['use_conv_bias']}
    for layer, kind in enumerate(of['hybrid_override_pattern']):
      prefix = f'backbone.layers.{layer}.'
      found[f'{prefix}norm.weight'] = draws.scale(width)
      if kind == 'M':
        own = _mamba_tensors(draws, width, **cls._sizes(of), **more)
      elif kind == '-':
        own = {
          'up_proj.weight': draws.matrix(inner, width),
          'down_proj.weight': draws.matrix(width, inner),
        }
      else:
        own = {
          'q_proj.weight': draws.matrix(queries, width),
          'k_proj.weight': draws.matrix(keys, width),
          'v_proj.weight': draws.matrix(keys, width),
          'o_proj.weight': draws.matrix(width, queries),
        }
      found |= {f'{prefix}mixer.{name}': value for name, value in own.items()}
    return found

  @classmethod
  def logits(cls, of, weights, tokens):
    weights, epsilon = _wide(weights), of['layer_norm_epsilon']
    x = weights['backbone.embeddings.weight'][tokens]
    for layer, kind in enumerate(of['hybrid_override_pattern']):
      prefix = f'backbone.layers.{layer}.'
      h = parts.rms(x, epsilon) * weights[f'{prefix}norm.weight']
      w = _inside(weights, f'{prefix}mixer.')
      if kind == 'M':
        x = x + _mamba(h, w, **cls._sizes(of), epsilon=epsilon)
      elif kind == '-':
        x = x + np.maximum(h @ w['up_proj.weight'].T, 0) ** 2 @ w['down_proj.weight'].T
      else:
        q, k, v = (_project(h, w[f'{name}_proj.weight'], of['head_dim']) for name in 'qkv')
        x = x + parts.attend(q, k, v).reshape(len(x), -1) @ w['o_proj.weight'].T
    return parts.rms(x, epsilon) * weights['backbone.norm_f.weight'] @ weights['lm_head.weight'].T


class Lfm2:
  """`lfm2`: short convolutions with two gates, and attention with norms of queries and keys."""

  @staticmethod
  def config(**changes):
    return {
      'model_type': 'lfm2', 'vocab_size': 50, 'hidden_size': 24, 'num_hidden_layers': 4,
      'intermediate_size': 40, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8,
      'max_position_embeddings': 64, 'norm_eps': 1e-3, 'conv_L_cache': 4, 'conv_bias': False,
      'block_auto_adjust_ff_dim': True, 'block_ffn_dim_multiplier': 1.2, 'block_multiple_of': 5,
      'layer_types': ['conv', 'full_attention', 'conv', 'conv'], 'tie_word_embeddings': True,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 100.0}, **changes,
    }  # fmt: skip

  @staticmethod
  def _inner(of):
    inner = of['intermediate_size']
    if of['block_auto_adjust_ff_dim']:
      inner = int(of['block_ffn_dim_multiplier'] * int(2 * inner / 3))
      inner = int(np.ceil(inner / of['block_multiple_of'])) * of['block_multiple_of']
    return inner

  @classmethod
  def tensors(cls, of, seed=5):
    draws, width, head = parts.Draws(seed), of['hidden_size'], of['head_dim']
    queries, keys = of['num_attention_heads'] * head, of['num_key_value_heads'] * head
    found = {
      'model.embed_tokens.weight': draws.matrix(of['vocab_size'], width),
      'model.embedding_norm.weight': draws.scale(width),
    }
    if not of['tie_word_embeddings']:
      found['lm_head.weight'] = draws.matrix(of['vocab_size'], width)
    for layer, kind in enumerate(of['layer_types']):
      own = {
        'operator_norm.weight': draws.scale(width),
        'ffn_norm.weight': draws.scale(width),
        'feed_forward.w1.weight': draws.matrix(cls._inner(of), width),
        'feed_forward.w3.weight': draws.matrix(cls._inner(of), width),
        'feed_forward.w2.weight': draws.matrix(width, cls._inner(of)),
      }
      if kind == 'conv':
        own |= {
          'conv.in_proj.weight': draws.matrix(3 * width, width),
          'conv.conv.weight': draws.filters(width, of['conv_L_cache']),
          'conv.out_proj.weight': draws.matrix(width, width),
        }
      else:
        own |= {
          'self_attn.q_proj.weight': draws.matrix(queries, width),
          'self_attn.k_proj.weight': draws.matrix(keys, width),
          'self_attn.v_proj.weight': draws.matrix(keys, width),
          'self_attn.q_layernorm.weight': draws.scale(head),
          'self_attn.k_layernorm.weight': draws.scale(head),
          'self_attn.out_proj.weight': draws.matrix(width, queries),
        }
      found |= {f'model.layers.{layer}.{name}': value for name, value in own.items()}
    return found

  @classmethod
  def logits(cls, of, weights, tokens):
    weights, epsilon, head = _wide(weights), of['norm_eps'], of['head_dim']
    x = weights['model.embed_tokens.weight'][tokens]
    for layer, kind in enumerate(of['layer_types']):
      w = _inside(weights, f'model.layers.{layer}.')
      h = parts.rms(x, epsilon) * w['operator_norm.weight']
      if kind == 'conv':
        b, c, inner = np.split(h @ w['conv.in_proj.weight'].T, 3, axis=1)
        y = c * parts.convolve(b * inner, w['conv.conv.weight'])
        x = x + y @ w['conv.out_proj.weight'].T
      else:
        q, k, v = (_project(h, w[f'self_attn.{name}_proj.weight'], head) for name in 'qkv')
        q = parts.rms(q, epsilon) * w['self_attn.q_layernorm.weight']
        k = parts.rms(k, epsilon) * w['self_attn.k_layernorm.weight']
        q, k = (parts.rotate(part, of['rope_parameters']['rope_theta']) for part in (q, k))
        x = x + parts.attend(q, k, v).reshape(len(x), -1) @ w['self_attn.out_proj.weight'].T
      h = parts.rms(x, epsilon) * w['ffn_norm.weight']
      gate = parts.silu(h @ w['feed_forward.w1.weight'].T)
      x = x + (gate * (h @ w['feed_forward.w3.weight'].T)) @ w['feed_forward.w2.weight'].T
    head = weights.get('lm_head.weight', weights['model.embed_tokens.weight'])
    return parts.rms(x, epsilon) * weights['model.embedding_norm.weight'] @ head.T


class Gemma3:
  """`gemma3_text`: centred norms on both sides, and two kinds of rotary positions."""

  @staticmethod
  def config(**changes):
    return {
      'model_type': 'gemma3_text', 'vocab_size': 50, 'hidden_size': 24, 'num_hidden_layers': 4,
      'intermediate_size': 40, 'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 8,
      'query_pre_attn_scalar': 2, 'hidden_activation': 'gelu_pytorch_tanh', 'sliding_window': 5,
      'max_position_embeddings': 64, 'rms_norm_eps': 1e-3, 'tie_word_embeddings': True,
      'layer_types': ['sliding_attention', 'full_attention'] * 2, 'attention_bias': False,
      'attn_logit_softcapping': None, 'final_logit_softcapping': None,
      'rope_parameters': {
        'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
        'full_attention': {'rope_type': 'linear', 'rope_theta': 1000.0, 'factor': 8.0},
      }, **changes,
    }  # fmt: skip

  @classmethod
  def older_config(cls, **changes):
    """The fields before transformers 5."""
    of = cls.config(
      rope_theta=1000.0, rope_local_base_freq=100.0, rope_scaling={'type': 'linear', 'factor': 8.0},
      sliding_window_pattern=2, query_pre_attn_scalar=32, tie_word_embeddings=False,
    )  # fmt: skip
    del of['rope_parameters'], of['layer_types']
    return {**of, **changes}

  @staticmethod
  def tensors(of, seed=6):
    draws, width, head = parts.Draws(seed), of['hidden_size'], of['head_dim']
    queries, keys = of['num_attention_heads'] * head, of['num_key_value_heads'] * head
    found = {
      'model.embed_tokens.weight': draws.matrix(of['vocab_size'], width),
      'model.norm.weight': draws.scale(width, 0.0),
    }
    if not of['tie_word_embeddings']:
      found['lm_head.weight'] = draws.matrix(of['vocab_size'], width)
    for layer in range(of['num_hidden_layers']):
      own = {
        'input_layernorm.weight': draws.scale(width, 0.0),
        'post_attention_layernorm.weight': draws.scale(width, 0.0),
        'pre_feedforward_layernorm.weight': draws.scale(width, 0.0),
        'post_feedforward_layernorm.weight': draws.scale(width, 0.0),
        'self_attn.q_proj.weight': draws.matrix(queries, width),
        'self_attn.k_proj.weight': draws.matrix(keys, width),
        'self_attn.v_proj.weight': draws.matrix(keys, width),
        'self_attn.o_proj.weight': draws.matrix(width, queries),
        'self_attn.q_norm.weight': draws.scale(head, 0.0),
        'self_attn.k_norm.weight': draws.scale(head, 0.0),
        **_mlp_tensors(draws, width, of['intermediate_size']),
      }
      found |= {f'model.layers.{layer}.{name}': value for name, value in own.items()}
    return found

  @classmethod
  def logits(cls, of, weights, tokens):
    weights, head = _wide(weights), of['head_dim']

    def norm(x, w):
      return parts.rms(x, of['rms_norm_eps']) * (1 + w)

    table = weights['model.embed_tokens.weight']
    x = np.sqrt(of['hidden_size']) * table[tokens]
    for layer in range(of['num_hidden_layers']):
      w = _inside(weights, f'model.layers.{layer}.')
      base, factor, window = cls._positions(of, layer)
      h = norm(x, w['input_layernorm.weight'])
      q, k, v = (_project(h, w[f'self_attn.{name}_proj.weight'], head) for name in 'qkv')
      q, k = norm(q, w['self_attn.q_norm.weight']), norm(k, w['self_attn.k_norm.weight'])
      q, k = (parts.rotate(part, base, factor=factor) for part in (q, k))
      q = q * np.sqrt(head / of['query_pre_attn_scalar'])  # `attend` divides by sqrt(head)
      y = parts.attend(q, k, v, window).reshape(len(x), -1) @ w['self_attn.o_proj.weight'].T
      x = x + norm(y, w['post_attention_layernorm.weight'])
      h = norm(x, w['pre_feedforward_layernorm.weight'])
      gate = parts.gelu(h @ w['mlp.gate_proj.weight'].T)
      y = (gate * (h @ w['mlp.up_proj.weight'].T)) @ w['mlp.down_proj.weight'].T
      x = x + norm(y, w['post_feedforward_layernorm.weight'])
    return norm(x, weights['model.norm.weight']) @ weights.get('lm_head.weight', table).T

  @staticmethod
  def _positions(of, layer):
    """(base, factor, window) of a layer."""
    if 'layer_types' in of:
      kind = of['layer_types'][layer]
      rotary = of['rope_parameters'][kind]
      window = of['sliding_window'] if kind == 'sliding_attention' else None
      return rotary['rope_theta'], rotary.get('factor', 1.0), window
    if (layer + 1) % of['sliding_window_pattern']:
      return of['rope_local_base_freq'], 1.0, of['sliding_window']
    return of['rope_theta'], of['rope_scaling']['factor'], None
