"""Order of the documents in each row, as pure arithmetic: no token is read, no state is kept.

`Rows` orders the documents of one store, `MixedRow` mixes several sources by weight. Both work
with units: a unit is a document, or a sequence of documents that stay together.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple, Protocol

import numpy as np


class Epoch(NamedTuple):
  """One row in one epoch. All arrays are [documents of the row], in reading order.

  documents: int64, numbers in the store.
  ends: int64, token offset in the epoch at which each document ends.
  unit_starts: int64, token offset at which the unit of each document starts.
  unit_numbers: int64, number, from 0, of each document's unit in the epoch.
  """

  documents: np.ndarray
  ends: np.ndarray
  unit_starts: np.ndarray
  unit_numbers: np.ndarray


class Rows:
  """The assignment of a store's documents to B rows.

  The units are distributed over the rows once. A row reads all its units once per epoch, in a new
  order for each epoch. So every epoch of a row has the same number of tokens, token p of a row
  belongs to its epoch p // row_lengths[row], and any token is found without reading those before
  it.

  Args:
    lengths: int [documents], tokens of each document.
    keys: [documents], equal for the documents of a unit; None makes each document a unit.
    rows: B.
    seeds: ints in [0, 2**32).
    shuffle: False keeps the store's order.

  Attributes:
    units: number of units in the store.
    row_lengths: int64 [B], tokens of each row in one epoch.
    row_units: int64 [B], units of each row.
    longest_units: int64 [B], tokens of the longest unit of each row.
  """

  def __init__(
    self, lengths: np.ndarray, keys: np.ndarray | None, rows: int, seeds: list[int], shuffle: bool
  ):
    self._lengths = lengths
    self._seeds = seeds
    self._shuffle = shuffle
    if keys is None:
      self._members, counts = np.arange(len(lengths)), np.ones(len(lengths), np.int64)
    else:  # units in the order of their first documents
      _, first_documents, unit_of_document, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True
      )
      self._members = np.argsort(first_documents[unit_of_document], kind='stable')
      counts = counts[np.argsort(first_documents)]
    # Unit u has the documents _members[_firsts[u] : _firsts[u] + _counts[u]].
    self._firsts = np.cumsum(counts) - counts
    self._counts = counts
    self.units = len(counts)
    order = self._order(self.units, seeds)
    self._units_of_row = [order[row::rows] for row in range(rows)]
    unit_lengths = np.add.reduceat(lengths[self._members], self._firsts)
    self.row_lengths = np.array([unit_lengths[units].sum() for units in self._units_of_row])
    self.row_units = np.array([len(units) for units in self._units_of_row])
    self.longest_units = np.array([unit_lengths[u].max(initial=0) for u in self._units_of_row])

  def epoch(self, row: int, epoch: int) -> Epoch:
    """The documents of a row in the order of one epoch."""
    units = self._units_of_row[row]
    units = units[self._order(len(units), [*self._seeds, row, epoch % 2**32])]
    counts = self._counts[units]
    before = np.cumsum(counts) - counts
    unit_numbers = np.repeat(np.arange(len(units)), counts)
    offsets = (self._firsts[units] - before)[unit_numbers]
    documents = self._members[np.arange(len(offsets)) + offsets]
    ends = np.cumsum(self._lengths[documents])
    starts = ends - self._lengths[documents]
    return Epoch(documents, ends, starts[before][unit_numbers], unit_numbers)

  def _order(self, count: int, seeds: list[int]) -> np.ndarray:
    # RandomState's stream is frozen; newer numpy generators may change between versions.
    return np.random.RandomState(seeds).permutation(count) if self._shuffle else np.arange(count)


class Units(NamedTuple):
  """Units of a source, int64 [units]: tokens of its stream before each, tokens, numbers from 0."""

  starts: np.ndarray
  lengths: np.ndarray
  numbers: np.ndarray


class Source(Protocol):
  """The streams of units of a source, one for each row."""

  def units(self, row: int, begin: int, end: int) -> Units:
    """The units that begin in [begin, end) of the row's stream, in order."""
    ...

  def longest_unit(self, row: int) -> int:
    """Tokens of the longest unit."""
    ...

  def end(self, row: int) -> int | None:
    """Tokens of the row's stream; None if it is endless."""
    ...


class Piece(NamedTuple):
  """A unit in the mixed row.

  source: the number of its source.
  start, length: tokens of the mixed row before it, and its own.
  places, units: tokens and units of every source before it, int64 [sources].
  """

  source: int
  start: int
  length: int
  places: np.ndarray
  units: np.ndarray


class _Stage(NamedTuple):
  """A stretch of a row with constant weights [sources], which are 0 for those that take no part.

  begin: tokens of the mixed row before it; places, units: as in `Piece`.
  delays: tokens, float [sources].
  """

  begin: int
  places: np.ndarray
  units: np.ndarray
  weights: np.ndarray
  delays: np.ndarray


