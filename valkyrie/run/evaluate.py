"""The run mode `eval`: a run's newest checkpoint on the whole validation split."""

from collections.abc import Callable, Sequence
import pathlib

import gin
import jax

from valkyrie.checkpoint.manager import Checkpoints
from valkyrie.config.computation import may_change_on_resume
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel, Model
from valkyrie.monitoring import plot
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.writers import create_writers
from valkyrie.run.evaluator import CUTS, Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.types import Params


def restored_params(
  model: Model,
  partitioner: Partitioner,
  checkpoints: Checkpoints,
  model_dir: str,
  vocabulary: Vocabulary,
) -> tuple[Params, int]:
  """The parameters of a run's newest checkpoint, averaged if it has an average, and its step.

  Raises:
    ConfigurationError: the run has no checkpoint, or one of another model or vocabulary.
  """
  shapes = {
    module: {name: p.shape for name, p in group.items()}
    for module, group in model.parameters().items()
  }
  target = jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    partitioner.shardings(shapes, model.parameter_axes(partitioner.parameter_axes)),
  )
  with checkpoints.open(model_dir, read_only=True) as directory:
    step, record = directory.latest_step(), directory.latest_record()
    if record is None or step is None:
      raise ConfigurationError(
        f'{model_dir} contains no checkpoint. Train there first, or pass the --model_dir of a run.'
      )
    if record['vocabulary'] != vocabulary.fingerprint:
      raise ConfigurationError(
        f'{model_dir} was trained with the vocabulary {record["vocabulary"]}, but '
        f'{vocabulary.fingerprint} is given: its ids mean other texts. Bind the vocabulary that '
        f'{model_dir}/config.gin names.'
      )
    return directory.restore_evaluated(target), step


@may_change_on_resume()
@gin.configurable
def evaluate(
  model_dir: str,
  *,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  evaluator: Callable[..., Evaluator],
  checkpoints: Checkpoints,
  cuts: Sequence[str] = (),
) -> None:
  """Evaluates a run's newest checkpoint on the whole validation split; writes and prints metrics.

  Args:
    model_dir: the directory of the run.
    model, partitioner, evaluator: the classes of the parts.
    checkpoints: the checkpoints that the run keeps.
    cuts: parts of the carry, 'state' or 'all'. For each, one more evaluation resets it before every
      chunk, and writes to model_dir/eval_cut_NAME.
  """
  for cut in cuts:
    if cut not in CUTS:
      raise ConfigurationError(f'evaluate.cuts contains {cut!r}. Use {CUTS}.')
  functions, mesh = language_model.transform(model), partitioner()
  measure = evaluator(functions, mesh)
  params, step = restored_params(functions, mesh, checkpoints, model_dir, measure.vocabulary)
  found = {}
  for cut in (None, *cuts):
    title = 'validation' if cut is None else f'validation, {cut} carry cut between chunks'
    found[title] = metrics = measure(params, whole=True, cut=cut)
    with create_writers(model_dir, name='eval' if cut is None else f'eval_cut_{cut}') as writer:
      writer.write_scalars(step, metrics)
    if jax.process_index() == 0:
      print(f'step {step}, {title}: ' + ', '.join(describe(metrics)))
  if jax.process_index() == 0:
    plot.write_loss_by_position(pathlib.Path(model_dir), found)
