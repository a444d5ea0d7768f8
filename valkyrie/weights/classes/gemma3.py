"""`gemma3_text`, and the language model of `gemma3`, whose tower of images is left out.

Windows and full attention, with norms on both sides (arXiv 2503.19786).

Scores there are divided by sqrt(`query_pre_attn_scalar`), and by sqrt(K) here. The scale of the
norm of queries holds the factor between them.
"""

from collections.abc import Mapping, Sequence
import math
import pathlib
from types import MappingProxyType
from typing import Any

from valkyrie.models.attention.rotary import Rotary
from valkyrie.weights import config_fields
from valkyrie.weights.classes import decoder, parts, rope, with_images
from valkyrie.weights.classes.hybrid import Hybrid, layer_types, shared_bindings
from valkyrie.weights.config_fields import Fields
from valkyrie.weights.facts import Facts, fields_of
from valkyrie.weights.forms import CENTRED, SAME, Form, centred
from valkyrie.weights.name_table import Entry, Names, entry
from valkyrie.weights.plan import Plan

_NEEDED = (
  'vocab_size', 'hidden_size', 'num_hidden_layers', 'intermediate_size', 'num_attention_heads',
  'max_position_embeddings',
)  # fmt: skip
_FULL = 'full_attention'
_SLIDING = 'sliding_attention'
_TYPES = {_SLIDING: _SLIDING, _FULL: _FULL}
# The field outside of rope_parameters with the base of each kind, and its default.
_BASES = {_SLIDING: ('rope_local_base_freq', 1e4), _FULL: ('rope_theta', 1e6)}
_ROTARY = Fields({_SLIDING: dict, _FULL: dict}, nullable=(_SLIDING, _FULL))
_LAYER = 'model.layers.#.'
# A file with images: what changes nothing in texts, what it may lack, and its other tensors.
_OF_IMAGES = (
  'vision_config', 'mm_tokens_per_image', 'boi_token_index', 'eoi_token_index',
  'image_token_index', 'image_token_id', 'boi_token_id', 'eoi_token_id',
)  # fmt: skip
_LACKED = {'vocab_size': 262_208, 'num_attention_heads': 8, 'max_position_embeddings': 131_072}
_TOWER = r'(model\.)?(vision_tower|multi_modal_projector)\..*'


