"""The run mode `components`: where each component of a decomposition is important, on one page.

    model_dir/components_STEP.html

Two passes over the validation split. The first one counts how often each component is active. The
second one keeps, of the most frequent, the windows with the largest importances, and counts tokens.
Memory grows with the components that are shown, not with the tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
import heapq
import itertools
import pathlib
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.checkpoint.manager import LATEST
from valkyrie.config import ranges
from valkyrie.config.computation import may_change_on_resume
from valkyrie.data.feed import prefetch
from valkyrie.errors import ConfigurationError
from valkyrie.lab.decomposition.evaluation import ALIVE, ComponentScores
from valkyrie.lab.decomposition.page import SPAN, Component, ShownSite, Token, Window, page
from valkyrie.models import language_model
from valkyrie.models.features import SITES
from valkyrie.run.evaluator import Evaluator
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.storage import whole_file
from valkyrie.training.objective import evaluations, terms_of
from valkyrie.training.setup import StepSettings
from valkyrie.types import Array, Batch, Params
from valkyrie.weights.named_tensors import names_of
from valkyrie.weights.restored import restored_params

_SPARE = 3  # times the windows are kept, since some overlap
_TOKENS = 8  # of a table
_LEAST_SHARE, _LEAST_BITS = 0.02, 0.1  # of a token in it


@may_change_on_resume()
@gin.configurable
def components(
  model_dir: str,
  *,
  evaluator: Callable[..., Evaluator],
  settings: Callable[[], StepSettings],
  step: str = LATEST,
  shown: int = 20,
  windows: int = 6,
) -> None:
  """Writes a page about the components of a run's checkpoint, on one device.

  Args:
    evaluator: reads the split.
    settings: of the run, whose objective decomposes the model.
    step: of the checkpoint, see `weights.restored`.
    shown: components of each site, the most frequent ones that are alive.
    windows: texts of each component.

  Raises a ConfigurationError without such a step, or if the run decomposes nothing.
  """
  ranges.check('components', shown=shown, windows=windows)
  made = settings()
  terms = evaluations(terms_of(made.objective))
  scores = next((term for term in terms if isinstance(term, ComponentScores)), None)
  if scores is None:
    raise ConfigurationError(
      'StepSettings.objective decomposes nothing, so there are no components to show. Name the '
      '--model_dir of a run with @Decomposition in StepSettings.objective.'
    )
  device = Partitioner((('data', 1),), (), (), manual=True)
  measure = evaluator(language_model.transform(made.model), device, terms=(scores,))
  params, steps = restored_params(measure.model, device, model_dir, measure.vocabulary, step)
  measure.open()
  sites = harvest(measure, scores, params, shown=shown, windows=windows)
  numbers = [*map(str, steps)]
  title = f'{pathlib.Path(model_dir).resolve().name}, step {", ".join(numbers)}'
  path = pathlib.Path(model_dir, f'components_{"_".join(numbers)}.html')
  text = page(title, sites, measure.vocabulary.decode)
  whole_file.write(path, text.encode(errors='replace'))
  count = sum(len(site.components) for site in sites)
  print(f'{path}: {count:,} of {sum(site.alive for site in sites):,} components that are alive')


class _Chunk(NamedTuple):
  """A chunk, the source and the position of its tokens, and g [L, B, T, C] by path."""

  source: str
  position: int
  batch: Batch
  importances: Mapping[str, Array]


def harvest(
  measure: Evaluator, scores: ComponentScores, params: Params, *, shown: int, windows: int
) -> list[ShownSite]:
  """What the page shows of each site, from the first layer to the last."""
  model = measure.model
  eos = measure.vocabulary.eos_id

  @jax.jit
  def read(carry, batch):
    of_model, of_importance = carry
    features, of_model = model.read(params, of_model, batch, activations=(SITES,))
    low, of_importance = scores.importances(model, params, features, of_importance, batch)
    return low, (of_model, of_importance)

  @jax.jit
  def totals(low, batch):
    real = (batch.segment_ids > 0).astype(jnp.float32)
    active = jax.tree.map(lambda g: (g > scores.threshold).astype(g.dtype), low)
    return jax.tree.map(lambda g: jnp.einsum('lbtc,bt->lc', g, real), (low, active))

  @jax.jit
  def chosen(low, numbers):
    return {path: jnp.take_along_axis(low[path], numbers[path], axis=-1) for path in numbers}

  def chunks() -> Iterator[_Chunk]:
    for source, feed in measure.sources.items():
      spans = measure.spans(feed, whole=True)
      fresh = model.initial_carry(measure.batch_size)
      carry: Any = {'model': fresh['model']}, fresh[scores.name].importance
      for (position, _), batch in zip(spans, prefetch(feed, spans), strict=True):
        low, carry = read(carry, batch)
        yield _Chunk(source, position, batch, low)

  sums: Any = None
  inputs, outputs = base = np.zeros((2, model.about.vocabulary_size))
  for chunk in chunks():
    more = jax.device_get(totals(chunk.importances, chunk.batch))
    sums = more if sums is None else jax.tree.map(np.add, sums, more)
    for counts, ids in zip(base, _pairs(chunk.batch, eos), strict=True):
      np.add.at(counts, ids, 1)
  means, shares = jax.tree.map(lambda total: total / inputs.sum(), sums)
  order = {  # of components, the most frequent first, and those that are not alive last
    path: np.lexsort((-means[path], -share, means[path] <= ALIVE)) for path, share in shares.items()
  }
  numbers = {path: first[:, None, None, :shown] for path, first in order.items()}
  kept = {
    (path, layer): [_Kept(windows * _SPARE) for _ in range(first.shape[-1])]
    for path, first in numbers.items()
    for layer in range(len(first))
  }
  random = np.random.default_rng(scores.seed)
  for chunk in chunks():
    for path, found in jax.device_get(chosen(chunk.importances, numbers)).items():
      for layer, g in enumerate(found):
        _collect(kept[path, layer], chunk, g, scores.threshold, eos, random)

  names = names_of(model.parameters())
  sites = []
  for path, layer in sorted(kept, key=lambda site: site[1]):
    mean = means[path][layer]
    share = shares[path][layer]
    alive = int((mean > ALIVE).sum())
    some = [
      Component(
        int(number),
        float(mean[number]),
        float(share[number]),
        of.best(windows),
        _telling(of.inputs, inputs),
        _telling(of.outputs, outputs),
      )
      for number, of in zip(order[path][layer][:alive], kept[path, layer], strict=False)
    ]
    active = float(share.sum())
    means_down = np.sort(mean)[::-1]
    sites.append(ShownSite(names[path][layer], alive, active, means_down, some))
  return sites


class _Kept:
  """What is kept of a component: its windows, and how often each token has it active."""

  def __init__(self, size: int):
    """Keeps at most `size` windows, as (key, place, window)."""
    self.inputs = Counter[int]()
    self.outputs = Counter[int]()
    self._size = size
    self._windows = []

  @property
  def least(self) -> float:
    """The key that a further window has to exceed."""
    return self._windows[0][0] if len(self._windows) == self._size else 0.0

  def add(self, key: float, place: tuple[str, int, int], window: Window) -> None:
    """Adds a window around a place: (source, row, position)."""
    add = heapq.heappush if len(self._windows) < self._size else heapq.heapreplace
    add(self._windows, (key, place, window))

  def best(self, count: int) -> list[Window]:
    """The windows with the largest keys that neither overlap nor have the same tokens."""
    found = []
    for _, place, window in sorted(self._windows, key=lambda kept: -kept[0]):
      overlaps = (place[:2] == other[:2] and abs(place[2] - other[2]) < SPAN for other, _ in found)
      same = (np.array_equal(window.ids, other.ids) for _, other in found)
      if not any(itertools.chain(overlaps, same)):
        found.append((place, window))
    return [window for _, window in found[:count]]


def _pairs(batch: Batch, eos: int, active: Any = True) -> tuple[np.ndarray, np.ndarray]:
  """The tokens that are read where `active` [B, T], and those that follow them in a document."""
  real = (batch.segment_ids > 0) & active
  return batch.inputs[real], batch.targets[real & (batch.inputs != eos)]


def _collect(
  kept: list[_Kept],
  chunk: _Chunk,
  g: np.ndarray,
  threshold: float,
  eos: int,
  random: np.random.Generator,
) -> None:
  """Adds a chunk with importances g [B, T, M] of these M components of a site."""
  batch, (rows, time, count) = chunk.batch, g.shape
  for n, component in enumerate(kept):
    read, following = _pairs(batch, eos, g[..., n] > threshold)
    component.inputs.update(read.tolist())
    component.outputs.update(following.tolist())
  # A candidate in each stretch of SPAN tokens: the largest importance, and random among equal ones.
  real = np.where(batch.segment_ids[..., None] > 0, g, 0)
  cut = np.pad(real, ((0, 0), (0, -time % SPAN), (0, 0))).reshape(rows, -1, SPAN, count)
  largest = cut.max(2)
  peaks = cut.argmax(2)
  keys = np.where(largest > 0, np.round(largest, 1) + random.uniform(0.01, 0.1, largest.shape), 0)
  for row, stretch, n in np.argwhere(keys > [component.least for component in kept]):
    if (key := float(keys[row, stretch, n])) > kept[n].least:
      peak = int(stretch * SPAN + peaks[row, stretch, n])
      begin = max(0, min(peak - SPAN // 2, time - SPAN))
      of = batch.segment_ids[row, begin : begin + SPAN] == batch.segment_ids[row, peak]
      ids, values = (x[row, begin : begin + SPAN][of] for x in (batch.inputs, g[..., n]))
      window = Window(ids, values, int(of[: peak - begin].sum()))
      kept[n].add(key, (chunk.source, int(row), chunk.position + peak), window)


def _telling(counts: Counter[int], base: np.ndarray) -> list[Token]:
  """The tokens that say most about the activity of a component."""
  total = sum(counts.values())
  found = (
    Token(float(np.log2(n * base.sum() / (total * base[token]))), n / total, token)
    for token, n in counts.items()
    if n >= max(2, total * _LEAST_SHARE)
  )
  return heapq.nlargest(_TOKENS, (token for token in found if token.bits > _LEAST_BITS))
