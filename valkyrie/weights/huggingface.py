"""Hugging Face's Llama, Mistral and Qwen3: their configurations and tensors read and written.

    python -m valkyrie.weights.huggingface FOLDER > my_model.gin

prints the model of a folder. A Mistral is a Llama with a window, and a Qwen3 is one with a
norm of queries and keys.
"""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import re
import sys
from typing import Any

from valkyrie import foreign
from valkyrie.data.vocabularies import fingerprint
from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError, storage_errors
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.language_model import LanguageModel, asked
from valkyrie.models.layers import RMSNorm
from valkyrie.weights.config_fields import FETCH, check
from valkyrie.weights.tensor_files import read_json

# The types of models, with the defaults that differ from a Llama's.
_TYPES: dict[str, dict[str, Any]] = {
  'llama': {},
  'mistral': {'num_key_value_heads': 8, 'sliding_window': 4096},
  'qwen3': {'num_key_value_heads': 32, 'head_dim': 128},
}
# {name there: binding here}.
_SIZES = {
  'vocab_size': 'LanguageModel.vocabulary_size',
  'hidden_size': 'LanguageModel.d_model',
  'num_hidden_layers': 'LanguageModel.layers',
  'intermediate_size': 'Block.mlp_width',
}
_NEEDED = (*_SIZES, 'num_attention_heads', 'max_position_embeddings')
# (name there, parameter of Rotary, its type) of scaled positions.
_SCALING = (
  ('factor', 'factor', float),
  ('original_max_position_embeddings', 'original_context', int),
  ('low_freq_factor', 'low_turns', float),
  ('high_freq_factor', 'high_turns', float),
)
# The fields that are used, by their types; numbers are above 0.
_FIELDS = {
  **dict.fromkeys((*_NEEDED, 'num_key_value_heads', 'head_dim'), int),
  **{'rms_norm_eps': float, 'rope_theta': float, 'tie_word_embeddings': bool, 'hidden_act': str},
  **{'rope_scaling': dict, 'rope_parameters': dict},
}
_ROTARY = {name: kind for name, _, kind in _SCALING} | {
  'rope_theta': float,
  'rope_type': str,
  'type': str,
}
_WINDOWS: dict[str, dict[str, type]] = {
  'llama': {},
  'mistral': {'sliding_window': int},
  'qwen3': {},
}
# What all of these classes compute, and shapes do not tell.
_PLAIN = {'Rotary.share': 1.0, 'Block.norm': 'before', 'GatedMLP.activation': 'silu'}
# The bindings that decide which tokens a token sees, in both kinds of attention.
SIGHT = (
  'Block.mixers',
  *(f'LongformerAttention.{name}' for name in ('window', 'document_start', 'dilations')),
)
# {name there: name here}, with # for the number of a layer.
OURS = {
  'model.embed_tokens.weight': 'embedding',
  'model.norm.weight': 'final_norm.scale',
  'lm_head.weight': 'unembedding',
  'model.layers.#.input_layernorm.weight': 'layers.#.mixer_norm.scale',
  'model.layers.#.post_attention_layernorm.weight': 'layers.#.mlp_norm.scale',
  'model.layers.#.self_attn.q_proj.weight': 'layers.#.attention.query',
  'model.layers.#.self_attn.k_proj.weight': 'layers.#.attention.key',
  'model.layers.#.self_attn.v_proj.weight': 'layers.#.attention.value',
  'model.layers.#.self_attn.o_proj.weight': 'layers.#.attention.out',
  'model.layers.#.self_attn.q_norm.weight': 'layers.#.attention.query_norm.scale',
  'model.layers.#.self_attn.k_norm.weight': 'layers.#.attention.key_norm.scale',
  'model.layers.#.mlp.gate_proj.weight': 'layers.#.mlp.gate',
  'model.layers.#.mlp.up_proj.weight': 'layers.#.mlp.hidden',
  'model.layers.#.mlp.down_proj.weight': 'layers.#.mlp.out',
}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def configuration(folder: pathlib.Path) -> dict[str, Any]:
  """The configuration in a folder.

  Raises a ConfigurationError if there is none, or of a model that Valkyrie's blocks do not compute.
  """
  file = folder / 'config.json'
  if not os.path.lexists(file):
    raise ConfigurationError(f'{folder} has no config.json. Name the folder of a model.')
  found = read_json(file)
  kind = found.get('model_type')
  if kind not in [*_TYPES]:  # which may be of any type
    raise ConfigurationError(
      f'{file} is of a model of type {kind!r:.80}. Valkyrie reads {", ".join(_TYPES)} by itself. '
      'For another type whose layers Valkyrie has, write its model in gin, set '
      'train.initial_weights to its .safetensors file or index instead of the folder, and name its '
      'tensors in InitialWeights.rules: see "Names and rules" in docs/finetune.md.'
    )
  check(file, _without_full_layers(found), _FIELDS | _WINDOWS[kind])
  rotary = [found.get(name) or {} for name in ('rope_parameters', 'rope_scaling')]
  for fields in rotary:
    check(file, fields, _ROTARY)
  if all(rotary) and rotary[0] != rotary[1]:
    raise ConfigurationError(
      f'{file} has rope_parameters: {json.dumps(rotary[0]):.80} and rope_scaling: '
      f'{json.dumps(rotary[1]):.80}. Remove the one that does not count.'
    )
  if kind == 'qwen3' and 'head_dim' in found and found['head_dim'] is None:
    raise ConfigurationError(f'{file} has head_dim: null, which a Qwen3 cannot have. {FETCH}')
  missing = [name for name in _NEEDED if name not in found]
  if missing:
    raise ConfigurationError(f'{file} lacks {", ".join(missing)}, which a Llama has. {FETCH}')
  if found.get('hidden_act', 'silu') != 'silu':
    raise ConfigurationError(
      f'{file} has hidden_act: {found["hidden_act"]!r:.80}, but Valkyrie has only silu. '
      'Take a model with silu.'
    )
  # Null is a default, except for a window and for as many keys as queries.
  meant = ('sliding_window', 'num_key_value_heads')
  return {name: value for name, value in found.items() if value is not None or name in meant}