class MixedRow:
  """A row of several sources: fair queueing by tokens (Demers, Keshav & Shenker 1989).

  Every source has a stream of units for the row; a unit is never cut. If a source has weight w and
  delay d, a unit that begins after c tokens of its stream has the time (c + d) / w. The row reads
  the units of all sources in the order of their times. So at any place every source has had its
  share of the tokens, to within a unit. The delay is a random part of the first unit: without it
  all rows would read the same source at the same time.

  Weights add up to 1, so the units before a time have that many tokens, to within one unit of each
  source. Any position is therefore found from the units of a window, whose length does not depend
  on the position.

  Weights change at given positions, and where a source ends. A new stage begins at the next unit
  there, and its times count from its start.
  """

  def __init__(
    self,
    sources: Sequence[Source],
    row: int,
    changes: Sequence[tuple[int, Sequence[float]]],
  ):
    """Takes the sources, the number of the row, and `changes`: (position, weights from there on).

    Positions increase from 0. No weight is negative, and one of each set is above 0.
    """
    self._sources, self._row, self._changes = sources, row, changes
    self._ends = [source.end(row) for source in sources]
    # RandomState's stream is frozen.
    self._phases = 1 - np.random.RandomState(row).uniform(size=len(sources))
    nothing = np.zeros(len(sources), np.int64)
    self._stages = [self._stage(nothing, nothing)]

  @property
  def end(self) -> int | None:
    """Tokens of the row, after which it is padding; None if it is endless."""
    while self._begin(len(self._stages)) is not None:
      pass
    last = self._stages[-1]
    return None if last.weights.any() else last.begin

  def pieces(self, begin: int, end: int) -> list[Piece]:
    """The units that have tokens in [begin, end), in order."""
    found: list[Piece] = []
    number = 0
    while (first := self._begin(number)) is not None and first < end:
      following = self._begin(number + 1)
      last = end if following is None else min(end, following)
      if begin < last:
        found += self._pieces(self._stages[number], max(begin, first), last)
      number += 1
    return found

  def places(self, position: int) -> np.ndarray:
    """Tokens of every source in the first `position` tokens of the row, int64 [sources]."""
    for piece in self.pieces(position, position + 1):
      places = piece.places.copy()
      places[piece.source] += position - piece.start
      return places
    return self._stages[-1].places

  def _begin(self, number: int) -> int | None:
    """Where a stage begins; None if there are fewer."""
    while number >= len(self._stages):
      following = self._following(self._stages[-1])
      if following is None:
        return None
      self._stages.append(following)
    return self._stages[number].begin

  def _stage(self, places: np.ndarray, units: np.ndarray) -> _Stage:
    """The stage that begins after so much of every source."""
    begin = int(places.sum())
    (*_, weights) = [np.asarray(w, float) for position, w in self._changes if position <= begin]
    ended = [
      end is not None and place >= end for place, end in zip(places, self._ends, strict=True)
    ]
    weights = np.where(ended, 0.0, weights)
    delays = np.zeros(len(weights))
    for number in np.flatnonzero(weights).tolist():
      place = int(places[number])
      (first, *_) = self._sources[number].units(self._row, place, place + 1).lengths
      delays[number] = self._phases[number] * first
    shares = weights / weights.sum() if weights.any() else weights
    return _Stage(begin, places, units, shares, delays)

  def _following(self, stage: _Stage) -> _Stage | None:
    """The stage after one: where the next weights begin, or the first source ends."""
    if not stage.weights.any():
      return None
    candidates: list[Piece] = []
    lasts = []
    for number in np.flatnonzero(stage.weights).tolist():
      if (end := self._ends[number]) is not None:
        source = self._sources[number]
        units = source.units(self._row, max(0, end - source.longest_unit(self._row)), end)
        lasts.append((self._times(stage, number, units)[-1], number))
    if lasts:
      time, number = min(lasts)
      candidates += [p for p in self._window(stage, time, time) if p.source == number]
    changes = [position for position, _ in self._changes if position > stage.begin]
    if changes and not any(piece.start + piece.length < changes[0] for piece in candidates):
      candidates += self._pieces(stage, changes[0] - 1, changes[0])
    if not candidates:
      return None
    last = min(candidates, key=lambda piece: piece.start)
    places, units = last.places.copy(), last.units.copy()
    places[last.source] += last.length
    units[last.source] += 1
    return self._stage(places, units)

  def _pieces(self, stage: _Stage, begin: int, end: int) -> list[Piece]:
    """The units of a stage that have tokens in [begin, end)."""
    taking_part = np.flatnonzero(stage.weights).tolist()
    if not taking_part:
      return []
    longest = sum(self._sources[number].longest_unit(self._row) for number in taking_part)
    low = max(0, begin - stage.begin - 2 * longest - 1)
    window = self._window(stage, low, end - stage.begin + longest + 1)
    return [p for p in window if p.start < end and p.start + p.length > begin]

  def _window(self, stage: _Stage, low: float, high: float) -> list[Piece]:
    """The units with times from low to high, in order."""
    places, units = stage.places.copy(), stage.units.copy()
    times, numbers, lengths = [], [], []
    for number in np.flatnonzero(stage.weights).tolist():
      source, weight = self._sources[number], stage.weights[number]
      start = int(stage.places[number]) - stage.delays[number]
      first = math.floor(start + low * weight) - 1
      last = math.ceil(start + high * weight) + 2
      found = source.units(
        self._row,
        max(int(stage.places[number]), first),
        last + source.longest_unit(self._row),  # one more unit at least
      )
      time = self._times(stage, number, found)
      begin, end = np.searchsorted(time, low, 'left'), np.searchsorted(time, high, 'right')
      places[number], units[number] = found.starts[begin], found.numbers[begin]
      times.append(time[begin:end])
      numbers.append(np.full(end - begin, number))
      lengths.append(found.lengths[begin:end])
    time, number, length = map(np.concatenate, (times, numbers, lengths))
    order = np.lexsort((number, time))
    number, length = number[order], length[order]
    is_of = number[:, None] == np.arange(len(self._sources))
    lengths_of = is_of * length[:, None]
    places = places + np.cumsum(lengths_of, axis=0) - lengths_of
    units = units + np.cumsum(is_of, axis=0) - is_of
    starts = places.sum(axis=1)
    return [
      Piece(*piece)
      for piece in zip(
        number.tolist(), starts.tolist(), length.tolist(), places, units, strict=True
      )
    ]

  def _times(self, stage: _Stage, number: int, units: Units) -> np.ndarray:
    after = units.starts - stage.places[number] + stage.delays[number]
    return after / stage.weights[number]
