"""The run mode `components`: where each component of a decomposition is important, as a page.

    model_dir/components_STEP/          see `page`
    model_dir/clusters_STEP.json        see `clusters`
    model_dir/labels_STEP/              see `labels`; the page shows the labels that are there

See `harvest` for what is read.
"""

from collections.abc import Callable, Sequence
import json
import pathlib

import gin
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import NonNegativeInt, PositiveInt, checked
from valkyrie.errors import write_errors
from valkyrie.inference.reader import Reader
from valkyrie.lab.decomposition import labels, masking, own_text, page
from valkyrie.lab.decomposition.clusters import as_json
from valkyrie.lab.decomposition.clusters import clustered as find_clusters
from valkyrie.lab.decomposition.evaluation import ComponentScores
from valkyrie.lab.decomposition.harvest import harvest
from valkyrie.lab.decomposition.passes import Passes
from valkyrie.lab.decomposition.split import SplitReader, component_scores
from valkyrie.lab.decomposition.text_patterns import of_text
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
  patterns_of = _patterns(model, evaluation, scores, params)
  readings = [own_text.read(reader, patterns_of, vocabulary, *named) for named in contents.items()]
  numbers = '_'.join(str(number) for number in steps)
  folder = pathlib.Path(model_dir, f'labels_{numbers}')
  if labeled:
    asked = harvest(reader, shown=labeled, windows=windows, held_out=held_out)
    count = labels.write(folder, asked, vocabulary.decode, scores.threshold)
    print(f'{folder / labels.PROMPTS}: asks for labels of {count:,} components')
  of_places = labels.by_place(folder)
  sites = labels.with_labels(harvest(reader, shown=shown, windows=windows), of_places)
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


def _patterns(
  model: Model,
  evaluation: Evaluator,
  scores: ComponentScores,
  params: Params,
) -> Callable[[np.ndarray], own_text.Patterns]:
  """A function that finds the attention patterns of a text."""
  if not model.about.carried:  # such a model reads no text of several chunks
    return lambda _: {}
  passes = Passes(Reader(model, evaluation.chunk_size), scores)
  return lambda ids: of_text(passes, params, ids, masking.IMPORTANT, _QUERIES)
