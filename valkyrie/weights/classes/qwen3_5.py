"""`qwen3_5_text`, and the language model of `qwen3_5`, whose tower of images is left out."""

from collections.abc import Mapping, Sequence
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.weights.classes import decoder, parts, rope, with_images
from valkyrie.weights.classes.hybrid import Hybrid, delta_bindings, layer_types, shared_bindings
from valkyrie.weights.config_fields import FETCH, Fields
from valkyrie.weights.facts import Facts
from valkyrie.weights.forms import CENTRED, MATRIX, SAME
from valkyrie.weights.name_table import Entry, Names, Piece, entry
from valkyrie.weights.plan import Kind, Plan

_INTEGERS = (
  *decoder.SIZES, 'num_attention_heads', 'num_key_value_heads', 'head_dim',
  'max_position_embeddings', 'linear_num_key_heads', 'linear_num_value_heads',
  'linear_key_head_dim', 'linear_value_head_dim', 'linear_conv_kernel_dim',
  'full_attention_interval',
)  # fmt: skip
_NO_EFFECT = ('mamba_ssm_dtype', 'language_model_only', 'mrope_section', 'mrope_interleaved')
_ROTARY = Fields(
  used={'rope_theta': float, 'rope_type': str, 'type': str, 'partial_rotary_factor': float},
  required={'rope_type': ('default',), 'type': ('default', 'mrope')},
  no_effect=_NO_EFFECT,
)
_LAYER = 'model.layers.#.'
_LINEAR = 'linear_attn.'
_GDN = 'layers.#.gated_delta_net.'


class Qwen35(Hybrid):
  """Gated DeltaNet, and attention with an output gate in every fourth layer."""

  kind = 'qwen3_5_text'
  a_model = 'a qwen3_5_text'
  architecture = 'Qwen3_5ForCausalLM'
  mixer = 'GatedDeltaNet'
  fields = Fields(
    used={
      **dict.fromkeys(_INTEGERS, int),
      **dict.fromkeys(('rms_norm_eps', 'rope_theta', 'partial_rotary_factor'), float),
      **dict.fromkeys(('rope_parameters', 'rope_scaling'), dict),
      **{'tie_word_embeddings': bool, 'layer_types': list},
    },
    needed=(*decoder.NEEDED, 'head_dim', 'num_key_value_heads'),
    required={
      'hidden_act': ('silu', 'swish'), 'attention_bias': (False, None),
      'attn_output_gate': (True,), 'output_gate_type': ('swish', 'silu'),
      'use_sliding_window': (False, None),
    },
    no_effect=(
      *_NO_EFFECT, 'vision_config', 'mtp_num_hidden_layers', 'mtp_use_dedicated_embeddings',
      'mlp_only_layers',
    ),
    nullable=('rope_scaling', 'rope_parameters', 'layer_types'),
  )  # fmt: skip
  defaults = MappingProxyType({
    'rms_norm_eps': 1e-6, 'tie_word_embeddings': False, 'linear_num_key_heads': 16,
    'linear_num_value_heads': 32, 'linear_key_head_dim': 128, 'linear_value_head_dim': 128,
    'linear_conv_kernel_dim': 4, 'full_attention_interval': 4, 'layer_types': None,
  })  # fmt: skip

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = super().checked(file, found)
    rope.check(file, config, _ROTARY)
    layer_types(file, config, _interval(config))
    share = _share(config)
    if share > 1:
      raise ConfigurationError(
        f'{file} has partial_rotary_factor: {share}, but at most 1 was expected. {FETCH}'
      )
    return config

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = {**self.defaults, **config}
    shared = {
      **shared_bindings(config, float(config['rms_norm_eps'])),
      'Block.mlp_width': config['intermediate_size'],
    }
    sizes = {
      'heads': config['num_attention_heads'],
      'kv_heads': config['num_key_value_heads'],
      'head_width': config['head_dim'],
      'query_key_norm': True,
      'output_gate': True,
    }
    rotary = {
      'Rotary.base': float(rope.inside(config).get('rope_theta', config.get('rope_theta', 1e4))),
      'Rotary.share': _share(config),
    }
    kinds = {
      'linear_attention': Kind(('GatedDeltaNet',), delta_bindings(config)),
      'full_attention': parts.attention(sizes, rotary, config['max_position_embeddings']),
    }
    layers = _layers(config)
    return Plan(shared, parts.used(kinds, layers), layers)

  def names(self, config: Mapping[str, Any]) -> Names:
    config = {**self.defaults, **config}
    both = [
      _entry('layers.#.mixer_norm.scale', CENTRED, 'input_layernorm.weight'),
      _entry('layers.#.mlp_norm.scale', CENTRED, 'post_attention_layernorm.weight'),
      *decoder.MLP,
    ]
    kinds = {
      'linear_attention': [*both, *_linear_names(config)],
      'full_attention': [*both, *_attention_names(config)],
    }
    tables = [
      entry('embedding', SAME, 'model.embed_tokens.weight'),
      entry('final_norm.scale', CENTRED, 'model.norm.weight'),
      entry('unembedding', SAME, 'lm_head.weight'),
    ]
    layers = _layers(config)
    used = parts.used(kinds, layers)
    names = Names(tables, used, layers)
    return with_images.spelled(names, skipped=(r'model\.visual\..*', r'mtp\..*'))

  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    delta = facts.first('GatedDeltaNet')
    attention = facts.first('FullAttention')
    if not attention:
      return 'no layer has full attention'
    rotary = facts.first('Rotary')
    types = [
      'linear_attention' if 'GatedDeltaNet.heads' in layer else 'full_attention'
      for layer in facts.layers
    ]
    fields = {
      **parts.delta_fields(delta),
      'intermediate_size': facts.layers[0]['Block.mlp_width'] or 0,
      'num_attention_heads': attention['heads'],
      'num_key_value_heads': attention['kv_heads'],
      'head_dim': attention['head_width'],
      'attn_output_gate': True,
      'attention_bias': False,
      'hidden_act': 'silu',
      'layer_types': types,
      'rms_norm_eps': facts.shared['RMSNorm.epsilon'],
      'max_position_embeddings': facts.max_context,
      'rope_parameters': {
        'rope_type': 'default',
        'rope_theta': rotary.get('base', 10_000.0),
        'partial_rotary_factor': rotary['share'],
      },
    }
    # llama.cpp's converter reads this one, and not the list.
    interval = types.index('full_attention') + 1
    if types == _interval({'full_attention_interval': interval, 'num_hidden_layers': len(types)}):
      fields['full_attention_interval'] = interval
    return fields


