"""Models that Hugging Face's Llama and Mistral compute, too: configuration and tensors there."""

from collections.abc import Callable, Mapping
import re
from typing import Any

import haiku as hk
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.models.attention.full import FullAttention
from valkyrie.models.attention.longformer import LongformerAttention
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.layers import RMSNorm
from valkyrie.weights.huggingface import IN_LAYER, OUTSIDE


def configuration(make: Callable[..., LanguageModel]) -> tuple[dict[str, Any], float]:
  """The configuration of a model, and the factor on its embeddings, which Llama does not have.

  Raises:
    ConfigurationError: it is another model; the message says what differs.
  """

  def ask():
    model = make(name='model')
    blocks = model.inspect(lambda blocks: blocks)
    mixers = [mixer for block in blocks for mixer in block.mixers]
    first = mixers[0]
    if not isinstance(first, LongformerAttention) or any(len(b.mixers) != 1 for b in blocks):
      return 'a layer has another mixer than one attention'
    attentions = [mixer for mixer in mixers if isinstance(mixer, LongformerAttention)]
    if len({*map(_facts, attentions)}) > 1 or len(attentions) < len(mixers):
      return 'its layers have different attention'
    if first.registers or first.document_start or len(set(first.dilations or (1,))) > 1:
      return 'its attention has registers, global tokens or dilations'
    if model.planner is not None or len({block.mlp.width for block in blocks}) > 1:
      return 'it has a planner, or MLPs of different widths'
    rotary, full = first.rotary(), isinstance(first, FullAttention)
    scaling = {
      'rope_type': 'llama3',
      'factor': rotary.factor,
      'low_freq_factor': rotary.low_turns,
      'high_freq_factor': rotary.high_turns,
      'original_max_position_embeddings': rotary.original_context,
    }
    return {
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
      'tie_word_embeddings': model.tied and model.embedding_scale == 1,
      'torch_dtype': str(model.parameter_dtype),
      **({} if full else {'sliding_window': first.window + 1}),
      **({} if rotary.factor == 1 else {'rope_scaling': scaling}),
    }, float(model.embedding_scale)

  found = hk.transform(ask).apply({}, None)
  if isinstance(found, str):
    raise ConfigurationError(
      f"The model is no Llama or Mistral: {found}. Export it with export.form = 'valkyrie'."
    )
  return found


def _facts(mixer: LongformerAttention) -> tuple:
  return type(mixer), mixer.heads, mixer.kv_heads, mixer.head_width, mixer.window, mixer.rotary()


def renamed(
  tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], scale: float
) -> dict[str, np.ndarray]:
  """The tensors of `exported.tensors` under Hugging Face's names, matrices as [outputs, inputs]."""
  outside = {ours: theirs for theirs, ours in OUTSIDE.items()}
  in_layer = {ours: theirs for theirs, ours in IN_LAYER.items()}
  found = {}
  for name, array in tensors.items():
    if layer := re.fullmatch(r'layers\.(\d+)\.(.+)', name):
      theirs = f'model.layers.{layer[1]}.{in_layer[layer[2]]}'
      found[theirs] = array.T if array.ndim == 2 else array
    else:
      found[outside[name]] = array
  embedding = found['model.embed_tokens.weight']
  if not config['tie_word_embeddings']:
    found.setdefault('lm_head.weight', embedding)
  found['model.embed_tokens.weight'] = (scale * embedding).astype(embedding.dtype)
  return found
