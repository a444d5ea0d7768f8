"""The weights that `InitialWeights.source` names: a run, a file, an index, or a folder."""

from collections.abc import Mapping, Sequence
import os
import pathlib
from typing import Any, NamedTuple

from valkyrie.checkpoint.manager import LATEST, open_to_read
from valkyrie.errors import ConfigurationError, is_there, with_home
from valkyrie.weights import huggingface, named_tensors, tensor_files, tensor_folders
from valkyrie.weights.named_tensors import FORMAT
from valkyrie.weights.tensor_files import Tensor


class Source(NamedTuple):
  """Tensors to load.

  Attributes:
    tensors: tensors by the names of `named_tensors`, or by their own.
    vocabularies: the fingerprints of the tokenizer's files, if known.
    config: the configuration of Hugging Face, if it is a folder of theirs.
    bindings: {name: value} of the run, or of the model in an export.
    step: the step, if the source is a run.
    unread: files of the folder that look like weights, and were not read.
    skipped: tensors there that a class of Hugging Face has for other parts than the model here.
  """

  tensors: Mapping[str, Tensor]
  vocabularies: Sequence[str] = ()
  config: Mapping | None = None
  bindings: Mapping[str, Any] = {}
  step: int | None = None
  unread: Sequence[str] = ()
  skipped: Sequence[str] = ()

  @property
  def all_bindings(self) -> Mapping[str, Any]:
    """{name: value} of the model, whatever the source is, as far as it tells them."""
    if self.config is not None:
      return huggingface.bindings(self.config)
    return self.bindings


def is_run(place: pathlib.Path) -> bool:
  """Whether a source is the directory of a run."""
  checkpoints = place / 'checkpoints'
  return is_there(checkpoints) and checkpoints.is_dir()


def open_source(path: str, step: str = LATEST, *, lazily: bool = False) -> Source:
  """The tensors of a step of a run, of a safetensors file or index, or of a folder of such files.

  A step of a run is read at once, since the run may delete it; with `lazily`, when it is asked for.

  Raises a ConfigurationError if there are none, or of a model that Valkyrie does not compute.
  """
  path = with_home(path)
  place = pathlib.Path(path)
  if not is_there(place):
    raise ConfigurationError(
      f'The weights {path} are not there. Name the directory of a run, a safetensors file, or a '
      f'folder with such files. {huggingface.OF_THE_HUB}'
    )
  if is_run(place):
    with open_to_read(path, step) as directory:
      record = directory.latest_record() or {}
      params = directory.restore_evaluated(lazily=lazily)
      number = directory.latest_step()
    vocabularies = [str(record.get('vocabulary'))]
    bindings = _bindings(place / 'config.json', 'bindings')
    tensors = named_tensors.of_params(params)
    return Source(tensors, vocabularies, bindings=bindings, step=number)
  if step != LATEST:
    raise ConfigurationError(
      f'InitialWeights.step is {step!r}, but {path} is not the directory of a run, and has no '
      f'steps. Leave the binding out, or bind {LATEST!r}.'
    )
  file = place / 'config.json'
  if not os.path.lexists(file):
    tensors, unread = tensor_folders.in_files(place)
    return Source(tensors, unread=unread)
  _check_no_adapter(place)
  config = tensor_files.read_json(file)
  if config.get('format') == FORMAT:
    tensors, unread = tensor_folders.in_files(place)
    bindings = _bindings(file, 'model')
    return Source(tensors, [str(config.get('vocabulary'))], bindings=bindings, unread=unread)
  config = huggingface.configuration(place)
  tensors, unread = tensor_folders.in_files(place)
  vocabularies = huggingface.vocabularies(place)
  ours = huggingface.renamed(config, tensors)
  return Source(ours.tensors, vocabularies, config, unread=unread, skipped=ours.skipped)


def _bindings(file: pathlib.Path, field: str) -> Mapping[str, Any]:
  """The bindings in a field of a config.json; none if there is no such field."""
  if not os.path.lexists(file):
    return {}
  bindings = tensor_files.read_json(file).get(field)
  if not isinstance(bindings, dict):
    return {}
  return bindings


def _check_no_adapter(folder: pathlib.Path) -> None:
  """Raises a ConfigurationError for an adapter of peft, which other programs would add."""
  for name in ('adapter_config.json', f'adapter_model{tensor_files.SUFFIX}', 'adapter_model.bin'):
    if os.path.lexists(folder / name):
      raise ConfigurationError(
        f'{folder} has {name}, an adapter that Valkyrie would not add to the weights. Merge it by '
        "peft's merge_and_unload() and save the result, or move the adapter's files away."
      )
