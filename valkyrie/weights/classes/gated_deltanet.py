"""`gated_deltanet` of flash-linear-attention: Gated DeltaNet, with or without attention.

Yang, Kautz & Hatamizadeh 2024 (arXiv 2412.06464). The mixer and the attention of a layer have the
same prefix there; the configuration tells them apart.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.weights import config_fields
from valkyrie.weights.classes import parts, rope
from valkyrie.weights.classes.hybrid import Hybrid, shared_bindings
from valkyrie.weights.config_fields import FETCH, Fields
from valkyrie.weights.facts import Facts, Values, fields_of
from valkyrie.weights.forms import MATRIX, SAME
from valkyrie.weights.name_table import Entry, Names, Piece, entry
from valkyrie.weights.plan import Kind, Plan

_SIZES = ('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_heads', 'head_dim')
_ATTENTION = Fields(
  used={
    **dict.fromkeys(('num_heads', 'num_kv_heads', 'window_size'), int),
    **{'layers': list, 'rope_theta': float},
  },
  needed=('layers', 'num_heads'),
  required={'qkv_bias': (False,)},
  nullable=('num_kv_heads', 'window_size'),
)
_LAYER = 'model.layers.#.'


class GatedDeltaNet(Hybrid):
  """Gated DeltaNet of flash-linear-attention."""

  kind = 'gated_deltanet'
  a_model = 'a gated_deltanet'
  architecture = 'GatedDeltaNetForCausalLM'
  mixer = 'GatedDeltaNet'
  fields = Fields(
    used={
      **dict.fromkeys((*_SIZES, 'num_v_heads', 'conv_size', 'intermediate_size'), int),
      **dict.fromkeys(('expand_v', 'norm_eps', 'hidden_ratio'), float),
      **dict.fromkeys(('allow_neg_eigval', 'tie_word_embeddings'), bool),
      **{'attn': object, 'max_position_embeddings': int},
    },
    needed=_SIZES,
    required={
      'use_gate': (True,), 'use_short_conv': (True,), 'qkv_bias': (False, None),
      'hidden_act': ('swish', 'silu'), 'output_gate_activation': ('swish', 'silu'),
      'attnres_block_size': (None,), 'norm_first': (False, None),
    },
    no_effect=(
      'attn_mode', 'fuse_norm', 'fuse_swiglu', 'fuse_cross_entropy', 'fuse_linear_cross_entropy',
      'use_l2warp',
    ),
    nullable=('num_v_heads', 'intermediate_size', 'hidden_ratio'),
  )  # fmt: skip
  defaults = MappingProxyType({
    'expand_v': 2.0, 'conv_size': 4, 'norm_eps': 1e-6, 'allow_neg_eigval': False, 'attn': None,
    'tie_word_embeddings': False, 'max_position_embeddings': 2048,
  })  # fmt: skip

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = super().checked(file, found)
    expansion = {**self.defaults, **config}['expand_v']
    width = config['head_dim'] * expansion
    if not 1 <= width < 2**31:
      raise ConfigurationError(
        f'{file} has head_dim: {config["head_dim"]} and expand_v: {expansion}, whose '
        f'product {width:g} is not the width of a value. {FETCH}'
      )
    count = config['num_hidden_layers']
    seen: set[int] = set()
    for one in _attentions(file, config):
      config_fields.check(file, one, _ATTENTION)
      config_fields.check_needed(file, one, _ATTENTION.needed, "a gated_deltanet's attn")
      for layer in one['layers']:
        if type(layer) is not int or not 0 <= layer < count or layer in seen:
          raise ConfigurationError(
            f'{file} has attn with the layers {one["layers"]!r:.80}, but different numbers below '
            f'{count} were expected. {FETCH}'
          )
        seen.add(layer)
      parts.check_window(file, 'window_size', one)
    return config

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = {**self.defaults, **config}
    shared = {
      **shared_bindings(config, float(config['norm_eps'])),
      'Block.mlp_width': _mlp_width(config),
    }
    layers = _layers(config)
    kinds = {'linear': Kind(('GatedDeltaNet',), _delta(config))}
    for number, one in enumerate(_objects(config)):
      heads = one['num_heads']
      sizes = {
        'heads': heads,
        'kv_heads': one.get('num_kv_heads') or heads,
        'head_width': config['hidden_size'] // heads,
      }
      rotary = {'Rotary.base': float(one.get('rope_theta', 10_000.0))}
      context = config['max_position_embeddings']
      kinds[f'attention_{number}'] = parts.attention(sizes, rotary, context, one.get('window_size'))
    used = parts.used(kinds, layers)
    return Plan(shared, used, layers)

  def names(self, config: Mapping[str, Any]) -> Names:
    config = {**self.defaults, **config}
    tables = (
      entry('embedding', SAME, 'model.embeddings.weight'),
      entry('final_norm.scale', SAME, 'model.norm.weight'),
      entry('unembedding', SAME, 'lm_head.weight'),
    )
    both = [
      entry('layers.#.mixer_norm.scale', SAME, f'{_LAYER}attn_norm.weight'),
      entry('layers.#.mlp_norm.scale', SAME, f'{_LAYER}mlp_norm.weight'),
      *_mlp_names(_mlp_width(config)),
    ]
    delta = _delta(config)
    keys = delta['GatedDeltaNet.heads'] * delta['GatedDeltaNet.key_width']
    values = _value_heads(config) * delta['GatedDeltaNet.value_width']
    filters = [
      parts.rows(f'{_LAYER}attn.{name}_conv1d.weight', 0, width)
      for name, width in (('q', keys), ('k', keys), ('v', values))
    ]
    linear = parts.delta_names(f'{_LAYER}attn.', parts.DELTA_PROJECTIONS, 'o_norm', [filters])
    layers = _layers(config)
    attention = parts.attention_names(f'{_LAYER}attn.')
    by_kind = {}
    for kind in layers:
      by_kind[kind] = [*both, *(linear if kind == 'linear' else attention)]
    # Files before March 2025 have a parameter that was never used.
    return Names(tables, by_kind, layers, skipped=(r'model\.layers\.\d+\.attn\.D',))

  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    delta = facts.first('GatedDeltaNet')
    groups: dict[str, dict[str, Any]] = {}
    for number, layer in enumerate(facts.layers):
      if 'GatedDeltaNet.heads' in layer:
        continue
      one = _attention_of(layer)
      groups.setdefault(repr(one), {'layers': [], **one})['layers'].append(number)
    attention: Any = [*groups.values()]
    if len(attention) < 2:
      attention = attention[0] if attention else None
    return {
      'num_heads': delta['heads'],
      'num_v_heads': delta['value_heads'],
      'head_dim': delta['key_width'],
      'expand_v': _expansion(delta['value_width'], delta['key_width']),
      'conv_size': delta['taps'],
      'allow_neg_eigval': delta['write_gate'] == 'double',
      'use_gate': True,
      'use_short_conv': True,
      'hidden_act': 'swish',
      'hidden_ratio': None,
      'intermediate_size': facts.layers[0]['Block.mlp_width'] or 0,
      'norm_eps': facts.shared['RMSNorm.epsilon'],
      'max_position_embeddings': facts.max_context or rope.WITHOUT_A_LIMIT,
      'attn': attention,
    }


def _objects(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  """The objects of `attn`."""
  attention = config.get('attn')
  if attention is None:
    return []
  return attention if isinstance(attention, list) else [attention]


def _attentions(file: pathlib.Path, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  """The same, checked to be objects."""
  objects = _objects(config)
  if not all(isinstance(one, dict) for one in objects):
    raise ConfigurationError(
      f'{file} has attn: {config["attn"]!r:.80}, but null, an object or a list of objects was '
      f'expected. {FETCH}'
    )
  return objects


def _layers(config: Mapping[str, Any]) -> Sequence[str]:
  """The kind of each layer."""
  layers = ['linear'] * config['num_hidden_layers']
  for number, one in enumerate(_objects(config)):
    for layer in one['layers']:
      layers[layer] = f'attention_{number}'
  return layers


def _value_heads(config: Mapping[str, Any]) -> int:
  return config.get('num_v_heads') or config['num_heads']


def _delta(config: Mapping[str, Any]) -> dict[str, Any]:
  return parts.gated_delta_net(
    config['num_heads'],
    _value_heads(config),
    config['head_dim'],
    int(config['head_dim'] * config['expand_v']),
    taps=config['conv_size'],
    write_gate='double' if config['allow_neg_eigval'] else 'sigmoid',
  )


def _mlp_width(config: Mapping[str, Any]) -> int:
  if config.get('intermediate_size') is not None:
    return config['intermediate_size']
  ratio = config.get('hidden_ratio') or 4
  return 256 * math.ceil(int(config['hidden_size'] * ratio * 2 / 3) / 256)


def _mlp_names(width: int) -> list[Entry]:
  """Files before February 2025 have the gate above the hidden values in one matrix."""
  gate = f'{_LAYER}mlp.gate_proj.weight'
  hidden = [[Piece(f'{_LAYER}mlp.up_proj.weight')], [parts.rows(gate, width, width)]]
  return [
    Entry('layers.#.mlp.gate', MATRIX, [[parts.rows(gate, 0, width)]]),
    Entry('layers.#.mlp.hidden', MATRIX, hidden),
    entry('layers.#.mlp.out', MATRIX, f'{_LAYER}mlp.down_proj.weight'),
  ]


def _attention_of(layer: Values) -> dict[str, Any]:
  """The object of a layer's attention; without any, one whose plan the layer will not equal."""
  full = fields_of(layer, 'FullAttention')
  fields = full or fields_of(layer, 'LongformerAttention')
  return {
    'num_heads': fields.get('heads', 1),
    'num_kv_heads': fields.get('kv_heads', 1),
    'qkv_bias': False,
    'window_size': None if full or not fields else fields['window'] + 1,
    'rope_theta': layer.get('Rotary.base', 10_000.0),
  }


def _expansion(value_width: int, key_width: int) -> float:
  """The ratio whose product with the key width, cut to an integer, is the value width."""
  ratio = value_width / key_width
  while int(key_width * ratio) < value_width:
    ratio = math.nextafter(ratio, math.inf)
  return ratio
