"""The run mode `export`: a folder with the model of a run, for other programs.

Its tensors have the names of `weights.named_tensors`, or in Hugging Face's form those of one of
`weights.classes`. The form 'components' has the sites of a decomposition: for the site
layers.0.mlp.out its matrix `layers.0.mlp.out`, its factors `..._v` and `..._u`, and `..._w1`,
`..._b1`, `..._w2`, `..._b2` of its importance function; a stack that has the importances of all
sites is `decomposition...`.
"""

from collections.abc import Callable, Mapping
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import gin
import numpy as np

from valkyrie import __version__
from valkyrie.checkpoint.manager import LATEST, open_to_read
from valkyrie.config import check, record
from valkyrie.config.computation import may_change_on_resume
from valkyrie.data.tokenizer_copy import copy_tokenizer
from valkyrie.errors import (
  ConfigurationError,
  StorageError,
  check_choice,
  usable_path,
  write_errors,
)
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.sites import U, V, sites_of
from valkyrie.monitoring.waiting import doing
from valkyrie.storage import owned
from valkyrie.weights import first_carry, forms, huggingface, named_tensors, peft, tensor_writer
from valkyrie.weights.tensor_files import Tensor

_CARD = """# {name}

{parameters:,} parameters after step {step} of the run `{name}`, exported by Valkyrie.

| file | content |
| --- | --- |
| `{prefix}model.safetensors` | the tensors, by {whose} names |
| `{prefix}config.json` | {whose} configuration |
| other files | the tokenizer and what is kept beside it, unless the model reads bytes |

{use}
"""
_DTYPES = {'float32': 'F32', 'bfloat16': 'BF16'}
_EXACT = ('A_log', 'dt_bias', 'D')  # the last parts of names of rates and steps
_USE = {
  'valkyrie': 'Matrices are [inputs, outputs]. Valkyrie reads this folder back by '
  "`train.initial_weights = 'FOLDER'`. Its page docs/export.md shows how to compute the model "
  'without Valkyrie.',
  'components': 'Matrices are [inputs, outputs]. docs/decomposition.md shows how to compute '
  'importances and masked products from them in numpy.',
  'first_carry': "Valkyrie begins documents with it: `open_run.first_carry = 'FOLDER'`.",
  'peft': '`peft.PeftModel.from_pretrained(BASE, FOLDER)` adds it to the model BASE.',
  'huggingface': '`transformers.AutoModelForCausalLM.from_pretrained(FOLDER)` opens it.',
}


