"""Order of the documents in each row, as pure arithmetic: no token is read, no state is kept.

The units are distributed over the B rows of a run once. A unit is a document, or a sequence of
documents that stay together. A row reads all its units once per epoch, in a new order for each
epoch. So every epoch of a row has the same number of tokens, token p of a row belongs to its epoch
p // row_lengths[row], and any token is found without reading those before it.
"""

from typing import NamedTuple

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
