"""The run mode `components`: where each component of a decomposition is important, on one page.

    model_dir/components_STEP.html
    model_dir/clusters_STEP.json        see `clusters`

The validation split is read twice. The first pass counts how often each component is active. The
second pass keeps, for the most frequent components, the windows with the largest importances, and
counts their tokens. Memory grows with the components that are shown, not with the tokens.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import heapq
import json
import pathlib
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import NonNegativeInt, PositiveInt, checked
from valkyrie.lab.decomposition.clusters import as_json
from valkyrie.lab.decomposition.clusters import clustered as find_clusters
from valkyrie.lab.decomposition.evaluation import ALIVE
from valkyrie.lab.decomposition.masks import ordered
from valkyrie.lab.decomposition.page import SPAN, Component, ShownSite, Token, Window, page
from valkyrie.lab.decomposition.split import SplitChunk, SplitReader, component_scores
from valkyrie.models import language_model
from valkyrie.models.sites import sites_of
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.training.setup import StepSettings
from valkyrie.types import Batch
from valkyrie.weights.changed import changed_bindings
from valkyrie.weights.named_tensors import names_of
from valkyrie.weights.restored import restored_params

_SPARE = 3  # so many times the windows that are shown are kept, since some overlap
_SHOWN_PARTS = ('components.evaluator', 'StepSettings.model', 'StepSettings.objective')
_TOKENS = 8  # at most in a table
_LEAST_SHARE = 0.02  # of the activity of a component, for a token in a table
_LEAST_BITS = 0.1  # of information about this activity


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

  Raises:
    ConfigurationError: there is no such step, or the run decomposes nothing.
  """
  step_settings = settings()
  scores = component_scores(step_settings)
  layout = Partitioner((('data', 1),), (), (), manual=True)
  model = language_model.transform(step_settings.model)
  evaluation = evaluator(model, layout, terms=(scores,))
  vocabulary = evaluation.vocabulary
  params, steps = restored_params(evaluation.model, layout, model_dir, vocabulary, step)
  evaluation.open()
  reader = SplitReader(evaluation, scores, params)
  sites = harvest(reader, shown=shown, windows=windows)
  numbers = '_'.join(str(number) for number in steps)
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
  text = page('; '.join(title), sites, vocabulary.decode)
  path = pathlib.Path(model_dir, f'components_{numbers}.html')
  whole_file.write(path, text.encode(errors='replace'))
  count = sum(len(site.components) for site in sites)
  alive = sum(site.alive for site in sites)
  print(f'{path}: {count:,} of the {alive:,} components that are alive')


def harvest(reader: SplitReader, *, shown: int, windows: int) -> list[ShownSite]:
  """What the page shows of each site, from the first layer to the last."""
  counts = _count(reader)
  # The most frequent components first, and those that are not alive last.
  order = {}
  for path, share in counts.shares.items():
    mean = counts.means[path]
    order[path] = np.lexsort((-mean, -share, mean <= ALIVE))
  numbers = {path: first[:, :shown] for path, first in order.items()}
  kept = _collect(reader, numbers, windows)

  names = names_of(reader.model.parameters())
  sites = []
  for path, layer in ordered(sites_of(reader.model.parameters())):
    mean = counts.means[path][layer]
    share = counts.shares[path][layer]
    alive = int((mean > ALIVE).sum())
    components = []
    for number, texts in zip(numbers[path][layer][:alive], kept[path, layer], strict=False):
      components.append(
        Component(
          number=int(number),
          mean=float(mean[number]),
          share=float(share[number]),
          windows=texts.best(windows),
          inputs=_telling_tokens(texts.inputs, counts.inputs),
          outputs=_telling_tokens(texts.outputs, counts.outputs),
        )
      )
    most_first = np.sort(mean)[::-1]
    site = ShownSite(names[path][layer], alive, float(share.sum()), most_first, components)
    sites.append(site)
  return sites


class _Counts(NamedTuple):
  """Counts over the split.

  means, shares: [L, C] by path: the mean importance of each component, and the share of tokens at
    which it is active.
  inputs, outputs: [V], how often each token is read, and how often it follows.
  """

  means: Mapping[str, np.ndarray]
  shares: Mapping[str, np.ndarray]
  inputs: np.ndarray
  outputs: np.ndarray


def _count(reader: SplitReader) -> _Counts:
  """The first pass over the split."""
  threshold = reader.scores.threshold

  @jax.jit
  def sum_over_tokens(low, batch):
    real = (batch.segment_ids > 0).astype(jnp.float32)
    active = jax.tree.map(lambda g: (g > threshold).astype(g.dtype), low)
    return jax.tree.map(lambda g: jnp.einsum('lbtc,bt->lc', g, real), (low, active))

  inputs = np.zeros(reader.vocabulary_size)
  outputs = np.zeros(reader.vocabulary_size)
  totals: Any = None
  for chunk in reader.chunks():
    sums = jax.device_get(sum_over_tokens(chunk.importances, chunk.batch))
    if totals is not None:
      sums = jax.tree.map(np.add, totals, sums)
    totals = sums
    read, following = _pairs(chunk.batch, reader.eos)
    np.add.at(inputs, read, 1)
    np.add.at(outputs, following, 1)
  tokens = inputs.sum()
  means, shares = jax.tree.map(lambda total: total / tokens, totals)
  return _Counts(means, shares, inputs, outputs)


