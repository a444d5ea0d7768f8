"""Hugging Face's Llama and Mistral: their configurations and tensors read and written.

    python -m valkyrie.weights.huggingface FOLDER > my_model.gin

prints the model of a folder. A Mistral is a Llama with a window.
"""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import re
import sys
from typing import Any

import haiku as hk

from valkyrie.data.vocabularies import fingerprint
from valkyrie.errors import ConfigurationError, ValkyrieError, storage_errors
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.layers import RMSNorm
from valkyrie.weights.named_tensors import read_json

_TYPES = ('llama', 'mistral')
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
# {name there: name here}; # stands for the number of a layer.
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
  'model.layers.#.mlp.gate_proj.weight': 'layers.#.mlp.gate',
  'model.layers.#.mlp.up_proj.weight': 'layers.#.mlp.hidden',
  'model.layers.#.mlp.down_proj.weight': 'layers.#.mlp.out',
}
THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def configuration(folder: pathlib.Path) -> dict[str, Any] | None:
  """The configuration in a folder; None if it has none.

  Raises a ConfigurationError if it is of a model that Valkyrie's blocks do not compute.
  """
  file = folder / 'config.json'
  if not file.is_file():
    return None
  found = read_json(file)
  kind = found.get('model_type')
  if kind not in _TYPES:
    raise ConfigurationError(
      f'{file} is of a model of type {kind!r}. Valkyrie reads {" and ".join(_TYPES)}.'
    )
  if missing := ', '.join(name for name in _NEEDED if name not in found):
    raise ConfigurationError(f'{file} lacks {missing}, which a Llama has. Fetch it again.')
  for name in ('attention_bias', 'mlp_bias'):
    if found.get(name):
      raise ConfigurationError(f'{file} has {name}: true, but Valkyrie has no such biases.')
  if found.get('hidden_act', 'silu') != 'silu':
    raise ConfigurationError(
      f'{file} has hidden_act: {found["hidden_act"]!r}, but Valkyrie has only silu.'
    )
  return found


def vocabularies(folder: pathlib.Path) -> list[str]:
  """The fingerprints of the tokenizer's files in a folder."""
  files = [folder / 'tokenizer.json', folder / 'tokenizer.model']
  with storage_errors(f'The tokenizer in {folder} cannot be read'):
    return [fingerprint(file, file.read_bytes()) for file in files if file.is_file()]


def bindings(config: Mapping[str, Any]) -> dict[str, Any]:
  """The gin bindings of the model that a configuration describes."""
  heads, width = config['num_attention_heads'], config['hidden_size']
  window = config.get('sliding_window')
  mixer = 'LongformerAttention' if window else 'FullAttention'
  of_mixer = {
    'heads': heads,
    'kv_heads': config.get('num_key_value_heads', heads),
    'head_width': config.get('head_dim') or width // heads,
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
  kind = scaling.get('rope_type', scaling.get('type', 'default'))
  found = {'Rotary.base': float(base)}
  if kind == 'llama3':
    return found | {f'Rotary.{ours}': kind(scaling[theirs]) for theirs, ours, kind in _SCALING}
  if kind != 'default':
    raise ConfigurationError(
      f"The configuration scales rotary positions by rope_type {kind!r}. Valkyrie has 'llama3', or "
      'none.'
    )
  return found


def gin_text(config: Mapping[str, Any]) -> str:
  """A gin file of the model, to be included in a run."""
  lines = bindings(config)
  mixer = 'LongformerAttention' if 'LongformerAttention.window' in lines else 'FullAttention'
  text = [f'LanguageModel.pattern = (@Block,)\nBlock.mixers = (@{mixer},)']
  return '\n'.join([*text, *(f'{name} = {value!r}' for name, value in lines.items())]) + '\n'


def configuration_of(make: Callable[..., LanguageModel]) -> tuple[dict[str, Any], float]:
  """The configuration of a model, and the factor on its embeddings, which Llama does not have.

  Raises a ConfigurationError for another model, which says what differs.
  """
  found = hk.transform(lambda: _configuration_of(make(name='model'))).apply({}, None)
  if isinstance(found, str):
    raise ConfigurationError(
      f"The model is no Llama or Mistral: {found}. Export it with export.form = 'valkyrie'."
    )
  return found


def _configuration_of(model: LanguageModel) -> tuple[dict[str, Any], float] | str:
  """The same, inside Haiku, or what differs."""
  blocks = model.inspect(lambda blocks: blocks)
  mixers = [mixer for block in blocks for mixer in block.mixers]
  first = mixers[0]
  if not isinstance(first, LongformerAttention) or any(len(b.mixers) != 1 for b in blocks):
    return 'a layer has another mixer than one attention'
  attentions = [mixer for mixer in mixers if isinstance(mixer, LongformerAttention)]
  facts = {(type(m), m.heads, m.kv_heads, m.head_width, m.window, m.rotary()) for m in attentions}
  if len(facts) > 1 or len(attentions) < len(mixers):
    return 'its layers have different attention'
  if first.registers or first.document_start or len(set(first.dilations or (1,))) > 1:
    return 'its attention has registers, global tokens or dilations'
  if model.planner is not None or len({block.mlp.width for block in blocks}) > 1:
    return 'it has a planner, or MLPs of different widths'
  rotary, full = first.rotary(), isinstance(first, FullAttention)
  config = {
    'architectures': ['LlamaForCausalLM' if full else 'MistralForCausalLM'],
    'model_type': 'llama' if full else 'mistral',
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
  """
  found = {}
  for name, tensor in tensors.items():
    layer = re.search(r'(?<=layers\.)\d+', name)
    new = names.get(re.sub(r'(?<=layers\.)\d+', '#', name))
    if new is not None and layer:
      found[new.replace('#', layer[0])] = tensor.T if len(tensor.shape) == 2 else tensor
    else:
      found[new or name] = tensor
  return found


def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the gin file of a folder; returns the exit code."""
  arguments = sys.argv[1:] if arguments is None else arguments
  if len(arguments) != 1 or arguments[0].startswith('-'):
    print(__doc__, file=sys.stderr)
    return 2
  folder = pathlib.Path(arguments[0])
  try:
    config = configuration(folder)
    if config is None:
      raise ConfigurationError(f'{folder} has no config.json. Name the folder of a model.')
    print(gin_text(config), end='')
  except ValkyrieError as error:
    print(f'valkyrie: {error}', file=sys.stderr)
    return error.exit_code
  return 0


if __name__ == '__main__':
  sys.exit(main())
