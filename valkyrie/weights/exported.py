"""A folder with a model for other programs: tensors, configuration, tokenizer and a model card.

    FOLDER/model.safetensors   the tensors by the names of `names`, matrices as [inputs, outputs]
    FOLDER/config.json         `model`: the bindings of its parts; sizes, vocabulary, run and steps
    FOLDER/README.md           the model card
    FOLDER/tokenizer.json      or tokenizer.model, as the run had it; nothing for bytes

In Hugging Face's form (`to_huggingface`) tensors and configuration are a Llama's.
"""

from collections.abc import Mapping
import json
import pathlib
import shutil
from typing import Any

import numpy as np

from valkyrie.data import vocabularies
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import StorageError, storage_errors
from valkyrie.types import Params
from valkyrie.weights import names, tensor_files

FORMAT = 'valkyrie'
_TABLES = ('embedding', 'unembedding')


def tensors(params: Params, vocabulary_size: int) -> dict[str, np.ndarray]:
  """The arrays by name on the host: adapters merged, tables without the vocabulary's padding."""
  named = {name: np.asarray(array) for name, array in names.tensors(params).items()}
  merged = tensor_files.merged(
    {name: tensor_files.in_memory(array) for name, array in named.items()}
  )
  whole = {name: tensor.read((slice(None),) * len(tensor.shape)) for name, tensor in merged.items()}
  return {
    name: array[:vocabulary_size] if name in _TABLES else array for name, array in whole.items()
  }


def write(
  folder: pathlib.Path,
  arrays: Mapping[str, np.ndarray],
  config: Mapping[str, Any],
  card: str,
  tokenizer: Vocabulary,
) -> None:
  """Writes a new folder, which appears as a whole.

  Args:
    folder: its path.
    arrays: the tensors by name.
    config: the content of config.json.
    card: the content of README.md.
    tokenizer: of the model.

  Raises:
    StorageError: the folder is there already, or cannot be written.
  """
  if folder.exists():
    raise StorageError(f'{folder} is there already. Name another --output, or move it away.')
  with storage_errors(f'{folder} cannot be written', 'Name another --output.'):
    unfinished = folder.with_name(f'.{folder.name}.unfinished')
    shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
    unfinished.mkdir(parents=True)
    # transformers asks for this format; it says nothing about the content.
    tensor_files.write(unfinished / 'model.safetensors', arrays, {'format': 'pt'})
    (unfinished / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    (unfinished / 'README.md').write_text(card)
    vocabularies.copy(tokenizer, unfinished)
    unfinished.rename(folder)


def vocabulary_of(folder: pathlib.Path) -> str | None:
  """The fingerprint of the vocabulary of an export; None if the folder is none.

  Raises:
    StorageError: its configuration cannot be read.
  """
  file = folder / 'config.json'
  if not file.is_file():
    return None
  found = tensor_files.read_json(file)
  return str(found.get('vocabulary')) if found.get('format') == FORMAT else None