def _without_full_layers(fields: Mapping[str, Any]) -> dict[str, Any]:
  """The fields without those that say that every layer has full attention."""
  left = dict(fields)
  if left.get('layer_types') == ['full_attention'] * _count(left.get('num_hidden_layers')):
    del left['layer_types']
  if fields.get('model_type') == 'qwen3' and not fields.get('use_sliding_window'):
    left.pop('sliding_window', None)  # its class ignores the number
  return left


def _count(value: Any) -> int:
  if type(value) is not int or not 0 < value < 10**6:
    return 0
  return value


def vocabularies(folder: pathlib.Path) -> list[str]:
  """The fingerprints of the tokenizer's files in a folder."""
  files = [folder / 'tokenizer.json', folder / 'tokenizer.model']
  with storage_errors(f'The tokenizer in {folder} cannot be read', also=(ValueError,)):
    return [fingerprint(file, foreign.content(file)) for file in files if os.path.lexists(file)]


def bindings(config: Mapping[str, Any]) -> dict[str, Any]:
  """The gin bindings of the model that a configuration describes."""
  kind = config['model_type']
  config = {**_TYPES[kind], **config}
  heads = config['num_attention_heads']
  width = config['hidden_size']
  window = config.get('sliding_window')
  mixer = 'LongformerAttention' if window else 'FullAttention'
  of_mixer = {
    'heads': heads,
    'kv_heads': config.get('num_key_value_heads') or heads,
    'head_width': config.get('head_dim') or width // heads,
    'query_key_norm': kind == 'qwen3',
  }
  if window:
    of_mixer |= {'window': window - 1, 'registers': 0, 'document_start': 0}
  else:
    of_mixer |= {'max_context': config['max_position_embeddings']}
  return {
    **{ours: config[theirs] for theirs, ours in _SIZES.items()},
    'LanguageModel.tied': bool(config.get('tie_word_embeddings', False)),
    'LanguageModel.embedding_scale': 1.0,
    'RMSNorm.epsilon': float(config.get('rms_norm_eps', 1e-6)),
    **_rotary(config),
    **{f'{mixer}.{name}': value for name, value in of_mixer.items()},
  }


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
  # Two generations of the format: newer files keep all of it in rope_parameters.
  scaling = config.get('rope_parameters') or config.get('rope_scaling') or {}
  base = scaling.get('rope_theta') or config.get('rope_theta', 10_000.0)
  kind = scaling.get('rope_type') or scaling.get('type') or 'default'
  found = {'Rotary.base': float(base), 'Rotary.factor': 1.0}
  if kind == 'llama3':
    missing = [name for name, _, _ in _SCALING if scaling.get(name) is None]
    if missing:
      raise ConfigurationError(
        "The configuration scales rotary positions by 'llama3' without "
        f'{", ".join(missing)}. {FETCH}'
      )
    for theirs, ours, number_type in _SCALING:
      found[f'Rotary.{ours}'] = number_type(scaling[theirs])
    return found
  if kind != 'default':
    raise ConfigurationError(
      f'The configuration scales rotary positions by rope_type {kind!r}, but Valkyrie has '
      "only 'llama3' and 'default'. Take a model with one of these."
    )
  if scaling.get('factor', 1) != 1:
    raise ConfigurationError(
      f"The configuration has rotary positions of rope_type 'default' with the factor "
      f'{scaling["factor"]!r:.40}, which this type does not use. Correct the type or remove the '
      'factor.'
    )
  return found