class Gemma3Text(Hybrid):
  """Gemma 3, without images."""

  kind = 'gemma3_text'
  a_model = 'a gemma3_text'
  architecture = 'Gemma3ForCausalLM'
  fields = Fields(
    used={
      **dict.fromkeys((*_NEEDED, 'num_key_value_heads', 'head_dim', 'sliding_window'), int),
      **dict.fromkeys(('query_pre_attn_scalar', 'sliding_window_pattern'), int),
      **dict.fromkeys(('rms_norm_eps', 'rope_theta', 'rope_local_base_freq'), float),
      **dict.fromkeys(('rope_parameters', 'rope_scaling'), dict),
      **{'tie_word_embeddings': bool, 'layer_types': list},
    },
    needed=_NEEDED,
    required={
      'hidden_activation': ('gelu_pytorch_tanh',), 'attention_bias': (False, None),
      'use_bidirectional_attention': (False, None),
    },
    no_effect=('cache_implementation',),
    nullable=('rope_parameters', 'rope_scaling', 'layer_types'),
  )  # fmt: skip
  defaults = MappingProxyType({
    'num_key_value_heads': 4, 'head_dim': 256, 'query_pre_attn_scalar': 256,
    'sliding_window': 4096, 'sliding_window_pattern': 6, 'rms_norm_eps': 1e-6,
    'tie_word_embeddings': True,
  })  # fmt: skip

  def scale(self, width: int) -> float:
    return width**0.5

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = super().checked(file, found)
    config_fields.check(file, config.get('rope_parameters') or {}, _ROTARY)
    for kind in _TYPES:
      rotary = _rotary_fields(config, kind)
      rope.check(file, rotary)
      rope.bindings(rotary)
    layer_types(file, config, _by_pattern({**self.defaults, **config}), _TYPES)
    parts.check_window(file, 'sliding_window', config)
    return config

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = {**self.defaults, **config}
    scale = self.scale(config['hidden_size'])
    shared = {
      **shared_bindings(config, float(config['rms_norm_eps']), scale),
      'Block.mlp_width': config['intermediate_size'],
      'Block.norm': 'both',
      'GatedMLP.activation': 'gelu',
    }
    sizes = {
      'heads': config['num_attention_heads'],
      'kv_heads': config['num_key_value_heads'],
      'head_width': config['head_dim'],
      'query_key_norm': True,
    }
    layers = _layers(config)
    kinds = {}
    for kind, window in ((_SLIDING, config['sliding_window']), (_FULL, None)):
      if kind in layers:
        rotary = rope.bindings(_rotary_fields(config, kind))
        context = config['max_position_embeddings']
        kinds[kind] = parts.attention(sizes, rotary, context, window)
    return Plan(shared, kinds, layers)

  def names(self, config: Mapping[str, Any]) -> Names:
    config = {**self.defaults, **config}
    queries = centred(math.sqrt(config['head_dim'] / config['query_pre_attn_scalar']))
    tables = (
      entry('embedding', SAME, 'model.embed_tokens.weight'),
      entry('final_norm.scale', CENTRED, 'model.norm.weight'),
      entry('unembedding', SAME, 'lm_head.weight'),
    )
    layer = (
      _norm('mixer_norm', 'input_layernorm'),
      _norm('post_mixer_norm', 'post_attention_layernorm'),
      _norm('mlp_norm', 'pre_feedforward_layernorm'),
      _norm('post_mlp_norm', 'post_feedforward_layernorm'),
      _norm('attention.query_norm', 'self_attn.q_norm', queries),
      _norm('attention.key_norm', 'self_attn.k_norm'),
      *decoder.ATTENTION,
      *decoder.MLP,
    )
    return Names(tables, {'layer': layer}, ('layer',) * config['num_hidden_layers'])

  def _fields_of(self, facts: Facts) -> dict[str, Any] | str:
    attention = facts.first('LongformerAttention') or facts.first('FullAttention')
    if not attention:
      return 'no layer has attention'
    types = [_SLIDING if 'LongformerAttention.heads' in one else _FULL for one in facts.layers]
    rotaries = {}
    for kind, layer in zip(types, facts.layers, strict=True):
      rotary = Rotary(**fields_of(layer, 'Rotary'))
      positions = {'rope_type': 'default', 'rope_theta': rotary.base, **rope.scaling_of(rotary)}
      rotaries.setdefault(kind, positions)
    fields = {
      'intermediate_size': facts.layers[0]['Block.mlp_width'] or 1,
      'num_attention_heads': attention['heads'],
      'num_key_value_heads': attention['kv_heads'],
      'head_dim': attention['head_width'],
      'query_pre_attn_scalar': attention['head_width'],
      'hidden_activation': 'gelu_pytorch_tanh',
      'attention_bias': False,
      'layer_types': types,
      'rms_norm_eps': facts.shared['RMSNorm.epsilon'],
      'max_position_embeddings': facts.max_context or rope.WITHOUT_A_LIMIT,
      'rope_parameters': rotaries,
    }
    if 'window' in attention:
      fields['sliding_window'] = attention['window'] + 1
    return fields


class Gemma3WithImages(Gemma3Text):
  """The language model inside of a model that also reads images."""

  kind = 'gemma3'
  a_model = 'a gemma3'

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = with_images.text_config(
      file, found, Gemma3Text(), no_effect=_OF_IMAGES, tied=True, defaults=_LACKED
    )
    return {**config, 'model_type': self.kind}

  def names(self, config: Mapping[str, Any]) -> Names:
    return with_images.spelled(super().names(config), skipped=(_TOWER,))


def _norm(ours: str, theirs: str, form: Form = CENTRED) -> Entry:
  return entry(f'layers.#.{ours}.scale', form, f'{_LAYER}{theirs}.weight')


def _rotary_fields(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
  """The rotary positions of a kind of layers, in the fields of a class with one kind."""
  nested = config.get('rope_parameters') or {}
  base, default = _BASES[kind]
  fields = {'rope_parameters': nested.get(kind), 'rope_theta': config.get(base, default)}
  if kind == _FULL:
    fields['rope_scaling'] = config.get('rope_scaling')
  return fields


def _by_pattern(config: Mapping[str, Any]) -> list[str]:
  """The layers without `layer_types`."""
  period = config['sliding_window_pattern']
  numbers = range(1, config['num_hidden_layers'] + 1)
  return [_SLIDING if number % period else _FULL for number in numbers]


def _layers(config: Mapping[str, Any]) -> Sequence[str]:
  return layer_types(None, config, _by_pattern(config), _TYPES)
