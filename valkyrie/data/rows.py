"""Order of the documents in each row, as pure arithmetic: no token is read, no state is kept.

`deal` orders the documents of a store in rows. It works with units: a unit is a document, or a
sequence of documents that stay together. Where a unit passes its carry on, the next unit of its row
joins it, and the two are read as one unit. `mixed_rows` mixes the rows of several sources.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

# A unit that joins many others would be long; joins of a smaller probability than this are cut.
_RARE = 2.0**-20


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
    if not self.shuffle:
      return np.arange(count)
    # RandomState's stream is frozen; newer numpy generators may change between versions.
    random = np.random.RandomState([*self.seeds, *seeds])
    return random.permutation(count)


class Documents(NamedTuple):
  """Documents of a row in reading order, int64 [documents].

  numbers: their numbers in the store.
  starts, ends: tokens of the row before each document, and up to its end.
  unit_starts: tokens of the row before the unit of each document.
  unit_numbers: the number of this unit in the row, counted from 0.
  """

  numbers: np.ndarray
  starts: np.ndarray
  ends: np.ndarray
  unit_starts: np.ndarray
  unit_numbers: np.ndarray


class Units(NamedTuple):
  """Units of a row, int64 [units].

  starts, lengths: tokens of the row before each unit, and tokens of the unit.
  numbers: units of the row before each unit, as they were dealt.
  parts: units that each unit joins, as they were dealt.
  """

  starts: np.ndarray
  lengths: np.ndarray
  numbers: np.ndarray
  parts: np.ndarray


class _Epoch(NamedTuple):
  """The documents of a row in the order of one epoch, int64; offsets count its tokens.

  documents, ends, units: number in the store, end, and unit of each document, [documents].
  unit_starts: tokens before each unit and after the last one, [units + 1].
  unit_numbers: units as they were dealt, before each unit and after the last one, [units + 1].
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
    length: tokens of an epoch.
    units_of_epoch: units of an epoch, as they were dealt.
    longest_unit: tokens of the longest unit that any epoch can have.
    end: tokens of the stream; None if it is endless.
  """

  def __init__(
    self,
    lengths: np.ndarray,
    documents: np.ndarray,
    counts: np.ndarray,
    order: Order,
  ):
    """Makes the row of some units.

    Args:
      lengths: int64 [documents of the store], tokens of each document.
      documents: int64, numbers of the row's documents, unit after unit.
      counts: int64 [units], documents of each unit.
      order: the order of the units.
    """
    self._lengths = lengths
    self._documents = documents
    self._counts = counts
    self._order = order
    self._most_parts = 1
    if order.pass_carry > _RARE:
      parts = math.log(_RARE, order.pass_carry)
      self._most_parts = math.ceil(parts)
    first_documents = np.cumsum(counts) - counts
    document_lengths = lengths[documents]
    unit_lengths = np.add.reduceat(document_lengths, first_documents)
    ascending = np.sort(unit_lengths)
    longest_units = ascending[-self._most_parts :]
    self.length = int(unit_lengths.sum())
    self.units_of_epoch = len(counts)
    self.longest_unit = int(longest_units.sum())
    self.end = None
    if order.epochs is not None:
      self.end = order.epochs * self.length
    self._epoch = functools.lru_cache(maxsize=1)(self._ordered)

  def documents(self, begin: int, end: int) -> Documents:
    """The documents that have tokens in [begin, end)."""
    parts = []
    for number in self._epochs(begin, end):
      epoch = self._epoch(number)
      base = number * self.length  # tokens of the row before this epoch
      unit_base = number * self.units_of_epoch
      begin_in_epoch = begin - base
      end_in_epoch = end - base
      first = np.searchsorted(epoch.ends, begin_in_epoch, side='right')
      last = np.searchsorted(epoch.ends, end_in_epoch, side='left')
      last += 1
      documents = epoch.documents[first:last]
      ends = epoch.ends[first:last]
      units = epoch.units[first:last]
      starts = ends - self._lengths[documents]
      unit_starts = epoch.unit_starts[units]
      unit_numbers = epoch.unit_numbers[units]
      part = Documents(
        numbers=documents,
        starts=base + starts,
        ends=base + ends,
        unit_starts=base + unit_starts,
        unit_numbers=unit_base + unit_numbers,
      )
      parts.append(part)
    fields = zip(*parts, strict=True)
    return Documents(*map(np.concatenate, fields))

  def units(self, begin: int, end: int) -> Units:
    """The units that begin in [begin, end)."""
    if self.end is not None:
      end = min(end, self.end)
    empty = np.zeros((4, 0), np.int64)
    parts = [Units(*empty)]
    for number in self._epochs(begin, end):
      epoch = self._epoch(number)
      base = number * self.length  # tokens of the row before this epoch
      unit_base = number * self.units_of_epoch
      all_starts = epoch.unit_starts[:-1]
      begin_in_epoch = begin - base
      end_in_epoch = end - base
      first = np.searchsorted(all_starts, begin_in_epoch)
      last = np.searchsorted(all_starts, end_in_epoch)
      with_end = slice(first, last + 1)
      bounds = epoch.unit_starts[with_end]
      numbers = epoch.unit_numbers[with_end]
      starts = bounds[:-1]
      part = Units(
        starts=base + starts,
        lengths=np.diff(bounds),
        numbers=unit_base + numbers[:-1],
        parts=np.diff(numbers),
      )
      parts.append(part)
    fields = zip(*parts, strict=True)
    return Units(*map(np.concatenate, fields))

  def _epochs(self, begin: int, end: int) -> range:
    """The epochs that have tokens in [begin, end)."""
    first = begin // self.length
    after_last = -(-end // self.length)
    return range(first, after_last)

  def _ordered(self, epoch: int) -> _Epoch:
    seed = epoch % 2**32
    order = self._order.permutation(len(self._counts), seed)
    counts = self._counts[order]
    first_documents = np.cumsum(self._counts) - self._counts
    places = numbers_in(first_documents[order], counts)
    documents = self._documents[places]
    lengths = self._lengths[documents]
    ends = np.cumsum(lengths)
    last_documents = np.cumsum(counts) - 1
    dealt_ends = ends[last_documents]
    dealt_starts = np.append(0, dealt_ends)
    is_begin = self._begins(seed)
    unit_of_dealt = np.cumsum(is_begin) - 1
    units = np.repeat(unit_of_dealt, counts)
    begins = np.flatnonzero(is_begin)
    unit_numbers = np.append(begins, len(counts))
    unit_starts = dealt_starts[unit_numbers]
    return _Epoch(documents, ends, units, unit_starts, unit_numbers)

  def _begins(self, seed: int) -> np.ndarray:
    """Which units of an epoch begin without the carry of the one before, bool [units]."""
    seeds = [*self._order.seeds, seed, 1]
    random = np.random.RandomState(seeds)
    samples = random.uniform(size=self.units_of_epoch)
    is_begin = samples >= self._order.pass_carry
    is_begin[0] = True
    numbers = np.arange(self.units_of_epoch)
    begins = np.where(is_begin, numbers, 0)
    last_begins = np.maximum.accumulate(begins)
    units_joined = numbers - last_begins
    return units_joined % self._most_parts == 0


def deal(lengths: np.ndarray, keys: np.ndarray | None, rows: int, order: Order) -> list[Row]:
  """Deals the units of a store over a number of rows, once for all epochs.

  lengths: int [documents], tokens of each document.
  keys: [documents], equal for the documents of a unit; None makes each document a unit.
  """
  if keys is None:
    members = np.arange(len(lengths))
    counts = np.ones(len(lengths), np.int64)
  else:
    members, counts = _units(keys)
  firsts = np.cumsum(counts) - counts  # unit u has members[firsts[u] : firsts[u] + counts[u]]
  permutation = order.permutation(len(counts))
  dealt = []
  for row in range(rows):
    units = permutation[row::rows]
    unit_counts = counts[units]
    places = numbers_in(firsts[units], unit_counts)
    row_order = order._replace(seeds=[*order.seeds, row])
    dealt_row = Row(lengths, members[places], unit_counts, row_order)
    dealt.append(dealt_row)
  return dealt


def _units(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Groups documents of equal keys, in the order of the first document of each unit.

  keys: [documents]. Returns the numbers of the documents, unit after unit, int64 [documents], and
  the number of documents of each unit, int64 [units].
  """
  _, first_documents, unit_of_document, counts = np.unique(
    keys,
    return_index=True,
    return_inverse=True,
    return_counts=True,
  )
  first_of_document = first_documents[unit_of_document]
  members = np.argsort(first_of_document, kind='stable')
  order = np.argsort(first_documents)
  return members, counts[order]


def numbers_in(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """The numbers [firsts[i], firsts[i] + counts[i]) of all i, one range after the other."""
  numbers_before = np.cumsum(counts) - counts
  shifts = np.repeat(firsts - numbers_before, counts)
  return np.arange(counts.sum()) + shifts
