"""Order of the documents in each row, as pure arithmetic: no token is read, no state is kept.

`deal` orders the documents of a store in rows, `MixedRow` mixes rows of several sources by weight.
Both work with units: a unit is a document, or a sequence of documents that stay together. Where a
unit passes its carry on, the next one of its row joins it, and the two are read as one unit.
"""

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

_RARE = 2.0**-20  # of the joined units would have more parts: they are cut there


class Documents(NamedTuple):
  """Documents of a row in reading order, int64 [documents].

  numbers: their numbers in the store.
  starts, ends: tokens of the row before each, and up to its end.
  unit_starts, unit_numbers: tokens of the row before the unit of each, and its number from 0.
  """

  numbers: np.ndarray
  starts: np.ndarray
  ends: np.ndarray
  unit_starts: np.ndarray
  unit_numbers: np.ndarray


class Units(NamedTuple):
  """Units of a row, int64 [units].

  starts, lengths: tokens of the row before each, and its own.
  numbers, parts: units of the row before each, and those that it joins, as they were dealt.
  """

  starts: np.ndarray
  lengths: np.ndarray
  numbers: np.ndarray
  parts: np.ndarray


class _Epoch(NamedTuple):
  """The documents of a row in the order of one epoch, int64; offsets count its tokens.

  documents, ends, units: numbers in the store, ends, and the unit of each, [documents].
  unit_starts, unit_numbers: tokens, and units as they were dealt, before each unit and after the
    last one, [units + 1].
  """

  documents: np.ndarray
  ends: np.ndarray
  units: np.ndarray
  unit_starts: np.ndarray
  unit_numbers: np.ndarray


