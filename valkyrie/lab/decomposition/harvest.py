"""A harvest of the validation split: where each component of a decomposition is important.

The split is read twice. The first pass counts how often each component is active. The second pass
keeps, for the most frequent components, the windows with the largest importances, and counts their
tokens. Memory grows with the components that are shown, not with the tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.lab.decomposition.evaluation import ALIVE
from valkyrie.lab.decomposition.shown import SPAN, Component, ShownSite, Token, Window
from valkyrie.lab.decomposition.split import SplitChunk, SplitReader
from valkyrie.models.sites import ordered, sites_of
from valkyrie.types import Batch
from valkyrie.weights.named_tensors import names_of

_SPARE = 3  # so many times the windows that are shown are kept, since some overlap
_TOKENS = 8  # at most in a table
_LEAST_SHARE = 0.02  # of the activity of a component, for a token in a table
_LEAST_BITS = 0.1  # of information about this activity


class Harvest(NamedTuple):
  """What is shown of each site, from the first layer to the last, and what is asked of it.

  shown: with the components of a page.
  labeled: with those that get prompts. Their held-out texts come from every second chunk of a row,
    and their windows and tables from the others.
  """

  shown: list[ShownSite]
  labeled: list[ShownSite]


def harvest(
  reader: SplitReader,
  *,
  shown: int,
  windows: int,
  labeled: int = 0,
  held_out: int = 0,
) -> Harvest:
  """Reads the split.

  Args:
    reader: reads the split.
    shown, labeled: components of each site, the most frequent ones that are alive.
    windows: texts of each component.
    held_out: at most so many further texts of each labeled component, which is active in one half.
  """
  counts = _count(reader)
  # The most frequent components first, and those that are not alive last.
  numbers = {}
  for path, share in counts.shares.items():
    mean = counts.means[path]
    order = np.lexsort((-mean, -share, mean <= ALIVE))
    numbers[path] = order[:, : max(shown, labeled)]
  of_page = _Collection(reader, shown, windows, held_out=0)
  of_prompts = _Collection(reader, labeled, windows, held_out)

  @jax.jit
  def choose(low, numbers):
    chosen = {}
    for path, first in numbers.items():
      chosen[path] = jnp.take_along_axis(low[path], first[:, None, None], axis=-1)
    return chosen

  for number, chunk in enumerate(reader.chunks()):
    importances = jax.device_get(choose(chunk.importances, numbers))
    of_page.add(number, chunk, importances)
    of_prompts.add(number, chunk, importances)
  return Harvest(of_page.sites(counts, numbers), of_prompts.sites(counts, numbers))


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


class _Collection:
  """What the second pass over the split keeps of the most frequent components of each site."""

  def __init__(
    self,
    reader: SplitReader,
    components: int,
    windows: int,
    held_out: int,
  ):
    """Keeps so many windows and held-out windows of so many components of each site."""
    self._reader = reader
    self._components = components
    self._windows = windows
    self._held_out = held_out
    self._kept: dict[tuple[str, int], list[_Kept]] = {}
    sites = sites_of(reader.model.parameters())
    for path, layer in ordered(sites):
      count = min(components, sites[path].components)
      self._kept[path, layer] = [_Kept(windows, held_out) for _ in range(count)]
    self._random = np.random.default_rng(reader.scores.seed)
    self._choice = np.random.default_rng(reader.scores.seed)

  def add(self, number: int, chunk: SplitChunk, importances: Mapping[str, np.ndarray]) -> None:
    """Adds chunk `number`, with the importances [L, B, T, M] by path of M components or more."""
    threshold = self._reader.scores.threshold
    rows = np.arange(len(chunk.batch.inputs))
    is_held_out = (rows + number) % 2 == 1
    if not self._held_out:
      is_held_out[:] = False
    for (path, layer), kept in self._kept.items():
      g = importances[path][layer, ..., : self._components]
      shown = np.where(is_held_out[:, None, None], 0, g)
      _add_counts(kept, chunk.batch, shown > threshold, self._reader.eos)
      _add_windows(kept, chunk, shown, self._random)
      if self._held_out:
        _add_held_out(kept, chunk, g, is_held_out, threshold, self._choice)

  def sites(self, counts: _Counts, numbers: Mapping[str, np.ndarray]) -> list[ShownSite]:
    """What is shown of each site, whose most frequent components are `numbers` [L, M] by path."""
    names = names_of(self._reader.model.parameters())
    sites = []
    for (path, layer), kept in self._kept.items():
      mean = counts.means[path][layer]
      share = counts.shares[path][layer]
      alive = int((mean > ALIVE).sum())
      components = []
      for number, texts in zip(numbers[path][layer][:alive], kept, strict=False):
        components.append(
          Component(
            number=int(number),
            mean=float(mean[number]),
            share=float(share[number]),
            windows=texts.largest.best(self._windows),
            inputs=_telling_tokens(texts.inputs, counts.inputs),
            outputs=_telling_tokens(texts.outputs, counts.outputs),
            held_out=texts.held_out(self._held_out),
          )
        )
      most_first = np.sort(mean)[::-1]
      site = ShownSite(names[path][layer], alive, float(share.sum()), most_first, components)
      sites.append(site)
    return sites


class _Windows:
  """The windows with the largest keys, as (key, place, window)."""

  def __init__(self, size: int):
    """Keeps at most `size` windows."""
    self._size = size
    self._windows = []

  @property
  def least(self) -> float:
    """The key that a further window has to exceed."""
    if len(self._windows) < self._size:
      return 0.0
    if not self._size:
      return float('inf')
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


class _Kept:
  """What is kept of a component: its windows, and how often each token has it active.

  Attributes:
    inputs, outputs: counts of the tokens at which it is active, and of the tokens that follow.
    largest: windows with the largest importances.
    active, quiet: random windows of held-out chunks in which it is active, and in which it is not.
  """

  def __init__(self, windows: int, held_out: int):
    """Keeps enough for so many windows of each kind."""
    self.inputs = Counter[int]()
    self.outputs = Counter[int]()
    self.largest = _Windows(windows * _SPARE)
    self.active = _Windows(held_out // 2 * _SPARE)
    self.quiet = _Windows(held_out // 2 * _SPARE)

  def held_out(self, count: int) -> list[Window]:
    """At most `count` held-out windows, as many active ones as quiet ones."""
    half = count // 2
    active = self.active.best(half)
    quiet = self.quiet.best(half)
    each = min(len(active), len(quiet))
    return [*active[:each], *quiet[:each]]


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
  kept: Sequence[_Kept],
  chunk: SplitChunk,
  g: np.ndarray,
  random: np.random.Generator,
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
  stretches = padded.reshape(rows, padded.shape[1] // SPAN, SPAN, count)
  largest = stretches.max(axis=2)
  peaks = stretches.argmax(axis=2)
  tie_breaks = random.uniform(0.01, 0.1, largest.shape)
  broken_ties = np.round(largest, 1) + tie_breaks
  keys = np.where(largest > 0, broken_ties, 0)
  least = [component.largest.least for component in kept]
  for row, stretch, n in np.argwhere(keys > least).tolist():
    windows = kept[n].largest
    key = float(keys[row, stretch, n])
    if key > windows.least:  # which earlier candidates may have raised
      peak = stretch * SPAN + int(peaks[row, stretch, n])
      place = (chunk.source, row, chunk.position + peak)
      window = _window(batch, g[..., n], row, peak)
      windows.add(key, place, window)


def _add_held_out(
  kept: Sequence[_Kept],
  chunk: SplitChunk,
  g: np.ndarray,
  is_held_out: np.ndarray,
  threshold: float,
  random: np.random.Generator,
) -> None:
  """Adds random windows of a chunk's held-out rows [B], with importances g [B, T, M].

  A candidate in each stretch of SPAN tokens: its largest importance, or its middle if the component
  is not active there.
  """
  batch = chunk.batch
  is_token = batch.segment_ids > 0
  least_active = np.array([component.active.least for component in kept])
  least_quiet = np.array([component.quiet.least for component in kept])
  for row in np.flatnonzero(is_held_out):
    for begin in range(0, g.shape[1], SPAN):
      real = np.flatnonzero(is_token[row, begin : begin + SPAN]) + begin
      if not len(real):
        continue
      middle = int(real[len(real) // 2])
      importances = g[row, real]
      peaks = real[importances.argmax(axis=0)]
      is_active = importances.max(axis=0) > threshold
      keys = random.uniform(0.01, 1, len(kept))
      least = np.where(is_active, least_active, least_quiet)
      places = np.where(is_active, peaks, middle)
      for n in np.flatnonzero(keys > least).tolist():
        windows = kept[n].active if is_active[n] else kept[n].quiet
        key = float(keys[n])
        peak = int(places[n])
        window = _window(batch, g[..., n], int(row), peak)
        # A quiet stretch may have an active neighbor, and earlier windows may have raised the key.
        is_of_kind = (window.importances.max() > threshold) == is_active[n]
        if is_of_kind and key > windows.least:
          windows.add(key, (chunk.source, int(row), chunk.position + peak), window)


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