def gin_text(config: Mapping[str, Any]) -> str:
  """A gin file of the model, to be included in a run."""
  model_bindings = bindings(config)
  lines = ["include 'gin/models/defaults.gin'", '', 'LanguageModel.pattern = (@Block,)']
  lines.append(f'Block.mixers = (@{_attention(model_bindings)},)')
  for name, value in model_bindings.items():
    lines.append(f'{name} = {value!r}')
  return '\n'.join(lines) + '\n'


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
  """The bindings to compare with a model's, which may have either kind of attention."""
  result = bindings(config)
  attention = _attention(result)
  for name in ('heads', 'head_width', 'query_key_norm'):
    value = result[f'{attention}.{name}']
    result[f'FullAttention.{name}'] = value
    result[f'LongformerAttention.{name}'] = value
  result['Block.mixers'] = f'(@{attention},)'
  result['LongformerAttention.dilations'] = None
  return result | _PLAIN


def _attention(bindings: Mapping[str, Any]) -> str:
  return 'LongformerAttention' if 'LongformerAttention.window' in bindings else 'FullAttention'


def configuration_of(make: Callable[..., LanguageModel]) -> tuple[dict[str, Any], float]:
  """The configuration of a model, and the factor on its embeddings, which Llama does not have.

  Raises a ConfigurationError for another model, which says what differs.
  """
  found = asked(make, _configuration_of)
  if isinstance(found, str):
    raise ConfigurationError(
      f'The model is not a Llama, Mistral or Qwen3: {found}. Export it with export.form = '
      "'valkyrie'."
    )
  return found


