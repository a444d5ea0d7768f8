"""The run mode `export`: a folder with the model of a run, for other programs."""

from collections.abc import Callable
import pathlib
from typing import Any

import gin

from valkyrie import __version__
from valkyrie.checkpoint.manager import LATEST
from valkyrie.config import check, record
from valkyrie.config.computation import may_change_on_resume
from valkyrie.errors import ConfigurationError
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models.language_model import LanguageModel
from valkyrie.weights import exported, to_huggingface

FORMS = ('valkyrie', 'huggingface')
_CARD = """# {name}

{parameters:,} parameters after step {step} of the run `{name}`, exported by Valkyrie.

| file | content |
| --- | --- |
| `model.safetensors` | {tensors} |
| `config.json` | {config} |
| `tokenizer.*` | the tokenizer, unless the model reads bytes |

{use}
"""
_USE = {
  'valkyrie': "Valkyrie reads this folder back by `train.initial_weights = 'FOLDER'`. Its page "
  'docs/export.md shows how to compute the model without Valkyrie.',
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
  """Writes the model of a checkpoint to a new folder, see `weights.exported`.

  Args:
    model_dir: the directory of the run.
    output: the folder.
    step: of the checkpoint, or several whose mean is exported, see `weights.restored`.
    opened: opens the run.
    model: the class of the model.
    form: 'valkyrie', or 'huggingface' for a model of full attention (Llama) or only of
      a window (Mistral).

  Raises:
    ConfigurationError: the run has no such step, or the model has not that form.
    StorageError: the folder is there already, or cannot be written.
  """
  if form not in FORMS:
    raise ConfigurationError(f'export.form={form!r} is unknown. Use one of {", ".join(FORMS)}.')
  theirs = to_huggingface.configuration(model) if form == 'huggingface' else None
  loaded = opened(model_dir, step)
  steps = ', '.join(map(str, loaded.steps))
  arrays = exported.tensors(loaded.params, loaded.model.about.vocabulary_size)
  count = sum(array.size for array in arrays.values())
  if theirs is None:
    config: dict[str, Any] = {
      'format': exported.FORMAT,
      'version': __version__,
      'steps': [*loaded.steps],
      'parameters': count,
      'vocabulary': loaded.tokenizer.fingerprint,
      'vocabulary_size': loaded.model.about.vocabulary_size,
      'eos_id': loaded.tokenizer.eos_id,
      'model': _of_model(record.bindings()),
    }
    words = 'tensors, matrices as [inputs, outputs]', 'sizes, and the bindings of the model'
  else:
    config, scale = theirs
    config |= {'eos_token_id': loaded.tokenizer.eos_id, 'bos_token_id': None}
    arrays = to_huggingface.renamed(arrays, config, scale)
    words = "tensors by Hugging Face's names", "Hugging Face's configuration"
  card = _CARD.format(
    name=pathlib.Path(model_dir).resolve().name,
    parameters=count,
    step=steps,
    tensors=words[0],
    config=words[1],
    use=_USE[form],
  )
  exported.write(pathlib.Path(output), arrays, config, card, loaded.tokenizer)
  print(f'step {steps}: {count:,} parameters in {output}')


def _of_model(bindings: dict[str, Any]) -> dict[str, Any]:
  """The bindings of the model's parts, Valkyrie's and others: no path, no seed."""

  def is_part(name: str) -> bool:
    module = check.find(name.rpartition('.')[0]).wrapped.__module__
    return module.startswith('valkyrie.models.') or module.partition('.')[0] not in (
      'valkyrie',
      'optax',
    )

  return {name: value for name, value in bindings.items() if is_part(name)}
