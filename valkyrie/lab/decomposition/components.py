"""The run mode `components`: where each component of a decomposition is important, as a page.

    model_dir/components_STEP/          see `page`
    model_dir/clusters_STEP.json        see `clusters`
    model_dir/labels_STEP/              see `labels`; the page shows the labels that are there

See `harvest` for what is read.
"""

from collections.abc import Callable, Iterable, Sequence
import json
import pathlib

import gin
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import NonNegativeInt, PositiveInt, checked
from valkyrie.errors import is_there, write_errors
from valkyrie.inference.reader import Reader
from valkyrie.lab.decomposition import exchange, labels, masking, own_text, page, text_patterns
from valkyrie.lab.decomposition.clusters import as_json
from valkyrie.lab.decomposition.clusters import clustered as find_clusters
from valkyrie.lab.decomposition.harvest import harvest
from valkyrie.lab.decomposition.passes import Passes
from valkyrie.lab.decomposition.split import SplitReader, component_scores
from valkyrie.lab.decomposition.text_patterns import TextChunk, has_patterns
from valkyrie.models import language_model
from valkyrie.models.model import Model
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.training.setup import StepSettings
from valkyrie.types import Params
from valkyrie.weights.changed import changed_bindings
from valkyrie.weights.restored import restored_params

_QUERIES = 128  # the last tokens of a text, whose attention patterns are shown
_SHOWN_PARTS = ('components.evaluator', 'StepSettings.model', 'StepSettings.objective')


@may_change_on_resume()
@gin.configurable
@checked
def components(
  model_dir: str,
  *,
  evaluator: Callable[..., Evaluator],
  settings: Callable[[], StepSettings],
  step: str = LATEST,
  shown: PositiveInt = 20,
  windows: PositiveInt = 6,
  clustered: NonNegativeInt = 1000,
  labeled: NonNegativeInt = 0,
  held_out: NonNegativeInt = 20,
  texts: Sequence[str] = (),
) -> None:
  """Writes a page about the components of a run's checkpoint, and clusters, on one device.

  Args:
    model_dir: the directory of the run.
    evaluator: reads the split.
    settings: the settings of the run, whose objective decomposes the model.
    step: the checkpoint, see `weights.restored`.
    shown: components of each site, the most frequent ones that are alive.
    windows: texts of each component.
    clustered: components that are clustered by their activity, the most frequent ones; 0 for none.
    labeled: components of each site that get a prompt which asks for a label, the most frequent
      ones that are alive.
    held_out: passages of each that no prompt shows, by which its label is scored; an even number.
    texts: files of text, which the page shows with the components that are active in them.

  Raises:
    ConfigurationError: there is no such step, or the run decomposes nothing.
    DataError: a text cannot be read.
    StorageError: the page cannot be written.
  """
  contents = {name: own_text.content(name) for name in texts}
  step_settings = settings()
  scores = component_scores(step_settings)
  layout = Partitioner((('data', 1),), (), (), manual=True)
  model = language_model.transform(step_settings.model)
  evaluation = evaluator(model, layout, terms=(scores,))
  vocabulary = evaluation.vocabulary
  params, steps = restored_params(evaluation.model, layout, model_dir, vocabulary, step)
  evaluation.open()
  reader = SplitReader(evaluation, scores, params)
  readings = []
  if contents:
    chunks_of = text_chunks(model, evaluation.chunk_size, reader, params)
    for name, text in contents.items():
      ids = vocabulary.begun(text)
      readings.append(own_text.read(name, ids, chunks_of(ids), scores.threshold))
  numbers = '_'.join(str(number) for number in steps)
  folder = pathlib.Path(model_dir, f'labels_{numbers}')
  # What others write is refused before the harvest.
  answers = exchange.read_answers(folder / labels.LABELS)
  described: Sequence[labels.Described] = ()
  if answers and not labeled and is_there(folder / labels.COMPONENTS):
    described = labels.described(folder)
  found = harvest(reader, shown=shown, windows=windows, labeled=labeled, held_out=held_out)
  if labeled:
    described = labels.write(folder, found.labeled, vocabulary.decode, scores.threshold)
    print(f'{folder / labels.PROMPTS}: asks for labels of {len(described):,} components')
  sites = labels.with_labels(found.shown, labels.by_place(described, answers))
  clusters = None
  if clustered:
    clusters = find_clusters(reader.importances, scores.threshold, most=clustered)
    path = pathlib.Path(model_dir, f'clusters_{numbers}.json')
    whole_file.write(path, json.dumps(as_json(clusters), indent=1) + '\n')
    print(f'{path}: {len(clusters.clusters):,} clusters of components that are active together')
  run_name = pathlib.Path(model_dir).resolve().name
  title = [f'{run_name}, step {numbers.replace("_", ", ")}']
  for line in changed_bindings(model_dir, step, _SHOWN_PARTS):
    print(f'changed since the checkpoint: {line}')
    title.append(line)
  content = page.PageContent('; '.join(title), sites, clusters, readings)
  path = pathlib.Path(model_dir, f'components_{numbers}')
  with write_errors(f'{path} cannot be written'):
    page.write(path, content, vocabulary.decode)
  count = sum(len(site.components) for site in sites)
  alive = sum(site.alive for site in sites)
  print(f'{path / page.START}: {count:,} of the {alive:,} components that are alive')


def text_chunks(
  model: Model,
  chunk_size: int,
  split: SplitReader,
  params: Params,
) -> Callable[[np.ndarray], Iterable[TextChunk]]:
  """A function that reads a text: with attention patterns, if the model has some to show."""

  def without_patterns(ids):
    return (TextChunk(importances, {}) for importances in split.document(ids))

  if not model.about.carried:
    print(
      'The page shows no attention patterns: FullAttention.carried is False, so the model reads '
      'each chunk alone. Bind FullAttention.carried = True to see them; the parameters stay the '
      'same.'
    )
    return without_patterns
  reader = Reader(model, chunk_size)
  if not has_patterns(reader, params):
    return without_patterns
  passes = Passes(reader, split.scores)
  return lambda ids: text_patterns.read(passes, params, ids, masking.IMPORTANT, _QUERIES)
