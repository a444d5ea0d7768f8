"""Folders of Hugging Face: their classes of models, and their gin files.

    python -m valkyrie.weights.huggingface FOLDER > my_model.gin

prints the model of a folder. `weights.classes` has a file for each class.
"""

from collections.abc import Callable, Mapping, Sequence
import os
import pathlib
import sys
from typing import Any, NamedTuple

from valkyrie import foreign
from valkyrie.data.vocabularies import fingerprint
from valkyrie.distributed import console
from valkyrie.errors import ConfigurationError, is_there, storage_errors, with_home
from valkyrie.models.language_model import LanguageModel, asked
from valkyrie.weights import name_table
from valkyrie.weights.classes.gated_deltanet import GatedDeltaNet
from valkyrie.weights.classes.gemma3 import Gemma3Text, Gemma3WithImages
from valkyrie.weights.classes.lfm2 import Lfm2
from valkyrie.weights.classes.llama import Llama
from valkyrie.weights.classes.mamba2 import Mamba2
from valkyrie.weights.classes.mistral import Mistral
from valkyrie.weights.classes.model_class import ModelClass
from valkyrie.weights.classes.nemotron_h import NemotronH
from valkyrie.weights.classes.olmo_hybrid import OlmoHybrid
from valkyrie.weights.classes.qwen3 import Qwen3
from valkyrie.weights.classes.qwen3_5 import Qwen35, Qwen35WithImages
from valkyrie.weights.name_table import Names, Renamed
from valkyrie.weights.plan import Plan
from valkyrie.weights.tensor_files import Tensor, read_json

OF_THE_HUB = (
  'One of the hub gets a folder by `hf download OWNER/NAME --local-dir=FOLDER`, of the package '
  'huggingface_hub.'
)
_BY_RULES = (
  'For another type whose layers Valkyrie has, write its model in gin, set train.initial_weights '
  'to its .safetensors file or index instead of the folder, and name its tensors in '
  'InitialWeights.rules: see "Names and rules" in docs/finetune.md.'
)
_DECODERS: tuple[ModelClass, ...] = (Llama(), Mistral(), Qwen3(), Gemma3Text())
_HYBRIDS: tuple[ModelClass, ...] = (
  GatedDeltaNet(),
  OlmoHybrid(),
  Qwen35(),
  Mamba2(),
  NemotronH(),
  Lfm2(),
)
# They are read, and written as the classes of their language models.
_WITH_IMAGES: tuple[ModelClass, ...] = (Qwen35WithImages(), Gemma3WithImages())
_CLASSES: dict[str, ModelClass] = {one.kind: one for one in (*_DECODERS, *_HYBRIDS, *_WITH_IMAGES)}


def configuration(folder: pathlib.Path) -> dict[str, Any]:
  """The configuration in a folder.

  Raises a ConfigurationError if there is none, or of a model that Valkyrie's blocks do not compute.
  """
  file = folder / 'config.json'
  if not is_there(file):
    raise ConfigurationError(
      f'{folder} has no config.json. Name the folder of a model. {OF_THE_HUB}'
    )
  found = read_json(file)
  if 'model_type' not in found:
    raise ConfigurationError(
      f'{file} has no "model_type", as folders of Hugging Face have. If {folder} is a run or an '
      'export of Valkyrie, train.initial_weights takes it as it is: the model of a run is in its '
      f'config.gin, and that of an export in config.json under "model". {_BY_RULES}'
    )
  kind = found['model_type']
  if kind not in [*_CLASSES]:  # which may be of any type
    raise ConfigurationError(
      f'{file} is of a model of type {kind!r:.80}. Valkyrie reads {", ".join(_CLASSES)} by itself. '
      f'{_BY_RULES}'
    )
  return _CLASSES[kind].checked(file, found)


def vocabularies(folder: pathlib.Path) -> list[str]:
  """The fingerprints of the tokenizer's files in a folder."""
  files = [folder / 'tokenizer.json', folder / 'tokenizer.model']
  with storage_errors(f'The tokenizer in {folder} cannot be read', also=(ValueError,)):
    return [fingerprint(file, foreign.content(file)) for file in files if os.path.lexists(file)]


def plan(config: Mapping[str, Any]) -> Plan:
  """The model that a configuration describes."""
  return _CLASSES[config['model_type']].plan(config)


def bindings(config: Mapping[str, Any]) -> dict[str, Any]:
  """The gin bindings of that model, without its mixers."""
  return plan(config).bindings


def gin_text(config: Mapping[str, Any]) -> str:
  """A gin file of the model, to be included in a run."""
  return plan(config).gin_text


def renamed(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Renamed:
  """The tensors of a folder by our names; see `name_table.read`."""
  return name_table.read(names(config), tensors)


def written(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
  """The tensors of a model with this configuration, by the names of its class."""
  return name_table.written(names(config), tensors)


def names(config: Mapping[str, Any]) -> Names:
  """The table of names of a model with this configuration."""
  return _CLASSES[config['model_type']].names(config)


class Export(NamedTuple):
  """A model as a class of Hugging Face.

  Attributes:
    config: its configuration.
    scale: the factor on its embeddings beside its class's own.
  """

  config: dict[str, Any]
  scale: float


def export_of(make: Callable[..., LanguageModel]) -> Export:
  """The class that a model can be, with its configuration.

  Raises a ConfigurationError for a model of no class, which says what differs.
  """
  return asked(make, _export_of)


def _export_of(model: LanguageModel) -> Export:
  """The same, inside Haiku."""
  mixers = model.inspect(lambda blocks: {type(m).__name__ for b in blocks for m in b.mixers})
  classes = [one for one in _HYBRIDS if one.mixer in mixers]
  kinds: dict[str, list[str]] = {}  # {a difference: the classes that have it}
  for one in classes or _DECODERS:
    config = one.config_of(model)
    if not isinstance(config, str):
      scale = one.plan(config).shared['LanguageModel.embedding_scale']
      return Export(config, float(model.scale / scale))
    kinds.setdefault(config, []).append(one.kind)
  lines = [f'  {", ".join(of)}: {difference}' for difference, of in kinds.items()]
  raise ConfigurationError(
    '\n'.join(
      [
        'The model is of no class of Hugging Face:',
        *lines,
        "Export it with export.form = 'valkyrie'.",
      ]
    )
  )


@console.program
def main(arguments: Sequence[str] | None = None) -> int:
  """Prints the gin file of a folder; returns the exit code."""
  if arguments is None:
    arguments = sys.argv[1:]
  if len(arguments) != 1 or arguments[0].startswith('-'):
    print(__doc__, file=sys.stderr)
    return 2
  folder = pathlib.Path(with_home(arguments[0]))
  console.print_result(gin_text(configuration(folder)))
  return 0


if __name__ == '__main__':
  sys.exit(main())
