"""Opens the model of a run, with its own configuration or the one of the process."""

from collections.abc import Callable, Sequence
import functools
import os

import gin

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.load import Configuration, check_call, load_gin
from valkyrie.config.modules import CONFIGURABLE_MODULES
from valkyrie.config.ranges import PositiveInt
from valkyrie.data import vocabularies
from valkyrie.errors import ConfigurationError
from valkyrie.inference.carry_origin import origin_of
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage.run_directory import opened
from valkyrie.weights.first_carry import with_first_carry
from valkyrie.weights.restored import restored_params, stored_params


@may_change_on_resume()
@gin.configurable
def open_run(
  model_dir: str | os.PathLike,
  step: str = LATEST,
  configuration: Configuration | None = None,
  *,
  model: Callable[..., LanguageModel],
  vocabulary: str,
  chunk_size: PositiveInt,
  first_carry: str | None = None,
  lazily: bool = False,
) -> LoadedModel:
  """The model of a run, on one device.

  Args:
    model_dir, step: name the checkpoint, see `weights.restored`.
    configuration: the model is traced under it; None means the configuration of the process.
    model: the class of the model.
    vocabulary: 'bytes', or the path of a SentencePiece .model or a tokenizer.json.
    chunk_size: the largest number of tokens of a row that are read at once.
    first_carry: an export or a run that has learned one with these weights; None begins with zeros.
    lazily: parameters stay in the checkpoint: `np.asarray` reads one, and the model reads no text.

  Raises a ConfigurationError if the run has no such step, or has another model or vocabulary.
  """
  functions = language_model.transform(model)
  tokenizer = vocabularies.load(vocabulary)
  if lazily:
    params, steps = stored_params(functions, model_dir, tokenizer, step)
  else:
    one_device = Partitioner((('data', 1),), (), (), manual=True)
    params, steps = restored_params(functions, one_device, model_dir, tokenizer, step)
  given = None
  if first_carry is not None:
    model = functools.partial(model, learned_carry=True)
    functions = language_model.transform(model)
    given = with_first_carry(functions, model, params, first_carry)
    params = given
  origin = origin_of(model_dir, steps, tokenizer, given)
  if configuration is not None:  # the functions read gin while they are traced
    inside = configuration.installed  # a context that decorates functions
    traced = {}
    for name in ('init', 'initial_carry', 'apply', 'parameters'):
      function = getattr(functions, name)
      traced[name] = inside()(function)
    functions = functions._replace(**traced)
  return LoadedModel(
    functions,
    params,
    tokenizer,
    model_dir=model_dir,
    steps=steps,
    chunk_size=chunk_size,
    origin=origin,
  )


def load(
  model_dir: str | os.PathLike,
  step: str | int = LATEST,
  *,
  bindings: Sequence[str] = (),
  allow_import: Sequence[str] = (),
) -> LoadedModel:
  """Opens a run with its own configuration, on one device. Any number of runs can be open.

  Args:
    model_dir: the directory of the run, or its address in a bucket.
    step: the number of a step, 'latest', 'best' (the one with the lowest validation loss), or
      numbers separated by commas for the mean of their parameters.
    bindings: override the bindings of the run, as on the command line: 'open_run.chunk_size=512'.
    allow_import: packages of yours that the configuration may import, and thereby execute.

  Raises:
    ConfigurationError: there is no such run or step, or its configuration cannot be loaded.
    StorageError: the files cannot be read.
  """
  directory, configuration = configured(model_dir, bindings, allow_import)
  return load_configured(directory, step, configuration)


def configured(
  model_dir: str | os.PathLike,
  bindings: Sequence[str],
  allow_import: Sequence[str],
) -> tuple[str | os.PathLike, Configuration]:
  """The directory of a run, and its configuration; see `load` for the arguments and errors."""
  directory = opened(model_dir)
  if isinstance(bindings, str):
    raise ConfigurationError(
      f'bindings={bindings!r:.80} is one text. Use a list, such as ["open_run.chunk_size=512"].'
    )
  flags = [f'--gin.{binding}' for binding in bindings]
  modules = CONFIGURABLE_MODULES
  configuration = Configuration(
    lambda: load_gin([], flags, run=directory, allowed_imports=allow_import, modules=modules)
  )
  return directory, configuration


def load_configured(
  directory: str | os.PathLike,
  step: str | int,
  configuration: Configuration,
  **options: bool,
) -> LoadedModel:
  """Opens a run with a configuration of its own; see `load`, and `open_run` for the options."""
  with configuration.installed():
    check_call(open_run, 'model_dir', 'step', 'configuration')
    open_it: Callable[..., LoadedModel] = open_run  # gin gives the other arguments
    return open_it(directory, str(step), configuration, **options)
