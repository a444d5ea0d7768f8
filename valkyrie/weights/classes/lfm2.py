"""`lfm2`: gated short convolutions and attention (Liquid AI 2025, arXiv 2511.23404)."""

from collections.abc import Mapping, Sequence
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.weights.classes import parts, rope
from valkyrie.weights.classes.hybrid import (
  Hybrid,
  layer_types,
  shared_bindings,
  with_one_spelling,
)
from valkyrie.weights.config_fields import FETCH, Fields
from valkyrie.weights.facts import Facts
from valkyrie.weights.forms import FILTERS, MATRIX, SAME
from valkyrie.weights.name_table import Entry, Names, entry
from valkyrie.weights.plan import Kind, Plan

_NEEDED = (
  'vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads',
  'max_position_embeddings',
)  # fmt: skip
# {another spelling: name}.
_SPELLINGS = {'block_ff_dim': 'intermediate_size', 'tie_embedding': 'tie_word_embeddings'}
_TYPES = {'conv': 'conv', 'full_attention': 'full_attention'}
_LAYER = 'model.layers.#.'
_CONVOLUTION = 'layers.#.short_convolution.'


class Lfm2(Hybrid):
  """LFM2."""

  kind = 'lfm2'
  a_model = 'an lfm2'
  architecture = 'Lfm2ForCausalLM'
  mixer = 'ShortConvolution'
  fields = Fields(
    used={
      **dict.fromkeys((*_NEEDED, 'num_key_value_heads', 'head_dim', 'conv_L_cache'), int),
      **dict.fromkeys(('intermediate_size', 'block_ff_dim', 'block_multiple_of'), int),
      **dict.fromkeys(('norm_eps', 'rope_theta', 'block_ffn_dim_multiplier'), float),
      **dict.fromkeys(('tie_word_embeddings', 'tie_embedding', 'block_auto_adjust_ff_dim'), bool),
      **dict.fromkeys(('rope_parameters', 'rope_scaling'), dict),
      **dict.fromkeys(('layer_types', 'full_attn_idxs'), list),
    },
    needed=_NEEDED,
    required={'conv_bias': (False,)},
    # Its class reads no other spelling of the sizes, and always has SwiGLU and rotary positions.
    no_effect=(
      'block_dim', 'block_norm_eps', 'block_use_swiglu', 'block_mlp_init_scale',
      'block_out_init_scale', 'block_use_xavier_init', 'conv_dim', 'conv_dim_out',
      'conv_use_xavier_init', 'num_heads', 'use_pos_enc',
    ),
    nullable=(
      'rope_parameters', 'rope_scaling', 'layer_types', 'full_attn_idxs',
      'block_ffn_dim_multiplier',
    ),
  )  # fmt: skip
  defaults = MappingProxyType({
    'num_key_value_heads': 8, 'intermediate_size': 12288, 'conv_L_cache': 3, 'norm_eps': 1e-5,
    'tie_word_embeddings': True, 'block_auto_adjust_ff_dim': True, 'block_multiple_of': 256,
    'block_ffn_dim_multiplier': 1.0,
  })  # fmt: skip

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = with_one_spelling(file, super().checked(file, found), _SPELLINGS)
    rope.check(file, config)
    count = config['num_hidden_layers']
    for layer in config.get('full_attn_idxs') or ():
      if type(layer) is not int or not 0 <= layer < count:
        raise ConfigurationError(
          f'{file} has full_attn_idxs: {config["full_attn_idxs"]!r:.80}, but numbers below {count} '
          f'were expected. {FETCH}'
        )
    layer_types(file, config, _by_index(config), _TYPES)
    complete = {**self.defaults, **config}
    width = (complete['block_ffn_dim_multiplier'] or 1) * complete['intermediate_size']
    if not width < 2**31 or not _mlp_width(complete):
      raise ConfigurationError(
        f'{file} has intermediate_size: {complete["intermediate_size"]} and '
        f'block_ffn_dim_multiplier: {complete["block_ffn_dim_multiplier"]}, which give no width of '
        f'an MLP. {FETCH}'
      )
    return config

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = {**self.defaults, **config}
    shared = {
      **shared_bindings(config, float(config['norm_eps'])),
      'Block.mlp_width': _mlp_width(config),
    }
    heads = config['num_attention_heads']
    sizes = {
      'heads': heads,
      'kv_heads': config['num_key_value_heads'],
      'head_width': config.get('head_dim') or config['hidden_size'] // heads,
      'query_key_norm': True,
    }
    convolution = {
      'ShortConvolution.width': config['hidden_size'],
      'ShortConvolution.taps': config['conv_L_cache'],
    }
    rotary = rope.bindings(config, default_base=1e6)
    kinds = {
      'conv': Kind(('ShortConvolution',), convolution),
      'full_attention': parts.attention(sizes, rotary, config['max_position_embeddings']),
    }
    layers = _layers(config)
    return Plan(shared, parts.used(kinds, layers), layers)

  def names(self, config: Mapping[str, Any]) -> Names:
    tables = (
      entry('embedding', SAME, 'model.embed_tokens.weight'),
      entry('final_norm.scale', SAME, 'model.embedding_norm.weight'),
      entry('unembedding', SAME, 'lm_head.weight'),
    )
    both = [
      entry('layers.#.mixer_norm.scale', SAME, f'{_LAYER}operator_norm.weight'),
      entry('layers.#.mlp_norm.scale', SAME, f'{_LAYER}ffn_norm.weight'),
      entry('layers.#.mlp.gate', MATRIX, f'{_LAYER}feed_forward.w1.weight'),
      entry('layers.#.mlp.hidden', MATRIX, f'{_LAYER}feed_forward.w3.weight'),
      entry('layers.#.mlp.out', MATRIX, f'{_LAYER}feed_forward.w2.weight'),
    ]
    attention = f'{_LAYER}self_attn.'
    full = [
      *parts.attention_names(attention, 'out_proj'),
      entry('layers.#.attention.query_norm.scale', SAME, f'{attention}q_layernorm.weight'),
      entry('layers.#.attention.key_norm.scale', SAME, f'{attention}k_layernorm.weight'),
    ]
    convolution = _convolution_names(config['hidden_size'])
    kinds = {'conv': [*both, *convolution], 'full_attention': [*both, *full]}
    layers = _layers(config)
    used = parts.used(kinds, layers)
    return Names(tables, used, layers)

  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    convolution = facts.first('ShortConvolution')
    attention = facts.first('FullAttention')
    if not attention:
      return 'no layer has full attention'
    rotary = facts.frequencies
    types = [
      'conv' if 'ShortConvolution.taps' in layer else 'full_attention' for layer in facts.layers
    ]
    return {
      'intermediate_size': facts.layers[0]['Block.mlp_width'] or 1,
      'block_auto_adjust_ff_dim': False,
      'block_ffn_dim_multiplier': 1.0,  # this and the next one change nothing, but are read
      'block_multiple_of': 1,
      'num_attention_heads': attention['heads'],
      'num_key_value_heads': attention['kv_heads'],
      'head_dim': attention['head_width'],
      'conv_L_cache': convolution['taps'],
      'conv_bias': False,
      'block_dim': convolution['width'],  # vLLM reads these two widths of the stream
      'conv_dim': convolution['width'],
      'layer_types': types,
      'norm_eps': facts.shared['RMSNorm.epsilon'],
      'max_position_embeddings': facts.max_context,
      'rope_parameters': {
        'rope_type': 'default',
        'rope_theta': rotary.base,
        **rope.scaling_of(rotary),
      },
    }


