"""The run mode `eval`: a run's checkpoint on the whole validation split."""

from collections.abc import Callable, Sequence
import pathlib

import gin
import jax

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.errors import ConfigurationError
from valkyrie.models import language_model
from valkyrie.models.language_model import LanguageModel
from valkyrie.monitoring import plot
from valkyrie.monitoring.progress import describe
from valkyrie.monitoring.writers import create_writers
from valkyrie.run.evaluator import CUTS, Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.weights.restored import restored_params


@may_change_on_resume()
@gin.configurable
def evaluate(
  model_dir: str,
  *,
  model: Callable[..., LanguageModel],
  partitioner: Callable[[], Partitioner],
  evaluator: Callable[..., Evaluator],
  cuts: Sequence[str] = (),
  step: str = LATEST,
) -> None:
  """Evaluates a run's checkpoint on the whole validation split; writes and prints metrics.

  Args:
    model_dir: the directory of the run.
    model, partitioner, evaluator: the classes of the parts.
    cuts: parts of the carry, 'state' or 'all'. For each, one more evaluation resets it before every
      chunk, and writes to model_dir/eval_cut_NAME.
    step: of the checkpoint: a number, 'latest' or 'best'.
  """
  for cut in cuts:
    if cut not in CUTS:
      raise ConfigurationError(f'evaluate.cuts contains {cut!r}. Use {CUTS}.')
  functions, mesh = language_model.transform(model), partitioner()
  measure = evaluator(functions, mesh)
  params, number = restored_params(functions, mesh, model_dir, measure.vocabulary, step)
  found = {}
  for cut in (None, *cuts):
    title = 'validation' if cut is None else f'validation, {cut} carry cut between chunks'
    found[title] = metrics = measure(params, whole=True, cut=cut)
    with create_writers(model_dir, name='eval' if cut is None else f'eval_cut_{cut}') as writer:
      writer.write_scalars(number, metrics)
    if jax.process_index() == 0:
      print(f'step {number}, {title}: ' + ', '.join(describe(metrics)))
  if jax.process_index() == 0:
    plot.write_loss_by_position(pathlib.Path(model_dir), found)