class Row:
  """A stream of all units that a row was dealt, once per epoch, in a new order for each epoch.

  So every epoch has the same number of tokens, token p of the row belongs to its epoch p // length,
  and any token is found without reading those before it.

  Attributes:
    length, units_of_epoch: tokens of an epoch, and units as they were dealt.
    longest_unit: tokens of the longest unit that any epoch can have.
    end: tokens of the stream; None if it is endless.
  """

  def __init__(
    self,
    lengths: np.ndarray,
    documents: np.ndarray,
    counts: np.ndarray,
    seeds: list[int],
    shuffle: bool,
    epochs: int | None,
    pass_carry: float,
  ):
    """Takes the documents of all units, and their number in each; the others are as in `deal`."""
    self._lengths, self._documents, self._counts = lengths, documents, counts
    self._seeds, self._shuffle, self._pass_carry = seeds, shuffle, pass_carry
    self._most_parts = math.ceil(math.log(_RARE, pass_carry)) if pass_carry > _RARE else 1
    unit_lengths = np.add.reduceat(lengths[documents], np.cumsum(counts) - counts)
    self.length, self.units_of_epoch = int(unit_lengths.sum()), len(counts)
    self.longest_unit = int(np.sort(unit_lengths)[-self._most_parts :].sum())
    self.end = None if epochs is None else epochs * self.length
    self._latest: tuple[int, _Epoch] | None = None

  def documents(self, begin: int, end: int) -> Documents:
    """The documents that have tokens in [begin, end)."""
    parts = []
    for number in range(begin // self.length, -(-end // self.length)):
      epoch, base = self._epoch(number), number * self.length
      first = np.searchsorted(epoch.ends, begin - base, side='right')
      last = np.searchsorted(epoch.ends, end - base, side='left') + 1
      documents, ends, units = (leaf[first:last] for leaf in epoch[:3])
      starts, unit_starts = ends - self._lengths[documents], epoch.unit_starts[units]
      numbers = number * self.units_of_epoch + epoch.unit_numbers[units]
      parts.append((documents, base + starts, base + ends, base + unit_starts, numbers))
    return Documents(*map(np.concatenate, zip(*parts, strict=True)))

  def units(self, begin: int, end: int) -> Units:
    """The units that begin in [begin, end)."""
    if self.end is not None:
      end = min(end, self.end)
    parts = [Units(*np.zeros((4, 0), np.int64))]
    for number in range(begin // self.length, -(-end // self.length)):
      *_, starts, numbers = self._epoch(number)
      base = number * self.length
      first, last = np.searchsorted(starts[:-1], (begin - base, end - base))
      starts, numbers = starts[first : last + 1], numbers[first : last + 1]
      before = number * self.units_of_epoch + numbers[:-1]
      parts.append(Units(base + starts[:-1], np.diff(starts), before, np.diff(numbers)))
    return Units(*map(np.concatenate, zip(*parts, strict=True)))

  def _epoch(self, number: int) -> _Epoch:
    latest = self._latest
    if latest is None or latest[0] != number:
      latest = number, self._ordered(number)
      self._latest = latest  # one assignment: safe with a prefetching thread
    return latest[1]

  def _ordered(self, epoch: int) -> _Epoch:
    order = _order(len(self._counts), self._shuffle, *self._seeds, epoch % 2**32)
    counts = self._counts[order]
    firsts = np.cumsum(self._counts) - self._counts
    documents = self._documents[_ranges(firsts[order], counts)]
    ends = np.cumsum(self._lengths[documents])
    unit_starts = np.append(0, ends[np.cumsum(counts) - 1])
    begins = self._begins(epoch % 2**32)
    units = np.repeat(np.cumsum(begins) - 1, counts)
    numbers = np.append(np.flatnonzero(begins), len(counts))
    return _Epoch(documents, ends, units, unit_starts[numbers], numbers)

  def _begins(self, epoch: int) -> np.ndarray:
    """Which units of an epoch begin without the carry of the one before, bool [units]."""
    drawn = np.random.RandomState([*self._seeds, epoch, 1]).uniform(size=self.units_of_epoch)
    begins, places = drawn >= self._pass_carry, np.arange(self.units_of_epoch)
    begins[0] = True
    firsts = np.maximum.accumulate(np.where(begins, places, 0))
    return (places - firsts) % self._most_parts == 0


def deal(
  lengths: np.ndarray,
  keys: np.ndarray | None,
  rows: int,
  seeds: list[int],
  shuffle: bool,
  epochs: int | None,
  pass_carry: float,
) -> list[Row]:
  """Deals the units of a store over rows, once for all epochs.

  Args:
    lengths: int [documents], tokens of each document.
    keys: [documents], equal for the documents of a unit; None makes each document a unit.
    rows: the number of rows.
    seeds: ints in [0, 2**32) of the order, and of the units that are joined.
    shuffle: False keeps the store's order.
    epochs: the epochs of each row; None is endless.
    pass_carry: the probability that a unit joins the one before it in an epoch of its row.
  """
  if keys is None:
    members, counts = np.arange(len(lengths)), np.ones(len(lengths), np.int64)
  else:  # units in the order of their first documents
    _, first_documents, unit_of_document, counts = np.unique(
      keys, return_index=True, return_inverse=True, return_counts=True
    )
    members = np.argsort(first_documents[unit_of_document], kind='stable')
    counts = counts[np.argsort(first_documents)]
  firsts = np.cumsum(counts) - counts  # unit u has members[firsts[u] : firsts[u] + counts[u]]
  order = _order(len(counts), shuffle, *seeds)
  dealt = []
  for row in range(rows):
    units = order[row::rows]
    documents = members[_ranges(firsts[units], counts[units])]
    of_row = counts[units], [*seeds, row], shuffle, epochs, pass_carry
    dealt.append(Row(lengths, documents, *of_row))
  return dealt


def _order(count: int, shuffle: bool, *seeds: int) -> np.ndarray:
  # RandomState's stream is frozen; newer numpy generators may change between versions.
  return np.random.RandomState(seeds).permutation(count) if shuffle else np.arange(count)


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """The numbers [firsts[i], firsts[i] + counts[i]) of all i, one range after the other."""
  before = np.cumsum(counts) - counts
  return np.arange(counts.sum()) + np.repeat(firsts - before, counts)


class Piece(NamedTuple):
  """A unit in the mixed row.

  source: the number of its source; start, length: tokens of the row before it, and its own.
  parts: the units that it joins.
  places, units: tokens and units of every source before it, int64 [sources].
  """

  source: int
  start: int
  length: int
  parts: int
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

  Every source has a row of its own; a unit is never cut. If a source has weight w and delay d, a
  unit that begins after c tokens of the source's row has the time (c + d) / w. The mixed row reads
  the units of all sources in the order of their times. So at any place every source has had its
  share of the tokens, to within a unit. The delay is a random part of the first unit: without it
  all rows would read the same source at the same time.

  Weights add up to 1, so the units before a time have that many tokens, to within one unit of each
  source. Any position is therefore found from the units of a window of constant length.

  Weights change at given positions, and where a source ends. A new stage begins at the next unit
  there, and its times count from its start.

  Attributes:
    end: tokens of the row, after which it is padding; None if it is endless.
  """

  def __init__(
    self, sources: Sequence[Row], row: int, changes: Sequence[tuple[int, Sequence[float]]]
  ):
    """Takes the sources, the number of the row, and `changes`: (position, weights from there on).

    Positions increase from 0. No weight is negative, and one of each set is above 0.
    """
    self._sources, self._changes = sources, changes
    # RandomState's stream is frozen.
    self._phases = 1 - np.random.RandomState(row).uniform(size=len(sources))
    nothing = np.zeros(len(sources), np.int64)
    following = self._stage(nothing, nothing)
    self._stages: list[_Stage] = []
    while following is not None:
      self._stages.append(following)
      following = self._following(following)
    last = self._stages[-1]
    self.end = None if last.weights.any() else last.begin

  def pieces(self, begin: int, end: int) -> list[Piece]:
    """The units that have tokens in [begin, end), in order."""
    ends = [*(stage.begin for stage in self._stages[1:]), end]
    found: list[Piece] = []
    for stage, following in zip(self._stages, ends, strict=True):
      first, last = max(begin, stage.begin), min(end, following)
      if first < last:
        found += self._pieces(stage, first, last)
    return found

  def places(self, position: int) -> np.ndarray:
    """Tokens of every source in the first `position` tokens of the row, int64 [sources]."""
    for piece in self.pieces(position, position + 1):
      places = piece.places.copy()
      places[piece.source] += position - piece.start
      return places
    return self._stages[-1].places

  def _stage(self, places: np.ndarray, units: np.ndarray) -> _Stage:
    """The stage that begins after so much of every source."""
    begin = int(places.sum())
    (*_, weights) = [np.asarray(w, float) for position, w in self._changes if position <= begin]
    ends = [math.inf if source.end is None else source.end for source in self._sources]
    weights = np.where(places >= ends, 0.0, weights)
    delays = np.zeros(len(weights))
    for number in np.flatnonzero(weights).tolist():
      place = int(places[number])
      (first, *_) = self._sources[number].units(place, place + 1).lengths
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
      source = self._sources[number]
      if source.end is not None:
        units = source.units(max(0, source.end - source.longest_unit), source.end)
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
    units[last.source] += last.parts
    return self._stage(places, units)

  def _pieces(self, stage: _Stage, begin: int, end: int) -> list[Piece]:
    """The units of a stage that have tokens in [begin, end)."""
    taking_part = np.flatnonzero(stage.weights).tolist()
    if not taking_part:
      return []
    longest = sum(self._sources[number].longest_unit for number in taking_part)
    low = max(0, begin - stage.begin - 2 * longest - 1)
    window = self._window(stage, low, end - stage.begin + longest + 1)
    return [p for p in window if p.start < end and p.start + p.length > begin]

  def _window(self, stage: _Stage, low: float, high: float) -> list[Piece]:
    """The units with times from low to high, in order."""
    places, units = stage.places.copy(), stage.units.copy()
    times, numbers, lengths, parts = [], [], [], []
    for number in np.flatnonzero(stage.weights).tolist():
      source, weight = self._sources[number], stage.weights[number]
      start = int(stage.places[number]) - stage.delays[number]
      first = math.floor(start + low * weight) - 1
      last = math.ceil(start + high * weight) + 2
      last += source.longest_unit  # one more unit at least
      found = source.units(max(int(stage.places[number]), first), last)
      time = self._times(stage, number, found)
      begin, end = np.searchsorted(time, low, 'left'), np.searchsorted(time, high, 'right')
      places[number], units[number] = found.starts[begin], found.numbers[begin]
      times.append(time[begin:end])
      numbers.append(np.full(end - begin, number))
      lengths.append(found.lengths[begin:end])
      parts.append(found.parts[begin:end])
    time, number, length, part = map(np.concatenate, (times, numbers, lengths, parts))
    order = np.lexsort((number, time))
    number, length, part = number[order], length[order], part[order]
    is_of = number[:, None] == np.arange(len(self._sources))
    lengths_of, parts_of = is_of * length[:, None], is_of * part[:, None]
    places = places + np.cumsum(lengths_of, axis=0) - lengths_of
    units = units + np.cumsum(parts_of, axis=0) - parts_of
    starts = places.sum(axis=1)
    return list(
      map(Piece, number.tolist(), starts.tolist(), length.tolist(), part.tolist(), places, units)
    )

  def _times(self, stage: _Stage, number: int, units: Units) -> np.ndarray:
    after = units.starts - stage.places[number] + stage.delays[number]
    return after / stage.weights[number]