def _configuration_of(model: LanguageModel) -> tuple[dict[str, Any], float] | str:
  """The same, inside Haiku, or what differs."""
  blocks = model.inspect(lambda blocks: blocks)
  mixers = [mixer for block in blocks for mixer in block.mixers]
  plain = [block for block in blocks if block.norm == 'before' and block.mlp is not None]
  are_single = len(plain) == len(blocks) and all(len(block.mixers) == 1 for block in blocks)
  if not are_single or not isinstance(mixers[0], LongformerAttention):
    return 'a layer has another mixer than one attention, no MLP, or norms after its parts'
  first = mixers[0]
  attentions = [mixer for mixer in mixers if isinstance(mixer, LongformerAttention)]
  facts = {
    (type(m), m.heads, m.kv_heads, m.head_width, m.window, m.query_key_norm, m.rotary())
    for m in attentions
  }
  if len(facts) > 1 or len(attentions) < len(mixers):
    return 'its layers have different attention'
  rotary = first.rotary()
  has_globals = first.registers or first.document_start or {*(first.dilations or (1,))} != {1}
  is_whole = first.query_key_norm == 'whole'
  if has_globals or is_whole or rotary.share != 1 or any(m.output_gate for m in attentions):
    return (
      'its attention has registers, global tokens, dilations, a norm over all heads, an output '
      'gate, or channels that do not turn'
    )
  mlps = {(getattr(block.mlp, 'activation', None), block.mlp.width) for block in blocks}
  if model.insert is not None or mlps != {('silu', blocks[0].mlp.width)}:
    return 'it has an insert, or MLPs of different widths or without a gate by silu'
  full = isinstance(first, FullAttention)
  if first.query_key_norm and not full:
    return 'its attention has a window, and a norm of queries and keys'
  kind = 'Mistral'
  if full:
    kind = 'Qwen3' if first.query_key_norm else 'Llama'
  config = {
    'architectures': [f'{kind}ForCausalLM'],
    'model_type': kind.lower(),
    'hidden_act': 'silu',
    'hidden_size': model.d_model,
    'intermediate_size': blocks[0].mlp.width,
    'num_hidden_layers': model.repeats * len(blocks),
    'num_attention_heads': first.heads,
    'num_key_value_heads': first.kv_heads or first.heads,
    'head_dim': first.head_width,
    'vocab_size': model.vocabulary_size,
    'max_position_embeddings': first.window + 1 if full else 2**31 - 1,
    'rms_norm_eps': RMSNorm().epsilon,
    'rope_theta': rotary.base,
    # A tied table cannot hold the scale of the inputs, which Llama does not have.
    'tie_word_embeddings': model.tied and model.scale == 1,
    'torch_dtype': str(model.parameter_dtype) if model.adapters is None else 'float32',
  }
  if not full:
    config['sliding_window'] = first.window + 1
  if rotary.factor != 1:
    numbers = {theirs: getattr(rotary, ours) for theirs, ours, _ in _SCALING}
    config['rope_scaling'] = {'rope_type': 'llama3', **numbers}
  return config, float(model.scale)


def renamed(tensors: Mapping[str, Any], names: Mapping[str, str] = OURS) -> dict[str, Any]:
  """Tensors or arrays by the names of a table, with the matrices of layers transposed.

  Here they are [inputs, outputs], there [outputs, inputs]. A tensor without a new name keeps its
  own: a model that has no such tensor does not ask for it.

  Raises a ConfigurationError if two tensors would have the same name.
  """
  found: dict[str, Any] = {}
  for name, tensor in tensors.items():
    layer = re.search(r'(?<=layers\.)\d+', name)
    new = names.get(re.sub(r'(?<=layers\.)\d+', '#', name))
    name_here = new or name
    is_matrix = False
    if new is not None and layer is not None:
      name_here = new.replace('#', layer[0])
      is_matrix = len(tensor.shape) == 2
    if name_here in found:
      raise ConfigurationError(
        f'Two tensors of the source become {name_here!r:.80}; the second one has the name '
        f'{name!r:.80} there. Remove the tensor that does not count.'
      )
    found[name_here] = tensor.T if is_matrix else tensor
  return found


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the gin file of a folder; returns the exit code."""
  if arguments is None:
    arguments = sys.argv[1:]
  if len(arguments) != 1 or arguments[0].startswith('-'):
    print(__doc__, file=sys.stderr)
    return 2
  return console.printed(lambda: gin_text(configuration(pathlib.Path(arguments[0]))))


if __name__ == '__main__':
  sys.exit(main())
