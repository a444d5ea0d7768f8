"""Order of the documents in each row, as pure arithmetic: no token is read, no state is kept.

`deal` orders the documents of a store in rows, `MixedRow` mixes rows of several sources by weight.
Both work with units: a unit is a document, or a sequence of documents that stay together. Where a
unit passes its carry on, the next one of its row joins it, and the two are read as one unit.
"""

from collections.abc import Sequence
import functools
import math
from typing import NamedTuple

import numpy as np

_RARE = 2.0**-20  # of the joined units would have more parts: they are cut there


class Order(NamedTuple):
  """The order in which the units of a store are dealt, and a row reads its units.

  seeds: ints in [0, 2**32); shuffle: False keeps the store's order.
  epochs: the epochs of each row; None is endless.
  pass_carry: the probability that a unit joins the one before it in an epoch of its row.
  """

  seeds: list[int]
  shuffle: bool
  epochs: int | None
  pass_carry: float

  def permutation(self, count: int, *seeds: int) -> np.ndarray:
    # RandomState's stream is frozen; newer numpy generators may change between versions.
    random = np.random.RandomState([*self.seeds, *seeds])
    return random.permutation(count) if self.shuffle else np.arange(count)


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

  def __init__(self, lengths: np.ndarray, documents: np.ndarray, counts: np.ndarray, order: Order):
    """Takes the lengths of a store, the documents of all units, and their number in each."""
    self._lengths, self._documents, self._counts, self._order = lengths, documents, counts, order
    rarely = order.pass_carry <= _RARE
    self._most_parts = 1 if rarely else math.ceil(math.log(_RARE, order.pass_carry))
    unit_lengths = np.add.reduceat(lengths[documents], np.cumsum(counts) - counts)
    self.length, self.units_of_epoch = int(unit_lengths.sum()), len(counts)
    self.longest_unit = int(np.sort(unit_lengths)[-self._most_parts :].sum())
    self.end = None if order.epochs is None else order.epochs * self.length
    self._epoch = functools.lru_cache(maxsize=1)(self._ordered)

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

  def _ordered(self, epoch: int) -> _Epoch:
    order = self._order.permutation(len(self._counts), epoch % 2**32)
    counts = self._counts[order]
    firsts = np.cumsum(self._counts) - self._counts
    documents = self._documents[numbers_in(firsts[order], counts)]
    ends = np.cumsum(self._lengths[documents])
    unit_starts = np.append(0, ends[np.cumsum(counts) - 1])
    begins = self._begins(epoch % 2**32)
    units = np.repeat(np.cumsum(begins) - 1, counts)
    numbers = np.append(np.flatnonzero(begins), len(counts))
    return _Epoch(documents, ends, units, unit_starts[numbers], numbers)

  def _begins(self, epoch: int) -> np.ndarray:
    """Which units of an epoch begin without the carry of the one before, bool [units]."""
    random = np.random.RandomState([*self._order.seeds, epoch, 1])
    begins = random.uniform(size=self.units_of_epoch) >= self._order.pass_carry
    places = np.arange(self.units_of_epoch)
    begins[0] = True
    firsts = np.maximum.accumulate(np.where(begins, places, 0))
    return (places - firsts) % self._most_parts == 0


def deal(lengths: np.ndarray, keys: np.ndarray | None, rows: int, order: Order) -> list[Row]:
  """Deals the units of a store over a number of rows, once for all epochs.

  lengths: int [documents], tokens of each document.
  keys: [documents], equal for the documents of a unit; None makes each document a unit.
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
  permutation, dealt = order.permutation(len(counts)), []
  for row in range(rows):
    units = permutation[row::rows]
    documents = members[numbers_in(firsts[units], counts[units])]
    of_row = order._replace(seeds=[*order.seeds, row])
    dealt.append(Row(lengths, documents, counts[units], of_row))
  return dealt


def numbers_in(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """The numbers [firsts[i], firsts[i] + counts[i]) of all i, one range after the other."""
  before = np.cumsum(counts) - counts
  return np.arange(counts.sum()) + np.repeat(firsts - before, counts)


class Piece(NamedTuple):
  """A unit in the mixed row.

  source: the number of its source; start, length: tokens of the row before it, and its own.
  parts: the units that it joins.
  before: tokens and units of every source before it, int64 [2, sources].
  """

  source: int
  start: int
  length: int
  parts: int
  before: np.ndarray


class _Stage(NamedTuple):
  """A stretch of a row with constant weights [sources], which are 0 for those that take no part.

  begin: tokens of the mixed row before it; before: as in `Piece`; delays: tokens, float [sources].
  """

  begin: int
  before: np.ndarray
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
    following = self._stage(np.zeros((2, len(sources)), np.int64))
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
      places = piece.before[0].copy()
      places[piece.source] += position - piece.start
      return places
    return self._stages[-1].before[0]

  def _stage(self, before: np.ndarray) -> _Stage:
    """The stage that begins after so many tokens and units of every source."""
    places = before[0]
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
    return _Stage(begin, before, shares, delays)

  def _following(self, stage: _Stage) -> _Stage | None:
    """The stage after one: where the next weights begin, or the first source ends."""
    if not stage.weights.any():
      return None
    candidates: list[Piece] = []
    lasts: list[tuple[float, int]] = []  # the time of the last unit of each source that ends
    for number in np.flatnonzero(stage.weights).tolist():
      source = self._sources[number]
      if source.end is not None:
        units = source.units(max(0, source.end - source.longest_unit), source.end)
        lasts.append((self._times(stage, number, units)[-1], number))
    if lasts:
      time, number = min(lasts)
      candidates = [p for p in self._window(stage, time, time) if p.source == number]
    changes = [position for position, _ in self._changes if position > stage.begin]
    if changes and not any(piece.start + piece.length < changes[0] for piece in candidates):
      candidates += self._pieces(stage, changes[0] - 1, changes[0])
    if not candidates:
      return None
    last = min(candidates, key=lambda piece: piece.start)
    before = last.before.copy()
    before[:, last.source] += last.length, last.parts
    return self._stage(before)

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
    before, windows = stage.before.copy(), []
    for number in np.flatnonzero(stage.weights).tolist():
      source, weight = self._sources[number], stage.weights[number]
      place = int(stage.before[0, number])
      start = place - stage.delays[number]
      first = math.floor(start + low * weight) - 1
      last = math.ceil(start + high * weight) + 2
      last += source.longest_unit  # one more unit at least
      found = source.units(max(place, first), last)
      times = self._times(stage, number, found)
      begin, end = np.searchsorted(times, low, 'left'), np.searchsorted(times, high, 'right')
      before[:, number] = found.starts[begin], found.numbers[begin]
      leaves = (times, np.full(len(times), number), found.lengths, found.parts)
      windows.append([leaf[begin:end] for leaf in leaves])
    times, numbers, lengths, parts = map(np.concatenate, zip(*windows, strict=True))
    order = np.lexsort((numbers, times))
    numbers, lengths, parts = numbers[order], lengths[order], parts[order]
    is_of = numbers[:, None] == np.arange(len(self._sources))
    read = np.stack([is_of * lengths[:, None], is_of * parts[:, None]], axis=1)
    every = before + np.cumsum(read, axis=0) - read  # [units, 2, sources]
    starts = every[:, 0].sum(axis=1)
    columns = (leaf.tolist() for leaf in (numbers, starts, lengths, parts))
    return list(map(Piece, *columns, every))

  def _times(self, stage: _Stage, number: int, units: Units) -> np.ndarray:
    after = units.starts - stage.before[0, number] + stage.delays[number]
    return after / stage.weights[number]