@may_change_on_resume()
@gin.configurable
def export(
  model_dir: str,
  output: str,
  step: str = LATEST,
  *,
  opened: Callable[..., LoadedModel],
  model: Callable[..., LanguageModel],
  form: str = 'valkyrie',
  dtype: str | None = None,
) -> None:
  """Writes the model of a checkpoint to a new folder, which appears as a whole.

  Args:
    model_dir, step: name the checkpoint, or several, see `weights.restored`.
    output: the folder.
    opened: opens the run.
    model: the class of the model.
    form: 'valkyrie'; 'huggingface', for a model that one of `weights.classes` can be;
      'peft', only adapters, for the folder of Hugging Face that the run began with; 'components',
      for one step of a decomposition; or 'first_carry', only a learned carry, with the norm that
      tells its weights from others.
    dtype: 'float32' or 'bfloat16' in the form 'huggingface'; None keeps the parameters'. The
      rates and steps of recurrences stay float32.

  Raises:
    ConfigurationError: the run has no such step, or the model cannot be written in that form.
    StorageError: the folder is there already, or cannot be written.
  """
  check_choice('export.form', form, _USE)
  check_choice('export.dtype', dtype, (None, *_DTYPES))
  if dtype is not None and form != 'huggingface':
    raise ConfigurationError(
      f"export.dtype={dtype!r} is for export.form='huggingface', but the form is {form!r}. Set "
      'export.dtype = None.'
    )
  folder = pathlib.Path(usable_path('--output', output))
  if os.path.lexists(folder):
    raise StorageError(f'{folder} is there already. Name another --output, or move it away.')
  theirs = None
  if form == 'huggingface':
    theirs = huggingface.export_of(model)
  with doing('reading the checkpoint'):
    loaded = opened(model_dir, step, lazily=form != 'components')
  if form != 'valkyrie' and 'first_carry' in (loaded.origin or {}):
    raise ConfigurationError(
      f"open_run.first_carry is for export.form='valkyrie', but the form is {form!r}. Set "
      'open_run.first_carry = None, or export the run that has learned it.'
    )
  if form == 'peft':
    content = _adapters(loaded, model)
  elif theirs is None:
    content = _own(loaded, form)
  else:
    content = _theirs(loaded, theirs, dtype)
  tensors, config, count = content
  steps = ', '.join(map(str, loaded.steps))
  name = pathlib.Path(model_dir).resolve().name
  whose = "Valkyrie's"
  if form in ('huggingface', 'peft'):
    whose = "Hugging Face's"
  prefix = 'adapter_' if form == 'peft' else ''
  card = _CARD.format(
    name=name,
    parameters=count,
    step=steps,
    whose=whose,
    prefix=prefix,
    use=_USE[form],
  )
  message = f'{folder} cannot be written'
  with write_errors(message, 'name another --output'), owned.new_folder(folder) as unfinished:
    tensor_writer.write_folder(unfinished, tensors, f'{prefix}model')
    text = json.dumps(config, indent=2)
    config_file = unfinished / f'{prefix}config.json'
    config_file.write_text(f'{text}\n')
    (unfinished / 'README.md').write_text(card)
    copy_tokenizer(loaded.tokenizer, unfinished)
  print(f'step {steps}: {count:,} parameters in {output}')


class _Content(NamedTuple):
  """The tensors and the configuration of a folder, and the number of parameters in it."""

  tensors: dict[str, Tensor]
  config: dict[str, Any]
  parameters: int


def _count(tensors: Mapping[str, Tensor]) -> int:
  sizes = [math.prod(tensor.shape) for tensor in tensors.values()]
  return sum(sizes)


def _own(loaded: LoadedModel, form: str) -> _Content:
  """The content in one of Valkyrie's forms."""
  tensors = _components(loaded) if form == 'components' else _tensors(loaded)
  more = {}
  if form == 'first_carry':
    more['first_rows'] = first_carry.first_rows(tensors)
    tensors = _first_carry(tensors)
  count = _count(tensors)
  bindings = record.bindings()
  if any(map(named_tensors.is_first_carry, tensors)):  # perhaps of `open_run.first_carry`
    bindings['LanguageModel.learned_carry'] = True
  config = {
    'format': named_tensors.FORMAT,
    'version': __version__,
    'steps': [*loaded.steps],
    'parameters': count,
    'vocabulary': loaded.tokenizer.fingerprint,
    'vocabulary_size': loaded.model.about.vocabulary_size,
    'eos_id': loaded.tokenizer.eos_id,
    'bos': [*loaded.tokenizer.bos],
    'model': _of_model(bindings, form),
    **more,
  }
  return _Content(tensors, config, count)


def _theirs(loaded: LoadedModel, theirs: huggingface.Export, dtype: str | None) -> _Content:
  """The content as a class of Hugging Face."""
  tensors = _tensors(loaded)
  count = _count(tensors)
  config, scale = theirs
  config['eos_token_id'] = loaded.tokenizer.eos_id
  config['bos_token_id'] = next(iter(loaded.tokenizer.bos), None)
  config['pad_token_id'] = None  # a class there may expect one beyond this vocabulary
  if not config['tie_word_embeddings']:
    tensors.setdefault('unembedding', tensors['embedding'])
  tensors['embedding'] = _scaled(tensors['embedding'], scale)
  tensors = huggingface.written(config, tensors)
  if dtype is not None:
    config['torch_dtype'] = dtype
    tensors = _rounded(tensors, _DTYPES[dtype])
  return _Content(tensors, config, count)