def _by_index(config: Mapping[str, Any]) -> list[str]:
  """The layers without `layer_types`; without indexes, all have attention."""
  numbers = range(config['num_hidden_layers'])
  full = config.get('full_attn_idxs')
  if full is None:
    full = numbers
  return ['full_attention' if number in full else 'conv' for number in numbers]


def _layers(config: Mapping[str, Any]) -> Sequence[str]:
  return layer_types(None, config, _by_index(config), _TYPES)


def _mlp_width(config: Mapping[str, Any]) -> int:
  """The inner width: two thirds of the number there, rounded up to a multiple, by default."""
  width = config['intermediate_size']
  if not config['block_auto_adjust_ff_dim']:
    return width
  width = int(2 * width / 3)
  multiplier = config['block_ffn_dim_multiplier']
  if multiplier is None:
    return width
  multiple = config['block_multiple_of']
  return multiple * -(-int(multiplier * width) // multiple)


def _convolution_names(width: int) -> list[Entry]:
  prefix = f'{_LAYER}conv.'
  names = [
    entry(f'{_CONVOLUTION}causal_convolution.filters', FILTERS, f'{prefix}conv.weight'),
    entry(f'{_CONVOLUTION}out', MATRIX, f'{prefix}out_proj.weight'),
  ]
  for third, ours in enumerate(('input_gate', 'output_gate', 'inner')):
    piece = parts.rows(f'{prefix}in_proj.weight', third * width, width)
    names.append(Entry(f'{_CONVOLUTION}{ours}', MATRIX, [[piece]]))
  return names
