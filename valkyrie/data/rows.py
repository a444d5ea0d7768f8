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

  Attributes:
    units: number of units in the store.
    row_lengths: int64 [B], tokens of each row in one epoch.
    row_units: int64 [B], units of each row.
  """

  def __init__(
    self, lengths: np.ndarray, keys: np.ndarray | None, rows: int, seed: int, shuffle: bool
  ):
    """Distributes the units over the rows.

    Args:
      lengths: int [documents], tokens of each document.
      keys: [documents], equal for the documents of a unit; None makes each document a unit.
      rows: B.
      seed: any int in [0, 2**32).
      shuffle: False keeps the store's order.
    """
    self._lengths = lengths
    self._seed = seed
    self._shuffle = shuffle
    # Unit u has the documents _members[_first_members[u]:_first_members[u + 1]].
    if keys is None:
      self._members = np.arange(len(lengths))
      self._first_members = np.arange(len(lengths) + 1)
    else:
      self._members, self._first_members = _by_unit(keys)
    self.units = len(self._first_members) - 1
    order = self._order(self.units, [seed])
    self._units_of_row = [order[row::rows] for row in range(rows)]
    totals = np.concatenate([[0], np.cumsum(lengths[self._members])])
    unit_lengths = np.diff(totals[self._first_members])
    self.row_lengths = np.array([unit_lengths[units].sum() for units in self._units_of_row])
    self.row_units = np.array([len(units) for units in self._units_of_row])

  def epoch(self, row: int, epoch: int) -> Epoch:
    """The documents of a row in the order of one epoch."""
    units = self._units_of_row[row]
    units = units[self._order(len(units), [self._seed, row, epoch % 2**32])]
    counts = self._first_members[units + 1] - self._first_members[units]
    before = np.cumsum(counts) - counts
    unit_numbers = np.repeat(np.arange(len(units)), counts)
    documents = self._members[
      np.arange(len(unit_numbers)) + (self._first_members[units] - before)[unit_numbers]
    ]
    ends = np.cumsum(self._lengths[documents])
    starts = ends - self._lengths[documents]
    return Epoch(documents, ends, starts[before][unit_numbers], unit_numbers)

  def _order(self, count: int, seed: list[int]) -> np.ndarray:
    # RandomState's stream is frozen; newer numpy generators may change between versions.
    return np.random.RandomState(seed).permutation(count) if self._shuffle else np.arange(count)


def _by_unit(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(documents sorted by unit, start of each unit); units in order of their first document."""
  _, first_seen, inverse = np.unique(keys, return_index=True, return_inverse=True)
  by_appearance = np.empty(len(first_seen), np.int64)
  by_appearance[np.argsort(first_seen)] = np.arange(len(first_seen))
  units = by_appearance[inverse]
  counts = np.bincount(units, minlength=len(first_seen))
  return np.argsort(units, kind='stable'), np.concatenate([[0], np.cumsum(counts)])
