"""Decoders with one attention and one gated MLP a layer: the base of Llama, Mistral and Qwen3."""

import abc
from collections.abc import Mapping
import pathlib
from typing import Any

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.language_model import LanguageModel
from valkyrie.weights.classes import parts, rope
from valkyrie.weights.classes.model_class import ModelClass
from valkyrie.weights.facts import norm_epsilon
from valkyrie.weights.forms import MATRIX, SAME
from valkyrie.weights.name_table import Names, entry
from valkyrie.weights.plan import Kind, Plan

# {name there: binding here}.
SIZES = {
  'vocab_size': 'LanguageModel.vocabulary_size',
  'hidden_size': 'LanguageModel.d_model',
  'num_hidden_layers': 'LanguageModel.layers',
  'intermediate_size': 'Block.mlp_width',
}
NEEDED = (*SIZES, 'num_attention_heads', 'max_position_embeddings')
USED: Mapping[str, type] = {
  **dict.fromkeys((*NEEDED, 'num_key_value_heads', 'head_dim'), int),
  **{'rms_norm_eps': float, 'rope_theta': float, 'tie_word_embeddings': bool, 'hidden_act': str},
  **{'rope_scaling': dict, 'rope_parameters': dict},
}
TABLES = (
  entry('embedding', SAME, 'model.embed_tokens.weight'),
  entry('final_norm.scale', SAME, 'model.norm.weight'),
  entry('unembedding', SAME, 'lm_head.weight'),
)
NORMS = (
  entry('layers.#.mixer_norm.scale', SAME, 'model.layers.#.input_layernorm.weight'),
  entry('layers.#.mlp_norm.scale', SAME, 'model.layers.#.post_attention_layernorm.weight'),
)
ATTENTION = (
  entry('layers.#.attention.query', MATRIX, 'model.layers.#.self_attn.q_proj.weight'),
  entry('layers.#.attention.key', MATRIX, 'model.layers.#.self_attn.k_proj.weight'),
  entry('layers.#.attention.value', MATRIX, 'model.layers.#.self_attn.v_proj.weight'),
  entry('layers.#.attention.out', MATRIX, 'model.layers.#.self_attn.o_proj.weight'),
)
HEAD_NORMS = (
  entry('layers.#.attention.query_norm.scale', SAME, 'model.layers.#.self_attn.q_norm.weight'),
  entry('layers.#.attention.key_norm.scale', SAME, 'model.layers.#.self_attn.k_norm.weight'),
)
MLP = (
  entry('layers.#.mlp.gate', MATRIX, 'model.layers.#.mlp.gate_proj.weight'),
  entry('layers.#.mlp.hidden', MATRIX, 'model.layers.#.mlp.up_proj.weight'),
  entry('layers.#.mlp.out', MATRIX, 'model.layers.#.mlp.down_proj.weight'),
)


