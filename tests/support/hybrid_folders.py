"""Small folders of hybrids: written, read in float64, and written back."""

import json

import gated_deltanet_reference
from hybrid_classes_reference import Gemma3, Lfm2, Mamba2, NemotronH, OlmoHybrid, Qwen35
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
import tiny
import tiny_run

from valkyrie.config.load import load_gin
from valkyrie.main import CONFIGURABLE_MODULES
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.weights import huggingface, named_tensors, tensor_writer
from valkyrie.weights.initial import InitialWeights

DELTA = gated_deltanet_reference
MODELS = {
  'delta hybrid': (DELTA, DELTA.config()),
  'delta': (
    DELTA,
    DELTA.config(attn=None, num_v_heads=None, conv_size=4, tie_word_embeddings=True,
                 allow_neg_eigval=False, num_hidden_layers=2, expand_v=2),
  ),
  'qwen': (Qwen35, Qwen35.config()),
  'olmo': (OlmoHybrid, OlmoHybrid.config()),
  'olmo with positions': (
    OlmoHybrid,
    OlmoHybrid.config(rope_parameters={'rope_type': 'default', 'rope_theta': 100.0},
                      linear_allow_neg_eigval=False, tie_word_embeddings=True),
  ),
  'mamba': (Mamba2, Mamba2.config()),
  'nemotron': (NemotronH, NemotronH.config()),
  'lfm2': (Lfm2, Lfm2.config()),
  'lfm2 untied': (
    Lfm2,
    Lfm2.config(tie_word_embeddings=False, block_auto_adjust_ff_dim=False, conv_L_cache=3),
  ),
  'gemma': (Gemma3, Gemma3.config()),
  'older gemma': (Gemma3, Gemma3.older_config()),
}  # fmt: skip


def write(folder, config, weights):
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  save_file(weights, folder / 'model.safetensors')
  return folder


def model_of(folder, tmp_path, *flags):
  """The model in float64 that the printed gin file, and flags, describe."""
  file = tmp_path / 'model.gin'
  file.write_text(huggingface.gin_text(huggingface.configuration(folder)))
  dtype = "--gin.LanguageModel.compute_dtype='float64'"
  load_gin([str(file)], [dtype, *flags], modules=CONFIGURABLE_MODULES)
  return language_model.transform(LanguageModel)


def loaded(folder, model):
  """(parameters in float64, lines); every tensor comes from the folder."""
  lines = []
  first = tiny.init(model, 1)[0]
  params, complete = InitialWeights(str(folder)).load(
    model, LanguageModel, first, 'bytes', lines.append
  )
  assert complete
  return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params), lines


def exported(reference, config, tmp_path, dtype=jnp.float32):
  """(an export of a model that was read from a folder, the tensors of that folder)."""
  weights = reference.tensors(config)
  folder = write(tmp_path / 'hf', config, weights)
  with jax.enable_x64(True):
    model = model_of(folder, tmp_path)
    params, _ = loaded(folder, model)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    written = written_back(model, params, tmp_path / 'written')
  return written, weights


def add_tokenizer(folder):
  tiny_run.write_tokenizer(folder / 'tokenizer.json')
  config = {'tokenizer_class': 'PreTrainedTokenizerFast'}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))


def written_back(model, params, folder):
  """A folder of the class that the model is."""
  config, scale = huggingface.export_of(LanguageModel)
  assert scale == 1
  arrays = {name: tensor.whole() for name, tensor in named_tensors.of_params(params).items()}
  size = model.about.vocabulary_size
  for table in named_tensors.TABLES:
    if table in arrays:
      arrays[table] = arrays[table][:size]
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(config))
  written = huggingface.written(config, tensor_writer.of_arrays(arrays))
  tensor_writer.write_folder(folder, written)
  return folder


def packed(documents):
  """Tokens, positions and segments [1, T] of documents, and padding up to a multiple of 7."""
  time = sum(map(len, documents))
  padding = [0] * (-time % 7)
  tokens = np.concatenate([*documents, padding]).astype(np.int32)
  positions = np.concatenate([*map(np.arange, map(len, documents)), padding]).astype(np.int32)
  numbers = [np.full(len(one), number + 1) for number, one in enumerate(documents)]
  segments = np.concatenate([*numbers, padding]).astype(np.int32)
  return tokens[None], positions[None], segments[None]


def read(model, params, row, chunk):
  """The logits [T, vocabulary] of a row, in chunks of so many tokens."""
  carry = model.initial_carry(1)
  apply = jax.jit(model.apply)
  found = []
  for begin in range(0, row[0].shape[1], chunk):
    part = [array[:, begin : begin + chunk] for array in row]
    features, carry = apply(params, carry, *part)
    found.append(features.hidden[0] @ features.unembedding.T)
  return np.concatenate(found)[:, : model.about.vocabulary_size]
