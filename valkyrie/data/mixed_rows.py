"""A row that mixes the rows of several sources by weight, as pure arithmetic."""

from collections.abc import Sequence
import math
from typing import NamedTuple

import numpy as np

from valkyrie.data.rows import Row, Units


class Piece(NamedTuple):
  """A unit in the mixed row.

  source: the number of its source.
  start, length: tokens of the mixed row before the unit, and tokens of the unit.
  parts: the units that it joins.
  before: tokens and units of every source before it, int64 [2, sources].
  """

  source: int
  start: int
  length: int
  parts: int
  before: np.ndarray

  @property
  def end(self) -> int:
    return self.start + self.length


class _Stage(NamedTuple):
  """A stretch of a row with constant weights.

  begin: tokens of the mixed row before it.
  before: as in `Piece`.
  weights: float [sources]; 0 for sources that take no part.
  delays: tokens, float [sources].
  """

  begin: int
  before: np.ndarray
  weights: np.ndarray
  delays: np.ndarray

  @property
  def active(self) -> list[int]:
    """The numbers of the sources that take part."""
    return np.flatnonzero(self.weights).tolist()


class _Window(NamedTuple):
  """The units of one source with times in an interval, [units].

  before: tokens and units of the source before the first of these units, int64 [2].
  """

  times: np.ndarray
  sources: np.ndarray
  lengths: np.ndarray
  parts: np.ndarray
  before: np.ndarray


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
    self,
    sources: Sequence[Row],
    row: int,
    changes: Sequence[tuple[int, Sequence[float]]],
  ):
    """Takes the sources, the number of the row, and `changes`: (position, weights from there on).

    Positions increase from 0. No weight is negative, and one of each set is above 0.
    """
    self._sources = sources
    self._changes = changes
    # RandomState's stream is frozen.
    random = np.random.RandomState(row)
    self._phases = 1 - random.uniform(size=len(sources))
    self._stages: list[_Stage] = []
    nothing_read = np.zeros((2, len(sources)), np.int64)
    stage = self._stage(nothing_read)
    while stage is not None:
      self._stages.append(stage)
      stage = self._following(stage)
    last = self._stages[-1]
    self.end = None
    if not last.active:
      self.end = last.begin

  def pieces(self, begin: int, end: int) -> list[Piece]:
    """The units that have tokens in [begin, end), in order."""
    later_stages = self._stages[1:]
    stage_ends = [stage.begin for stage in later_stages]
    stage_ends.append(end)
    pieces: list[Piece] = []
    for stage, stage_end in zip(self._stages, stage_ends, strict=True):
      first = max(begin, stage.begin)
      last = min(end, stage_end)
      if first < last:
        pieces += self._pieces(stage, first, last)
    return pieces

  def places(self, position: int) -> np.ndarray:
    """Tokens of every source in the first `position` tokens of the row, int64 [sources]."""
    pieces = self.pieces(position, position + 1)
    if not pieces:
      return self._stages[-1].before[0]
    piece = pieces[0]
    read = position - piece.start
    places = piece.before[0].copy()
    places[piece.source] += read
    return places

  def _stage(self, before: np.ndarray) -> _Stage:
    """The stage that begins after so many tokens and units of every source, int64 [2, sources]."""
    places = before[0]
    begin = int(places.sum())
    weights = self._weights(begin, places)
    delays = np.zeros(len(weights))
    for number in np.flatnonzero(weights).tolist():
      source = self._sources[number]
      place = int(places[number])
      next_unit = source.units(place, place + 1)
      length = next_unit.lengths[0]
      delays[number] = self._phases[number] * length
    if weights.any():
      weights = weights / weights.sum()
    return _Stage(begin, before, weights, delays)

  def _weights(self, begin: int, places: np.ndarray) -> np.ndarray:
    """The weights from a place of the row on; 0 for sources that end at their `places`."""
    begun = []
    for position, weights in self._changes:
      if position <= begin:
        begun.append(weights)
    has_ended = []
    for source, place in zip(self._sources, places, strict=True):
      is_at_end = source.end is not None and place >= source.end
      has_ended.append(is_at_end)
    latest = np.asarray(begun[-1], float)
    return np.where(has_ended, 0.0, latest)

  def _following(self, stage: _Stage) -> _Stage | None:
    """The stage after one: where the next weights begin, or the first source ends."""
    if not stage.active:
      return None
    candidates = self._first_end(stage)
    later_changes = [position for position, _ in self._changes if position > stage.begin]
    if later_changes:
      change = later_changes[0]
      ends_before = any(piece.end < change for piece in candidates)
      if not ends_before:
        candidates += self._pieces(stage, change - 1, change)
    if not candidates:
      return None
    last = min(candidates, key=lambda piece: piece.start)
    before = last.before.copy()
    tokens, units = before
    tokens[last.source] += last.length
    units[last.source] += last.parts
    return self._stage(before)

  def _first_end(self, stage: _Stage) -> list[Piece]:
    """The last unit of the source that ends first; empty if all sources are endless."""
    last_times: list[tuple[float, int]] = []
    for number in stage.active:
      source = self._sources[number]
      if source.end is not None:
        begin = max(0, source.end - source.longest_unit)
        units = source.units(begin, source.end)
        times = self._times(stage, number, units)
        last_times.append((times[-1], number))
    if not last_times:
      return []
    time, number = min(last_times)
    window = self._window(stage, time, time)
    return [piece for piece in window if piece.source == number]

  def _pieces(self, stage: _Stage, begin: int, end: int) -> list[Piece]:
    """The units of a stage that have tokens in [begin, end)."""
    if not stage.active:
      return []
    longest_units = [self._sources[number].longest_unit for number in stage.active]
    longest = sum(longest_units)
    begin_in_stage = begin - stage.begin
    end_in_stage = end - stage.begin
    low = begin_in_stage - 2 * longest - 1
    low = max(0, low)
    high = end_in_stage + longest + 1
    window = self._window(stage, low, high)
    pieces = []
    for piece in window:
      begins_before_end = piece.start < end
      if begins_before_end and piece.end > begin:
        pieces.append(piece)
    return pieces

  def _window(self, stage: _Stage, low: float, high: float) -> list[Piece]:
    """The units with times from low to high, in order."""
    before = stage.before.copy()
    windows = []
    for number in stage.active:
      window = self._window_of_source(stage, number, low, high)
      before[:, number] = window.before
      windows.append(window)
    times = np.concatenate([window.times for window in windows])
    sources = np.concatenate([window.sources for window in windows])
    lengths = np.concatenate([window.lengths for window in windows])
    parts = np.concatenate([window.parts for window in windows])

    order = np.lexsort((sources, times))
    sources = sources[order]
    lengths = lengths[order]
    parts = parts[order]
    read_before = self._read_before(before, sources, lengths, parts)
    tokens_before = read_before[:, 0]
    starts = tokens_before.sum(axis=1)
    scalars = np.stack([sources, starts, lengths, parts], axis=1)
    pieces = []
    for unit, unit_before in zip(scalars.tolist(), read_before, strict=True):
      source, start, length, unit_parts = unit
      piece = Piece(source, start, length, unit_parts, unit_before)
      pieces.append(piece)
    return pieces

  def _read_before(
    self,
    before: np.ndarray,
    sources: np.ndarray,
    lengths: np.ndarray,
    parts: np.ndarray,
  ) -> np.ndarray:
    """Tokens and units of every source before each unit, [units, 2, sources].

    `before`, [2, sources], is what was read before the first unit.
    """
    numbers = np.arange(len(self._sources))
    is_source = sources[:, None] == numbers
    tokens = is_source * lengths[:, None]
    units = is_source * parts[:, None]
    read = np.stack([tokens, units], axis=1)
    read_until = before + np.cumsum(read, axis=0)
    return read_until - read

  def _window_of_source(
    self,
    stage: _Stage,
    number: int,
    low: float,
    high: float,
  ) -> _Window:
    """The units of one source with times from low to high."""
    source = self._sources[number]
    weight = stage.weights[number]
    place = int(stage.before[0, number])
    start = place - stage.delays[number]
    low_place = start + low * weight
    high_place = start + high * weight
    first = math.floor(low_place) - 1
    first = max(place, first)
    last = math.ceil(high_place) + 2
    last += source.longest_unit  # at least one more unit
    units = source.units(first, last)
    times = self._times(stage, number, units)
    begin = np.searchsorted(times, low, 'left')
    end = np.searchsorted(times, high, 'right')
    tokens_before = units.starts[begin]
    units_before = units.numbers[begin]
    inside = slice(begin, end)
    return _Window(
      times=times[inside],
      sources=np.full(end - begin, number),
      lengths=units.lengths[inside],
      parts=units.parts[inside],
      before=np.array([tokens_before, units_before]),
    )

  def _times(self, stage: _Stage, number: int, units: Units) -> np.ndarray:
    place = stage.before[0, number]
    tokens_since_begin = units.starts - place
    delayed = tokens_since_begin + stage.delays[number]
    return delayed / stage.weights[number]