class Decoder(ModelClass):
  """A Llama, or one of the classes that differ from it by a few fields."""

  has_head_norms = False

  def checked(self, file: pathlib.Path, found: Mapping[str, Any]) -> dict[str, Any]:
    config = super().checked(file, self._without_full_layers(found))
    rope.check(file, config)
    parts.check_window(file, 'sliding_window', config)
    if config.get('hidden_act', 'silu') != 'silu':
      raise ConfigurationError(
        f'{file} has hidden_act: {config["hidden_act"]!r:.80}, but Valkyrie has only silu. '
        'Take a model with silu.'
      )
    # Null is a default, except for a window and for as many keys as queries.
    meant = ('sliding_window', 'num_key_value_heads')
    return {name: value for name, value in config.items() if value is not None or name in meant}

  def _without_full_layers(self, found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those that say that every layer has full attention."""
    left = dict(found)
    if left.get('layer_types') == ['full_attention'] * _count(left.get('num_hidden_layers')):
      del left['layer_types']
    return left

  def plan(self, config: Mapping[str, Any]) -> Plan:
    config = {**self.defaults, **config}
    heads = config['num_attention_heads']
    window = config.get('sliding_window')
    mixer = 'LongformerAttention' if window else 'FullAttention'
    of_mixer = {
      'heads': heads,
      'kv_heads': config.get('num_key_value_heads') or heads,
      'head_width': config.get('head_dim') or config['hidden_size'] // heads,
      'query_key_norm': self.has_head_norms,
    }
    if window:
      of_mixer |= {'window': window - 1, 'registers': 0, 'document_start': 0}
    else:
      of_mixer |= {'max_context': config['max_position_embeddings']}
    shared = {
      **{ours: config[theirs] for theirs, ours in SIZES.items()},
      'LanguageModel.tied': bool(config.get('tie_word_embeddings', False)),
      'LanguageModel.embedding_scale': 1.0,
      'RMSNorm.epsilon': float(config.get('rms_norm_eps', 1e-6)),
      **rope.bindings(config),
    }
    layer = Kind((mixer,), {f'{mixer}.{name}': value for name, value in of_mixer.items()})
    return Plan(shared, {'attention': layer}, ('attention',) * config['num_hidden_layers'])

  def names(self, config: Mapping[str, Any]) -> Names:
    layer = (*NORMS, *ATTENTION, *HEAD_NORMS, *MLP)
    kinds = ('attention',) * config['num_hidden_layers']
    return Names(TABLES, {'attention': layer}, kinds, closed=False)

  def config_of(self, model: LanguageModel) -> dict[str, Any] | str:
    blocks = model.inspect(lambda blocks: blocks)
    attention = _attention_of(blocks)
    if isinstance(attention, str):
      return attention
    if model.insert is not None or model.ngrams is not None:
      return 'it has an insert or n-grams'
    difference = self._difference(attention)
    if difference:
      return difference
    rotary = attention.frequencies
    full = isinstance(attention, FullAttention)
    config = {
      'architectures': [f'{self.kind.capitalize()}ForCausalLM'],
      'model_type': self.kind,
      'hidden_act': 'silu',
      'hidden_size': model.d_model,
      'intermediate_size': blocks[0].mlp.width,
      'num_hidden_layers': model.repeats * len(blocks),
      'num_attention_heads': attention.heads,
      'num_key_value_heads': attention.kv_heads or attention.heads,
      'head_dim': attention.head_width,
      'vocab_size': model.vocabulary_size,
      'max_position_embeddings': attention.window + 1 if full else rope.WITHOUT_A_LIMIT,
      'rms_norm_eps': norm_epsilon(model),
      'rope_theta': rotary.base,
      # A tied table cannot hold the scale of the inputs, which Llama does not have.
      'tie_word_embeddings': model.tied and model.scale == 1,
      'torch_dtype': str(model.parameter_dtype) if model.adapters is None else 'float32',
    }
    if not full:
      config['sliding_window'] = attention.window + 1
    if rotary.factor != 1:
      config['rope_scaling'] = rope.scaling_of(rotary)
    return config

  @abc.abstractmethod
  def _difference(self, attention: LongformerAttention) -> str:
    """What a model with this attention in every layer has that the class has not, or ''."""


def _attention_of(blocks: list[Any]) -> LongformerAttention | str:
  """The attention that all blocks have beside a gated MLP, or what one has instead."""
  mixers = [mixer for block in blocks for mixer in block.mixers]
  are_plain = all(map(_is_plain, blocks))
  if not are_plain or not isinstance(mixers[0], LongformerAttention):
    return 'a layer has another mixer than one attention, no MLP, or norms after its parts'
  first = mixers[0]
  attentions = [mixer for mixer in mixers if isinstance(mixer, LongformerAttention)]
  kinds = {_kind_of(attention) for attention in attentions}
  if len(kinds) > 1 or len(attentions) < len(mixers):
    return 'its layers have different attention'
  dilations = first.dilations or (1,)
  has_globals = first.registers or first.document_start or set(dilations) != {1}
  is_whole = first.query_key_norm == 'whole'
  turns_all = first.frequencies.share == 1
  has_gate = any(attention.output_gate for attention in attentions)
  if has_globals or is_whole or not turns_all or has_gate:
    return (
      'its attention has registers, global tokens, dilations, a norm over all heads, an output '
      'gate, or channels that do not turn'
    )
  width = blocks[0].mlp.width
  mlps = {(getattr(block.mlp, 'activation', None), block.mlp.width) for block in blocks}
  if mlps != {('silu', width)}:
    return 'it has MLPs of different widths or without a gate by silu'
  if first.query_key_norm and not isinstance(first, FullAttention):
    return 'its attention has a window, and a norm of queries and keys'
  return first


def _is_plain(block: Any) -> bool:
  """Whether a block is one mixer and an MLP, each after a norm."""
  has_mlp = block.norm == 'before' and block.mlp is not None
  return has_mlp and len(block.mixers) == 1


def _kind_of(attention: LongformerAttention) -> tuple[Any, ...]:
  """What the attention of all layers must share."""
  return (
    type(attention),
    attention.heads,
    attention.kv_heads,
    attention.head_width,
    attention.window,
    attention.query_key_norm,
    attention.frequencies,
  )


def _count(value: Any) -> int:
  if type(value) is not int or not 0 < value < 10**6:
    return 0
  return value