def _adapters(loaded: LoadedModel, model: Callable[..., LanguageModel]) -> _Content:
  """The adapters, for the folder that the run began with."""
  base = peft.open_base(record.bindings().get('train.initial_weights'))
  tensors = named_tensors.of_params(loaded.params)
  adapters = peft.adapters(base.config, tensors)
  peft.check_base(base, model, tensors)
  configuration = peft.configuration(adapters, base.folder)
  return _Content(adapters, configuration, _count(adapters))


def _tensors(loaded: LoadedModel) -> dict[str, Tensor]:
  """The tensors by name: adapters merged, tables without the vocabulary's padding."""
  tensors = named_tensors.merged(named_tensors.of_params(loaded.params))
  size = loaded.model.about.vocabulary_size
  for name in named_tensors.TABLES:
    if name in tensors:
      tensors[name] = forms.columns(tensors[name].T, [(0, size)]).T
  return tensors


def _scaled(tensor: Tensor, scale: float) -> Tensor:
  return tensor._replace(read=lambda index: scale * tensor.read(index))


def _rounded(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
  """The tensors in a dtype, but the rates and steps of recurrences, which stay as they are."""
  result = {}
  for name, tensor in tensors.items():
    is_exact = name.rpartition('.')[2] in _EXACT
    result[name] = tensor if is_exact else tensor._replace(dtype=dtype)
  return result


def _first_carry(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
  """The tensors of a learned carry, and the norm that tells its weights from others."""
  chosen = {}
  for name, tensor in tensors.items():
    if name == 'final_norm.scale' or named_tensors.is_first_carry(name):
      chosen[name] = tensor
  if len(chosen) < 2:
    raise ConfigurationError(
      "export.form='first_carry' needs a run with LanguageModel.learned_carry = True."
    )
  return chosen


def _components(loaded: LoadedModel) -> dict[str, Tensor]:
  """The tensors of the sites of a decomposition, by name and layer."""
  sites = sites_of(loaded.model.parameters())
  if not sites or len(loaded.steps) != 1:
    raise ConfigurationError(
      f"export.form='components' needs one step of a run with LanguageModel.sites; found "
      f'{len(loaded.steps)} steps and {len(sites)} sites. Name one --step of such a run.'
    )
  (step,) = loaded.steps
  with open_to_read(loaded.model_dir, str(step)) as directory:
    functions = _importance_functions(directory.restore_evaluated())
  names = named_tensors.names_of(loaded.model.parameters())
  arrays = {}
  for path, array in functions.items():
    if path.startswith('decomposition'):
      arrays[path.replace('/', '.')] = array
  for path, site in sites.items():
    v, u = site.factors(loaded.params)
    parts = {'': site.target(loaded.params), V: v, U: u}
    prefix = f'{path}/'
    for name, array in functions.items():
      if name.startswith(prefix):
        part = name.removeprefix(prefix)
        parts[f'_{part}'] = array
    for layer, name in enumerate(names[path]):
      for part, array in parts.items():
        arrays[name + part] = np.asarray(array[layer])
  return tensor_writer.of_arrays(arrays)


def _importance_functions(params: Any) -> dict[str, Any]:
  """The arrays of importance functions, by the path of their site, or of a stack for all sites."""
  arrays = {}
  for module, group in params.items():
    if module.partition('/')[0] != 'decomposition':
      continue
    for name, array in group.items():
      path = name
      if not name.startswith('model/'):
        path = f'{module}/{name}'
      arrays[path] = array
  return arrays


def _of_model(bindings: dict[str, Any], form: str) -> dict[str, Any]:
  """The bindings of the model's parts, Valkyrie's and others: without paths and the seed."""
  rooms = ['models.']
  if form == 'components':
    rooms.append('lab.decomposition.')

  def is_part(name: str) -> bool:
    configurable, _, _ = name.rpartition('.')
    part = check.find(configurable).wrapped
    package, _, rest = part.__module__.partition('.')
    if package == 'valkyrie':
      return rest.startswith(tuple(rooms))
    return package != 'optax'

  kept = {}
  for name, value in bindings.items():
    if is_part(name):
      kept[name] = value
  return kept
