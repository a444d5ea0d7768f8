"""Low-rank adapters in the format of Hugging Face's PEFT (huggingface/peft, tuners/lora).

The adapter of a matrix W [outputs, inputs] of a module adds B A alpha / r there: `lora_A.weight` is
A [r, inputs], `lora_B.weight` is B [outputs, r], and alpha is r here. Where several of our matrices
are rows of one there, such as queries, keys and values, their adapters become one whose r is the
sum: its B has the B of each in its rows, and zeros elsewhere.
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

import numpy as np

from valkyrie.errors import ConfigurationError, is_there, with_home
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.lora import A, B
from valkyrie.weights import huggingface, listing, name_table, named_tensors, settings
from valkyrie.weights.forms import MATRIX
from valkyrie.weights.source import is_run, open_source
from valkyrie.weights.tensor_files import Tensor
from valkyrie.weights.tensor_writer import of_arrays

_ADVICE = (
  "Export it with export.form = 'huggingface', which adds the adapters to the matrices, or with "
  "'valkyrie' if it has more than they, such as a learned first carry."
)
# PEFT refuses these modules: fast kernels would read their matrix without its adapter.
_REFUSED = {'mamba2': '.out_proj.weight', 'nemotron_h': '.out_proj.weight'}


class Base(NamedTuple):
  """The folder that a run began with: its configuration, and its tensors by our names."""

  folder: str
  config: Mapping[str, Any]
  tensors: Mapping[str, Tensor]


def open_base(path: Any) -> Base:
  """The folder that `train.initial_weights` names.

  Raises a ConfigurationError if it is not a folder of Hugging Face.
  """
  if isinstance(path, str) and not is_there(with_home(path)):
    raise ConfigurationError(
      f'train.initial_weights is {path!r:.80}, which is not there. A relative path is read from '
      'the current folder: go to the folder in which the run began, or pass '
      '--gin.train.initial_weights=\'"PATH"\'.'
    )
  if isinstance(path, str) and not is_run(pathlib.Path(with_home(path))):
    source = open_source(path)
    if source.config is not None:
      return Base(with_home(path), source.config, source.tensors)
  raise ConfigurationError(
    "export.form='peft' needs a run that began with a folder of Hugging Face, but "
    f'train.initial_weights is {path!r:.80}. {_ADVICE}'
  )


def check_base(
  base: Base,
  make: Callable[..., LanguageModel],
  tensors: Mapping[str, Tensor],
) -> None:
  """Raises a ConfigurationError unless a model is the base and adapters; reads each tensor once."""
  plan = huggingface.plan(base.config)
  lines = [line for _, line in settings.differences(plan, settings.settings_of(make))]
  if lines:
    raise ConfigurationError(
      f'{base.folder}/config.json differs from the model, so adapters of that folder would be '
      f'another model:\n{listing.lines(lines)}\n{_ADVICE}'
    )
  own: dict[str, Tensor] = {}
  for name, tensor in tensors.items():
    if not named_tensors.is_adapter(name):
      own[name] = tensor
  different = sorted(base.tensors.keys() - own.keys())
  for name, tensor in own.items():
    is_same = name in base.tensors and _is_equal(name, tensor, base.tensors[name])
    if not is_same:
      different.append(name)
  if different:
    raise ConfigurationError(
      f'{len(different)} tensors are not what {base.folder} has, so adapters of that folder would '
      f'be another model: {listing.over_layers(different)}. Train with gin/optimizers/lora.gin, '
      f'which freezes all but adapters. {_ADVICE}'
    )


def _is_equal(name: str, own: Tensor, theirs: Tensor) -> bool:
  """Whether two tensors are equal in the dtype of the first; a table may end with padding."""
  there = theirs.whole()
  here = own.whole()
  if name in named_tensors.TABLES:
    here = here[: len(there)]
  return np.array_equal(here, there.astype(here.dtype))


def adapters(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """The adapters among a model's tensors by PEFT's names, for a base with this configuration.

  Raises a ConfigurationError if there is none, or PEFT has none for one of the matrices.
  """
  halves = {}
  for name, tensor in tensors.items():
    if named_tensors.is_adapter(name):
      halves[name] = tensor.whole().astype(np.float32)
  adapted = {name.removesuffix(A) for name in halves if name.endswith(A)}
  if not adapted:
    raise ConfigurationError("export.form='peft' needs a run with adapters (LanguageModel.lora).")

  names = huggingface.names(config)
  refused = _REFUSED.get(config['model_type'])
  arrays: dict[str, np.ndarray] = {}
  placed: set[str] = set()
  for theirs, group in name_table.joint(names, tensors).items():
    parts = [name for name in group if name in adapted and group[name] is MATRIX]
    is_refused = refused and theirs.endswith(refused)
    if not parts or is_refused:
      continue
    placed.update(parts)
    ups: dict[str, np.ndarray] = {}
    for name in group:
      outputs = tensors[name].shape[1]
      ups[name] = np.zeros((0, outputs), np.float32)
    for name in parts:
      ups[name] = halves[name + B]
    blocks = of_arrays(_in_blocks(ups))
    written = name_table.written(names, blocks)
    downs = [halves[name + A] for name in parts]
    down = np.concatenate(downs, axis=1)
    up = written[theirs]
    module = f'base_model.model.{_module(config, theirs)}'
    arrays[f'{module}.lora_A.weight'] = np.ascontiguousarray(down.T)
    arrays[f'{module}.lora_B.weight'] = up.whole()
  left = sorted(adapted - placed)
  if left:
    raise ConfigurationError(
      f'PEFT has no adapter for {listing.over_layers(left)} in a {config["model_type"]}. {_ADVICE}'
    )
  return of_arrays(arrays)


def _module(config: Mapping[str, Any], tensor: str) -> str:
  """The module that has a tensor of a folder where transformers opens it for causal models."""
  module = tensor.removesuffix('.weight')
  if config['model_type'] == 'nemotron_h':
    return module.replace('backbone.', 'model.', 1)
  if config['model_type'] == 'gemma3':  # with its images, unlike a qwen3_5
    return module.replace('model.', 'model.language_model.', 1)
  return module


def _in_blocks(matrices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Matrices [rank, outputs], with zeros in the rows of the ranks of the others."""
  ranks = [len(matrix) for matrix in matrices.values()]
  total = sum(ranks)
  begin = 0
  blocks = {}
  for name, matrix in matrices.items():
    rank = len(matrix)
    end = total - begin - rank
    blocks[name] = np.pad(matrix, ((begin, end), (0, 0)))
    begin += rank
  return blocks


def configuration(tensors: Mapping[str, Tensor], folder: str) -> dict[str, Any]:
  """The content of `adapter_config.json` for adapters by PEFT's names, over a folder."""
  ranks = {}
  for name, tensor in tensors.items():
    name_of_half = name.removeprefix('base_model.model.')
    module, _, half = name_of_half.rpartition('.lora_')
    if half == 'A.weight':
      ranks[module] = tensor.shape[0]
  rank = min(ranks.values())
  wider = {module: size for module, size in ranks.items() if size != rank}
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': folder,
    'inference_mode': True,
    'r': rank,
    'lora_alpha': rank,
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'target_modules': sorted(ranks),
    'rank_pattern': wider,
    'alpha_pattern': wider,
  }
