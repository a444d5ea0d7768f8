"""`olmo_hybrid`: Gated DeltaNet, and attention with norms after it in every fourth layer.

Files that transformers 5.24 wrote cut the joint convolution into three equal parts, whatever the
widths of q, k and v. Side by side they are whole again.
"""

from collections.abc import Mapping, Sequence
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.weights.classes import decoder, parts, rope
from valkyrie.weights.classes.hybrid import Hybrid, delta_bindings, layer_types, shared_bindings
from valkyrie.weights.config_fields import Fields
from valkyrie.weights.facts import Facts
from valkyrie.weights.forms import SAME
from valkyrie.weights.name_table import Names, Piece, entry
from valkyrie.weights.plan import Kind, Plan

_DELTA_SIZES = (
  'linear_num_key_heads', 'linear_num_value_heads', 'linear_key_head_dim', 'linear_value_head_dim',
  'linear_conv_kernel_dim',
)  # fmt: skip
_EPSILON = 1e-5  # of the norm inside Gated DeltaNet, whatever the configuration says
_LAYER = 'model.layers.#.'


class OlmoHybrid(Hybrid):
  """OLMo Hybrid."""

  kind = 'olmo_hybrid'
  a_model = 'an olmo_hybrid'
  architecture = 'OlmoHybridForCausalLM'
  mixer = 'GatedDeltaNet'
  fields = Fields(
    used={
      **dict.fromkeys((*decoder.NEEDED, 'num_key_value_heads', *_DELTA_SIZES), int),
      **dict.fromkeys(('rms_norm_eps', 'rope_theta'), float),
      **dict.fromkeys(('rope_parameters', 'rope_scaling'), dict),
      **dict.fromkeys(('tie_word_embeddings', 'linear_allow_neg_eigval'), bool),
      **{'layer_types': list},
    },
    needed=decoder.NEEDED,
    required={
      'hidden_act': ('silu', 'swish'), 'attention_bias': (False, None),
      'linear_use_gate': (True, None), 'attention_dropout': (0, None),
    },
    no_effect=(
      'linear_a_log_min', 'linear_a_log_max', 'linear_dt_min', 'linear_dt_max',
      'linear_dt_init_floor',
    ),
    nullable=(
      'num_key_value_heads', 'rope_parameters', 'rope_scaling', 'layer_types', *_DELTA_SIZES[:4],
    ),
  )  # fmt: skip
  defaults = MappingProxyType({
    'rms_norm_eps': 1e-6, 'tie_word_embeddings': False, 'linear_allow_neg_eigval': True,
    'linear_conv_kernel_dim': 4,
  })  # fmt: skip

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = super().checked(file, found)
    rope.check(file, config, rope.FIELDS._replace(nullable=('rope_theta',)))
    layer_types(file, config, _every_fourth(config))
    return config

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = self._complete(config)
    shared = {
      **shared_bindings(config, float(config['rms_norm_eps'])),
      'Block.mlp_width': config['intermediate_size'],
    }
    heads = config['num_attention_heads']
    sizes = {
      'heads': heads,
      'kv_heads': config.get('num_key_value_heads') or heads,
      'head_width': config['hidden_size'] // heads,
      'query_key_norm': 'whole',
    }
    gate = 'double' if config['linear_allow_neg_eigval'] else 'sigmoid'
    delta = delta_bindings(config, write_gate=gate, norm_epsilon=_EPSILON)
    context = config['max_position_embeddings']
    after = {'Block.norm': 'after'}
    kinds = {
      'linear_attention': Kind(('GatedDeltaNet',), delta),
      'full_attention': parts.attention(sizes, _rotary(config), context, None, **after),
    }
    layers = _layers(config)
    return Plan(shared, parts.used(kinds, layers), layers)

  def names(self, config: Mapping[str, Any]) -> Names:
    config = self._complete(config)
    keys = config['linear_num_key_heads'] * config['linear_key_head_dim']
    values = config['linear_num_value_heads'] * config['linear_value_head_dim']
    delta = f'{_LAYER}linear_attn.'
    filters = [
      [
        Piece(f'{delta}{name}_conv1d.weight', width=width)
        for name, width in (('q', keys), ('k', keys), ('v', values))
      ],
      [Piece(f'{delta}conv1d.weight')],
    ]
    linear = [
      _norm('mixer_norm', 'attention_layer_norm', 'input_layernorm'),
      _norm('mlp_norm', 'feedforward_layer_norm', 'post_attention_layernorm'),
      *parts.delta_names(delta, parts.DELTA_PROJECTIONS, 'o_norm', filters),
    ]
    full = [
      _norm('post_mixer_norm', 'post_attention_layernorm', 'feedforward_layer_norm'),
      _norm('post_mlp_norm', 'post_feedforward_layernorm'),
      *decoder.ATTENTION,
      *decoder.HEAD_NORMS,
    ]
    kinds = {'linear_attention': [*linear, *decoder.MLP], 'full_attention': [*full, *decoder.MLP]}
    layers = _layers(config)
    used = parts.used(kinds, layers)
    return Names(decoder.TABLES, used, layers)

  def _complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the values of sizes that are missing or null."""
    result = {**self.defaults, **config}
    heads = result['num_attention_heads']
    key_heads = result.get('linear_num_key_heads') or heads
    key_width = result.get('linear_key_head_dim') or int(0.75 * result['hidden_size'] / key_heads)
    result['linear_num_key_heads'] = key_heads
    result['linear_key_head_dim'] = key_width
    if result.get('linear_num_value_heads') is None:
      result['linear_num_value_heads'] = heads
    if result.get('linear_value_head_dim') is None:
      result['linear_value_head_dim'] = 2 * key_width
    return result

  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    delta = facts.first('GatedDeltaNet')
    attention = facts.first('FullAttention')
    if not attention:
      return 'no layer has full attention'
    rotary = facts.first('Rotary')
    inside: dict[str, Any] = {'rope_type': 'default', **rope.scaling_of(facts.frequencies)}
    inside['rope_theta'] = rotary.get('base')  # null inside is without rotary positions
    types = [
      'linear_attention' if 'GatedDeltaNet.heads' in layer else 'full_attention'
      for layer in facts.layers
    ]
    return {
      **parts.delta_fields(delta),
      'linear_allow_neg_eigval': delta['write_gate'] == 'double',
      'intermediate_size': facts.layers[0]['Block.mlp_width'] or 0,
      'num_attention_heads': attention['heads'],
      'num_key_value_heads': attention['kv_heads'],
      'attention_bias': False,
      'hidden_act': 'silu',
      'layer_types': types,
      'rms_norm_eps': facts.shared['RMSNorm.epsilon'],
      'max_position_embeddings': facts.max_context,
      'rope_parameters': inside,
    }


def _norm(ours: str, *theirs: str) -> Any:
  return entry(f'layers.#.{ours}.scale', SAME, *(f'{_LAYER}{name}.weight' for name in theirs))


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
  """The bindings of `Rotary`: a null inside the object means that no channel turns."""
  inside = rope.inside(config)
  if 'rope_theta' in inside and inside['rope_theta'] is None:
    return {'Rotary.share': 0.0}
  return {'Rotary.share': 1.0, **rope.bindings(config)}


def _every_fourth(config: Mapping[str, Any]) -> list[str]:
  """The layers without `layer_types`; the last one has attention if there are fewer than four."""
  count = config['num_hidden_layers']
  full = range(3, count, 4) if count >= 4 else [count - 1]
  return ['full_attention' if number in full else 'linear_attention' for number in range(count)]


def _layers(config: Mapping[str, Any]) -> Sequence[str]:
  return layer_types(None, config, _every_fourth(config))
