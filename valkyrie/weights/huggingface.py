"""Hugging Face's Llama and Mistral: their configuration in gin, and the names of their tensors.

    python -m valkyrie.weights.huggingface FOLDER > my_model.gin

prints the model of a folder. A Mistral is a Llama with a window.
"""

from collections.abc import Mapping, Sequence
import pathlib
import re
import sys
from typing import Any

from valkyrie.data.vocabularies import fingerprint
from valkyrie.errors import ConfigurationError, ValkyrieError, storage_errors
from valkyrie.weights.tensor_files import Tensor, read_json, transposed

_TYPES = ('llama', 'mistral')
_SIZES = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
  'max_position_embeddings',
)
IN_LAYER = {
  'input_layernorm.weight': 'mixer_norm.scale',
  'post_attention_layernorm.weight': 'mlp_norm.scale',
  'self_attn.q_proj.weight': 'attention.query',
  'self_attn.k_proj.weight': 'attention.key',
  'self_attn.v_proj.weight': 'attention.value',
  'self_attn.o_proj.weight': 'attention.out',
  'mlp.gate_proj.weight': 'mlp.gate',
  'mlp.up_proj.weight': 'mlp.hidden',
  'mlp.down_proj.weight': 'mlp.out',
}
OUTSIDE = {
  'model.embed_tokens.weight': 'embedding',
  'model.norm.weight': 'final_norm.scale',
  'lm_head.weight': 'unembedding',
}


def configuration(folder: pathlib.Path) -> dict[str, Any] | None:
  """The configuration in a folder; None if it has none.

  Raises:
    ConfigurationError: it is of a model that Valkyrie's blocks do not compute.
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
  if missing := [name for name in _SIZES if name not in found]:
    raise ConfigurationError(
      f'{file} lacks {", ".join(missing)}, which a Llama has. Fetch it again.'
    )
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
    'LanguageModel.vocabulary_size': config['vocab_size'],
    'LanguageModel.d_model': width,
    'LanguageModel.layers': config['num_hidden_layers'],
    'LanguageModel.tied': bool(config.get('tie_word_embeddings', False)),
    'LanguageModel.embedding_scale': 1.0,
    'Block.mlp_width': config['intermediate_size'],
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
    return found | {
      'Rotary.factor': float(scaling['factor']),
      'Rotary.original_context': scaling['original_max_position_embeddings'],
      'Rotary.low_turns': float(scaling['low_freq_factor']),
      'Rotary.high_turns': float(scaling['high_freq_factor']),
    }
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


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """The tensors under the names of `names`, with matrices as [inputs, outputs]."""
  found = {}
  for name, tensor in tensors.items():
    layer = re.fullmatch(r'model\.layers\.(\d+)\.(.+)', name)
    ours = IN_LAYER.get(layer[2]) if layer else OUTSIDE.get(name)
    if ours is None:
      found[name] = tensor  # a model without it does not ask for it
    elif layer:
      is_matrix = len(tensor.shape) == 2
      found[f'layers.{layer[1]}.{ours}'] = transposed(tensor) if is_matrix else tensor
    else:
      found[ours] = tensor
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
