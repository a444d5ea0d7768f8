"""Which token of which document stands where in each row: arithmetic, nothing read or remembered.

Units are dealt once to the B rows of a run: a unit is a document, or a sequence of documents that
stay together. A row then reads all its units once per epoch, in an order of its own for each
epoch. So an epoch of a row has the same number of tokens every time, token p of a row stands in
its epoch p // row_lengths[row], and any token is found without reading those before it.
"""

from typing import NamedTuple

import numpy as np


class Epoch(NamedTuple):
  """One row in one epoch. All arrays are [documents of the row], in reading order.

  documents: int64, their numbers in the store.
  ends: int64, the token offset in the epoch at which each one ends.
  unit_starts: int64, the token offset at which the unit of each one starts.
  unit_numbers: int64, which unit of the epoch it belongs to, from 0.
  """

  documents: np.ndarray
  ends: np.ndarray
  unit_starts: np.ndarray
  unit_numbers: np.ndarray


class Rows:
  """How B rows read a store.

  Attributes:
    units: number of units in the store.
    row_lengths: int64 [B], tokens of each row in one epoch.
    row_units: int64 [B], units of each row.
  """

  def __init__(
    self, lengths: np.ndarray, keys: np.ndarray | None, rows: int, seed: int, shuffle: bool
  ):
    """Deals the units.

    Args:
      lengths: int [documents], tokens of each.
      keys: [documents], equal for the documents of a unit; None makes each document a unit.
      rows: B.
      seed: any int in [0, 2**32); `shuffle` False keeps the store's order instead.
    """
    self._lengths = lengths
    self._seed = seed
    self._shuffle = shuffle
    # Unit u is the documents _members[_first[u]:_first[u + 1]].
    if keys is None:
      self._members = np.arange(len(lengths))
      self._first = np.arange(len(lengths) + 1)
    else:
      self._members, self._first = _grouped(keys)
    self.units = len(self._first) - 1
    dealt = self._order(self.units, [seed])
    self._dealt = [dealt[row::rows] for row in range(rows)]
    totals = np.concatenate([[0], np.cumsum(lengths[self._members])])
    unit_lengths = np.diff(totals[self._first])
    self.row_lengths = np.array([unit_lengths[units].sum() for units in self._dealt])
    self.row_units = np.array([len(units) for units in self._dealt])

  def epoch(self, row: int, epoch: int) -> Epoch:
    """The documents of a row in the order of that epoch."""
    units = self._dealt[row]
    units = units[self._order(len(units), [self._seed, row, epoch % 2**32])]
    counts = self._first[units + 1] - self._first[units]
    before = np.cumsum(counts) - counts
    unit_numbers = np.repeat(np.arange(len(units)), counts)
    documents = self._members[
      np.arange(len(unit_numbers)) + (self._first[units] - before)[unit_numbers]
    ]
    ends = np.cumsum(self._lengths[documents])
    starts = ends - self._lengths[documents]
    return Epoch(documents, ends, starts[before][unit_numbers], unit_numbers)

  def _order(self, count: int, seed: list[int]) -> np.ndarray:
    # RandomState's stream is frozen; that of numpy's newer generators may change between versions.
    return np.random.RandomState(seed).permutation(count) if self._shuffle else np.arange(count)


def _grouped(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Documents sorted by unit, units in the order in which their first document appears."""
  _, first_seen, inverse = np.unique(keys, return_index=True, return_inverse=True)
  by_appearance = np.empty(len(first_seen), np.int64)
  by_appearance[np.argsort(first_seen)] = np.arange(len(first_seen))
  units = by_appearance[inverse]
  counts = np.bincount(units, minlength=len(first_seen))
  return np.argsort(units, kind='stable'), np.concatenate([[0], np.cumsum(counts)])