class Qwen35WithImages(Qwen35):
  """The language model inside of a model that also reads images."""

  kind = 'qwen3_5'

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = with_images.text_config(
      file,
      found,
      Qwen35(),
      no_effect=('vision_config', 'language_model_only'),
      tied=False,
      defaults={},
    )
    return {**config, 'model_type': self.kind}


def _entry(ours: str, form: Any, theirs: str) -> Entry:
  """The entry of a tensor of a layer."""
  return entry(ours, form, f'{_LAYER}{theirs}')


def _share(config: Mapping[str, Any]) -> float:
  """The share of channels that turn: 0.25 also where nothing says it."""
  outside = config.get('partial_rotary_factor', 0.25)
  return float(rope.inside(config).get('partial_rotary_factor', outside))


def _interval(config: Mapping[str, Any]) -> list[str]:
  """The layers without `layer_types`."""
  interval = config.get('full_attention_interval', 4)
  types = []
  for number in range(1, config['num_hidden_layers'] + 1):
    is_full = number % interval == 0
    types.append('full_attention' if is_full else 'linear_attention')
  return types


def _layers(config: Mapping[str, Any]) -> Sequence[str]:
  return layer_types(None, config, _interval(config))


def _linear_names(config: Mapping[str, Any]) -> list[Entry]:
  keys = config['linear_num_key_heads'] * config['linear_key_head_dim']
  values = config['linear_num_value_heads'] * config['linear_value_head_dim']
  names = [
    _entry(f'{_GDN}gate', MATRIX, f'{_LINEAR}in_proj_z.weight'),
    _entry(f'{_GDN}step', MATRIX, f'{_LINEAR}in_proj_a.weight'),
    _entry(f'{_GDN}beta', MATRIX, f'{_LINEAR}in_proj_b.weight'),
    _entry(f'{_GDN}out', MATRIX, f'{_LINEAR}out_proj.weight'),
    _entry(f'{_GDN}log_rate', SAME, f'{_LINEAR}A_log'),
    _entry(f'{_GDN}step_bias', SAME, f'{_LINEAR}dt_bias'),
    _entry(f'{_GDN}norm.scale', SAME, f'{_LINEAR}norm.weight'),
    _entry(f'{_GDN}causal_convolution.filters', parts.FILTERS, f'{_LINEAR}conv1d.weight'),
  ]
  # The rows of one tensor, one kind after the other.
  widths = {'query': keys, 'key': keys, 'value': values}
  begin = 0
  for ours, width in widths.items():
    piece = parts.rows(f'{_LAYER}{_LINEAR}in_proj_qkv.weight', begin, width)
    names.append(Entry(f'{_GDN}{ours}', MATRIX, [[piece]]))
    begin += width
  return names


def _attention_names(config: Mapping[str, Any]) -> list[Entry]:
  """Each head has its rows of queries, and after them those of its gate."""
  width = config['head_dim']
  heads = range(config['num_attention_heads'])
  ours = 'layers.#.attention.'
  names = [
    _entry(f'{ours}key', MATRIX, 'self_attn.k_proj.weight'),
    _entry(f'{ours}value', MATRIX, 'self_attn.v_proj.weight'),
    _entry(f'{ours}out', MATRIX, 'self_attn.o_proj.weight'),
    _entry(f'{ours}query_norm.scale', CENTRED, 'self_attn.q_norm.weight'),
    _entry(f'{ours}key_norm.scale', CENTRED, 'self_attn.k_norm.weight'),
  ]
  for name, offset in (('query', 0), ('gate', width)):
    ranges = []
    for head in heads:
      begin = 2 * head * width + offset
      ranges.append((begin, begin + width))
    piece = Piece(f'{_LAYER}self_attn.q_proj.weight', ranges)
    names.append(Entry(f'{ours}{name}', MATRIX, [[piece]]))
  return names