def _collect(
  reader: SplitReader, numbers: Mapping[str, np.ndarray], windows: int
) -> dict[tuple[str, int], list['_Kept']]:
  """The second pass over the split: what is kept of the components `numbers` [L, M] by path."""

  @jax.jit
  def choose(low, numbers):
    chosen = {}
    for path, first in numbers.items():
      chosen[path] = jnp.take_along_axis(low[path], first[:, None, None], axis=-1)
    return chosen

  kept = {}
  for path, first in numbers.items():
    for layer, of_layer in enumerate(first):
      kept[path, layer] = [_Kept(windows * _SPARE) for _ in of_layer]
  random = np.random.default_rng(reader.scores.seed)
  for chunk in reader.chunks():
    importances = jax.device_get(choose(chunk.importances, numbers))
    for path, by_layer in importances.items():
      for layer, g in enumerate(by_layer):
        _add_counts(kept[path, layer], chunk.batch, g > reader.scores.threshold, reader.eos)
        _add_windows(kept[path, layer], chunk, g, random)
  return kept


class _Kept:
  """What is kept of a component: its windows, and how often each token has it active.

  Attributes:
    inputs, outputs: counts of the tokens at which it is active, and of the tokens that follow.
  """

  def __init__(self, size: int):
    """Keeps at most `size` windows, as (key, place, window)."""
    self.inputs = Counter[int]()
    self.outputs = Counter[int]()
    self._size = size
    self._windows = []

  @property
  def least(self) -> float:
    """The key that a further window has to exceed."""
    if len(self._windows) < self._size:
      return 0.0
    return self._windows[0][0]

  def add(self, key: float, place: tuple[str, int, int], window: Window) -> None:
    """Adds a window around a place: (source, row, position)."""
    if len(self._windows) < self._size:
      heapq.heappush(self._windows, (key, place, window))
    else:
      heapq.heapreplace(self._windows, (key, place, window))

  def best(self, count: int) -> list[Window]:
    """The windows with the largest keys that neither overlap nor have the same tokens."""
    places: list[tuple[str, int, int]] = []
    windows: list[Window] = []
    largest_first = sorted(self._windows, key=lambda kept: -kept[0])
    for _, place, window in largest_first:
      overlaps = any(_overlap(place, other) for other in places)
      repeats = any(np.array_equal(window.ids, other.ids) for other in windows)
      if not overlaps and not repeats:
        places.append(place)
        windows.append(window)
    return windows[:count]


def _overlap(first: tuple[str, int, int], second: tuple[str, int, int]) -> bool:
  """Whether two windows around these places (source, row, position) may have a token in common."""
  *row, position = first
  *other_row, other_position = second
  return row == other_row and abs(position - other_position) < SPAN


def _pairs(batch: Batch, eos: int, active: Any = True) -> tuple[np.ndarray, np.ndarray]:
  """The tokens that are read where `active` [B, T], and those that follow them in a document."""
  real = (batch.segment_ids > 0) & active
  has_next = real & (batch.inputs != eos)
  read = batch.inputs[real]
  following = batch.targets[has_next]
  return read, following


def _add_counts(kept: Sequence[_Kept], batch: Batch, active: np.ndarray, eos: int) -> None:
  """Counts the tokens of a chunk at which each component is active [B, T, M]."""
  for n, component in enumerate(kept):
    read, following = _pairs(batch, eos, active[..., n])
    component.inputs.update(read.tolist())
    component.outputs.update(following.tolist())


def _add_windows(
  kept: Sequence[_Kept], chunk: SplitChunk, g: np.ndarray, random: np.random.Generator
) -> None:
  """Adds the windows of a chunk with large importances g [B, T, M] of these M components.

  A candidate in each stretch of SPAN tokens: the largest importance, and random among equal ones.
  """
  batch = chunk.batch
  rows, time, count = g.shape
  is_token = batch.segment_ids[..., None] > 0
  real = np.where(is_token, g, 0)
  missing = -time % SPAN
  padded = np.pad(real, ((0, 0), (0, missing), (0, 0)))
  stretches = padded.reshape(rows, -1, SPAN, count)
  largest = stretches.max(axis=2)
  peaks = stretches.argmax(axis=2)
  tie_breaks = random.uniform(0.01, 0.1, largest.shape)
  broken_ties = np.round(largest, 1) + tie_breaks
  keys = np.where(largest > 0, broken_ties, 0)
  least = [component.least for component in kept]
  for row, stretch, n in np.argwhere(keys > least).tolist():
    component = kept[n]
    key = float(keys[row, stretch, n])
    if key > component.least:  # which earlier candidates may have raised
      peak = stretch * SPAN + int(peaks[row, stretch, n])
      place = (chunk.source, row, chunk.position + peak)
      window = _window(batch, g[..., n], row, peak)
      component.add(key, place, window)


def _window(batch: Batch, importances: np.ndarray, row: int, peak: int) -> Window:
  """The tokens around the peak that belong to its document."""
  time = batch.inputs.shape[1]
  begin = max(0, min(peak - SPAN // 2, time - SPAN))
  span = slice(begin, begin + SPAN)
  segments = batch.segment_ids[row]
  in_document = segments[span] == segments[peak]
  return Window(
    ids=batch.inputs[row, span][in_document],
    importances=importances[row, span][in_document],
    peak=int(in_document[: peak - begin].sum()),
  )


def _telling_tokens(counts: Counter[int], base: np.ndarray) -> list[Token]:
  """The tokens that say most about the activity of a component.

  counts: how often it is active at each token; base: [V], how often each token occurs.
  """
  total = sum(counts.values())
  least = max(2, total * _LEAST_SHARE)
  tokens = []
  for token, count in counts.items():
    if count >= least:
      share = count / total
      information = float(np.log2(count * base.sum() / (total * base[token])))
      if information > _LEAST_BITS:
        tokens.append(Token(information, share, token))
  return heapq.nlargest(_TOKENS, tokens)
