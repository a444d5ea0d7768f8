"""The run mode `export`: a folder with the model of a run, for other programs.

Its tensors have the names of `weights.named_tensors`, or in Hugging Face's form a Llama's. The form
'components' has the sites of a decomposition: for the site layers.0.mlp.out its matrix
`layers.0.mlp.out`, its factors `..._v` and `..._u`, and `..._w1`, `..._b1`, `..._w2`, `..._b2` of
its importance function; a stack that has the importances of all sites is `decomposition...`.
"""

from collections.abc import Callable
import json
import os
import pathlib
from typing import Any

import gin
import numpy as np

from valkyrie import __version__
from valkyrie.checkpoint.manager import LATEST, open_to_read
from valkyrie.config import check, record
from valkyrie.config.computation import may_change_on_resume
from valkyrie.data import vocabularies
from valkyrie.errors import (
  ConfigurationError,
  StorageError,
  check_choice,
  storage_errors,
  with_home,
)
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models.language_model import LanguageModel
from valkyrie.models.sites import U, V, sites_of
from valkyrie.monitoring.waiting import doing
from valkyrie.storage import owned
from valkyrie.weights import huggingface, named_tensors

_CARD = """# {name}

{parameters:,} parameters after step {step} of the run `{name}`, exported by Valkyrie.

| file | content |
| --- | --- |
| `model.safetensors` | the tensors, by {whose} names |
| `config.json` | {whose} configuration |
| `tokenizer.*` | the tokenizer, unless the model reads bytes |

{use}
"""
_USE = {
  'valkyrie': 'Matrices are [inputs, outputs]. Valkyrie reads this folder back by '
  "`train.initial_weights = 'FOLDER'`. Its page docs/export.md shows how to compute the model "
  'without Valkyrie.',
  'components': 'Matrices are [inputs, outputs]. docs/decomposition.md shows how to compute '
  'importances and masked products from them in numpy.',
  'first_carry': "Valkyrie begins documents with it: `open_run.first_carry = 'FOLDER'`.",
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
) -> None:
  """Writes the model of a checkpoint to a new folder, which appears as a whole.

  Args:
    model_dir, step: of the checkpoint, or of several, see `weights.restored`.
    output: the folder.
    opened: opens the run.
    model: the class of the model.
    form: 'valkyrie'; 'huggingface', of full attention (Llama, Qwen3) or only of a window (Mistral);
      'components', of a decomposition, at one step; or 'first_carry', only of a learned carry, with
      the norm that tells its weights from others.

  Raises:
    ConfigurationError: the run has no such step, or the model has not that form.
    StorageError: the folder is there already, or cannot be written.
  """
  check_choice('export.form', form, _USE)
  folder = pathlib.Path(with_home(output))
  if os.path.lexists(folder):
    raise StorageError(f'{folder} is there already. Name another --output, or move it away.')
  theirs = huggingface.configuration_of(model) if form == 'huggingface' else None
  with doing('reading the checkpoint'):
    loaded = opened(model_dir, step)
  steps = ', '.join(map(str, loaded.steps))
  arrays = _components(loaded) if form == 'components' else _arrays(loaded)
  if form == 'first_carry':
    arrays = {n: a for n, a in arrays.items() if n == 'final_norm.scale' or '.first_carry' in n}
    if len(arrays) < 2:
      raise ConfigurationError(
        "export.form='first_carry' needs a run with LanguageModel.learned_carry = True."
      )
  count = sum(array.size for array in arrays.values())
  if theirs is None:
    config: dict[str, Any] = {
      'format': named_tensors.FORMAT,
      'version': __version__,
      'steps': [*loaded.steps],
      'parameters': count,
      'vocabulary': loaded.tokenizer.fingerprint,
      'vocabulary_size': loaded.model.about.vocabulary_size,
      'eos_id': loaded.tokenizer.eos_id,
      'bos': [*loaded.tokenizer.bos],
      'model': _of_model(record.bindings(), form),
    }
  else:
    config, scale = theirs
    bos = next(iter(loaded.tokenizer.bos), None)
    config |= {'eos_token_id': loaded.tokenizer.eos_id, 'bos_token_id': bos}
    if not config['tie_word_embeddings']:
      arrays.setdefault('unembedding', arrays['embedding'])
    embedding = arrays['embedding']
    arrays['embedding'] = (scale * embedding).astype(embedding.dtype)
    arrays = huggingface.renamed(arrays, huggingface.THEIRS)
  name = pathlib.Path(model_dir).resolve().name
  whose = "Valkyrie's" if theirs is None else "Hugging Face's"
  card = _CARD.format(name=name, parameters=count, step=steps, whose=whose, use=_USE[form])
  message = f'{folder} cannot be written'
  with storage_errors(message, 'Name another --output.'), owned.new_folder(folder) as unfinished:
    # transformers asks for this format; it says nothing about the content.
    named_tensors.write(unfinished / 'model.safetensors', arrays, {'format': 'pt'})
    (unfinished / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    (unfinished / 'README.md').write_text(card)
    vocabularies.copy(loaded.tokenizer, unfinished)
  print(f'step {steps}: {count:,} parameters in {output}')


def _arrays(loaded: LoadedModel) -> dict[str, np.ndarray]:
  """The arrays by name on the host: adapters merged, tables without the vocabulary's padding."""
  merged = named_tensors.merged(named_tensors.of_params(loaded.params))
  whole = {name: tensor.read((slice(None),) * len(tensor.shape)) for name, tensor in merged.items()}
  size = loaded.model.about.vocabulary_size
  return whole | {name: whole[name][:size] for name in named_tensors.TABLES if name in whole}


def _components(loaded: LoadedModel) -> dict[str, np.ndarray]:
  """The arrays of the sites of a decomposition, by name and layer."""
  sites = sites_of(loaded.model.parameters())
  if not sites or len(loaded.steps) != 1:
    raise ConfigurationError(
      f"export.form='components' needs one step of a run with LanguageModel.sites; found "
      f'{len(loaded.steps)} steps and {len(sites)} sites. Name one --step of such a run.'
    )
  with open_to_read(loaded.model_dir, str(loaded.steps[0])) as directory:
    params = directory.restore_evaluated()
    functions = {  # by the path of their site, or of a stack for all
      name if name.startswith('model/') else f'{module}/{name}': array
      for module, group in params.items()
      if module.partition('/')[0] == 'decomposition'
      for name, array in group.items()
    }
  names = named_tensors.names_of(loaded.model.parameters())
  found = {n.replace('/', '.'): a for n, a in functions.items() if n.startswith('decomposition')}
  for path, site in sites.items():
    v, u = site.factors(loaded.params)
    parts = {'': site.target(loaded.params), V: v, U: u}
    parts |= {f'_{n[len(path) + 1 :]}': a for n, a in functions.items() if n.startswith(f'{path}/')}
    for layer, name in enumerate(names[path]):
      found |= {name + part: np.asarray(array[layer]) for part, array in parts.items()}
  return found


def _of_model(bindings: dict[str, Any], form: str) -> dict[str, Any]:
  """The bindings of the model's parts, Valkyrie's and others: no path, no seed."""
  rooms = ('models.', 'decomposition.') if form == 'components' else 'models.'

  def is_part(name: str) -> bool:
    package, _, rest = check.find(name.rpartition('.')[0]).wrapped.__module__.partition('.')
    return rest.startswith(rooms) if package == 'valkyrie' else package != 'optax'

  return {name: value for name, value in bindings.items() if is_part(name)}
