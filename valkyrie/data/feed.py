"""Batches of a task as a pure function of where in the rows one reads."""

from collections.abc import Sequence
import logging

import gin
import numpy as np

from valkyrie.config.computation import may_change_on_resume
from valkyrie.data import vocabularies
from valkyrie.data.rows import Epoch, Rows
from valkyrie.data.store_location import build_if_missing, store_path
from valkyrie.data.token_store import REBUILD, TokenStore
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.types import Batch

RESETS = ('document', 'sequence', 'never')
# Rows that never reset count on; int32 positions stop counting here, far from overflow.
LAST_POSITION = 2**30
_SHOWN = 8  # rows, and documents of each, that `describe` names


# The fingerprints of store and vocabulary tell whether the tokens are the same.
@may_change_on_resume('data_dir', 'source', 'vocabulary')
@gin.configurable
class TaskFeed:
  """B rows of a task's documents, each an endless (or `epochs` long) stream of tokens.

  Attributes:
    vocabulary: the codec, see `vocabularies`.
    vocabulary_size: ids are in [0, vocabulary_size).
    tokens_per_byte: stored tokens, EOS included, per byte of text, over the split; None where
      documents have prompts, since the bits of their answers are not those of the text.
    fingerprint: hash of the store's content.
    row_tokens: tokens of the longest row in one epoch.
    store: the TokenStore.
  """

  def __init__(
    self,
    task: str,
    split: str,
    batch_size: int,
    seed: int,
    *,
    vocabulary: str = 'bytes',
    reset_at: str = 'document',
    shuffle: bool = True,
    epochs: int | None = None,
    data_dir: str | None = None,
    source: str | None = None,
    bad_documents: int = 0,
  ):
    """Opens the task's token store, building it first where it is missing.

    Args:
      task: a seqio task by name: NAME is registered by valkyrie.tasks.NAME, and
        'package.module:NAME' by that module.
      split: of the task, such as 'train' or 'validation'.
      batch_size: B, the number of rows; fixed for a run.
      seed: of the order of documents, in [0, 2**32).
      vocabulary: 'bytes', or the path of a SentencePiece .model or a tokenizer.json.
      reset_at: where positions start again from 0, and the model forgets: at each 'document', at
        each 'sequence' of related documents, or 'never'. Documents of a sequence stay together
        unless it is 'document'.
      shuffle: False reads in the store's order.
      epochs: padding follows after so many; None is endless.
      data_dir: holds the stores; default $XDG_CACHE_HOME/valkyrie or ~/.cache/valkyrie.
      source: where the task's documents are, for tasks that read from a place (fineweb).
      bad_documents: damaged documents of one row that a `read` passes over: they are named, hold
        nothing but EOS, and nothing is learnt of them.

    Raises:
      ConfigurationError: an argument is not possible, or does not fit the store.
      DataError: the store, or what it is built from, is not what it should be.
    """
    if reset_at not in RESETS:
      raise ConfigurationError(f'reset_at is {reset_at!r}, expected one of {", ".join(RESETS)}.')
    if not 0 <= seed < 2**32:
      raise ConfigurationError(f'The seed of the feed is {seed}, expected 0 to 2**32 - 1.')
    if batch_size < 1 or (epochs is not None and epochs < 1) or bad_documents < 0:
      raise ConfigurationError(
        f'batch_size {batch_size} and epochs {epochs} of the feed must be at least 1, and '
        f'TaskFeed.bad_documents {bad_documents} at least 0.'
      )
    self.vocabulary = vocabularies.load(vocabulary)
    path = store_path(task, split, self.vocabulary, source, data_dir)
    build_if_missing(path, task, split, vocabulary, source)
    self.store = TokenStore.open(path, self.vocabulary)
    keys = None if reset_at == 'document' else self.store.sequence_keys
    self._rows = Rows(self.store.lengths, keys, batch_size, seed, shuffle)
    if self._rows.units < batch_size:
      unit = 'documents' if keys is None else 'sequences of documents'
      raise ConfigurationError(
        f'{task}/{split} has {self._rows.units} {unit}, fewer than batch_size {batch_size}: every '
        'row needs one. Lower batch_size, or name a larger split.'
      )
    self.vocabulary_size = self.vocabulary.size
    answered = bool(self.store.prompts.any())
    self.tokens_per_byte = None if answered else self.store.tokens / self.store.text_bytes
    self.fingerprint = self.store.fingerprint
    self.row_tokens = int(self._rows.row_lengths.max())
    self._batch_size = batch_size
    self._reset_at = reset_at
    self._epochs = epochs
    self._bad_documents = bad_documents
    self._named: set[int] = set()
    self._latest_epoch: dict[int, tuple[int, Epoch]] = {}

  def read(self, position: int, length: int, rows: Sequence[int] | None = None) -> Batch:
    """The tokens [position, position + length) of each row: a pure function of its arguments.

    Args:
      position: tokens of each row that come before.
      length: T.
      rows: the rows wanted, by number, such as one host's range; None is all B.

    Returns:
      Batch of numpy arrays [rows, T].

    Raises:
      DataError: a row has more damaged documents than it may.
    """
    rows = range(self._batch_size) if rows is None else rows
    dtypes = {'weights': np.float32}
    leaves = [np.zeros((len(rows), length), dtypes.get(f, np.int32)) for f in Batch._fields]
    for i, row in enumerate(rows):
      self._read_row(row, position, [leaf[i] for leaf in leaves])
    return Batch(*leaves)

  def describe(self, position: int, length: int) -> str:
    """Names the documents that the rows read in [position, position + length), by their numbers."""
    rows = []
    for row in range(self._batch_size):
      numbers = self._documents(row, position, position + length)[0].tolist()
      more = ', ...' if len(numbers) > _SHOWN else ''
      rows.append(f'row {row}: {", ".join(map(str, numbers[:_SHOWN]))}{more}')
    more = '; ...' if len(rows) > _SHOWN else ''
    return f'these documents of {self.store.path}: {"; ".join(rows[:_SHOWN])}{more}'

  def _read_row(self, row: int, position: int, leaves: list[np.ndarray]):
    """Fills the leaves [T] of one row's Batch, which are zero."""
    inputs, targets, weights, positions, segment_ids = leaves
    length = len(inputs)
    wanted = length + 1  # the last target is one token ahead
    if self._epochs is not None:
      left = self._epochs * int(self._rows.row_lengths[row]) - position
      wanted = max(0, min(wanted, left))
    if not wanted:
      return
    documents, starts, ends, resets, segments = self._documents(row, position, position + wanted)
    begins = np.maximum(starts, position)
    counts = np.minimum(ends, position + wanted) - begins
    tokens = self.store.read(documents, begins - starts, counts)
    damaged = self.store.damaged(documents)
    if damaged.any():
      self._pass_over(row, sorted(set(documents[damaged].tolist())))
      tokens[np.repeat(damaged, counts)] = self.vocabulary.eos_id
    n = min(wanted, length)
    inputs[:n] = tokens[:n]
    targets[: wanted - 1] = tokens[1:]
    # What a prompt asks for is the answer alone, and not that it ends.
    prompts = self.store.prompts[documents]
    firsts, lasts = starts + prompts, ends - (prompts > 0)
    target = np.arange(position + 1, position + wanted + 1)
    counted = (target >= np.repeat(firsts, counts)) & (target < np.repeat(lasts, counts))
    counted &= ~np.repeat(damaged, counts)
    weights[:n] = counted[:n]
    distance = np.arange(position, position + wanted) - np.repeat(resets, counts)
    positions[:n] = np.minimum(distance, LAST_POSITION)[:n]
    segment_ids[:n] = np.repeat(segments, counts)[:n]

  def _pass_over(self, row: int, damaged: list[int]):
    """Names the damaged documents that a row reads; refuses them where they are too many."""
    names = [str(self.store.damage(document)) for document in damaged[:_SHOWN]]
    if len(damaged) > self._bad_documents:
      more = f'; and {len(damaged) - _SHOWN} more' if len(damaged) > _SHOWN else ''
      raise DataError(
        f'Row {row} reads {len(damaged)} damaged documents at once, and TaskFeed.bad_documents = '
        f'{self._bad_documents} may be passed over: {"; ".join(names)}{more}. They were damaged '
        f'after they were written. {REBUILD}'
      )
    for document, name in zip(damaged, names, strict=False):
      if document not in self._named:
        self._named.add(document)
        logging.warning('Passing over %s', name)

  def _documents(self, row: int, begin: int, end: int) -> list[np.ndarray]:
    """The documents that cover tokens [begin, end) of a row.

    Returns:
      int64 arrays [documents]: number in the store; the row's tokens before its start, before its
      end, and before the latest reset; its segment id.
    """
    row_length, row_units = int(self._rows.row_lengths[row]), int(self._rows.row_units[row])
    parts = []
    for number in range(begin // row_length, (end - 1) // row_length + 1):
      epoch = self._epoch(row, number)
      base = number * row_length
      first = np.searchsorted(epoch.ends, begin - base, side='right')
      last = np.searchsorted(epoch.ends, end - base, side='left') + 1
      documents, ends, unit_starts, unit_numbers = (leaf[first:last] for leaf in epoch)
      starts = base + ends - self.store.lengths[documents]
      if self._reset_at == 'never':
        resets, segments = np.zeros_like(starts), np.ones_like(starts)
      else:
        resets, segments = base + unit_starts, number * row_units + unit_numbers + 1
      parts.append((documents, starts, base + ends, resets, segments))
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

  def _epoch(self, row: int, number: int) -> Epoch:
    kept = self._latest_epoch.get(row)
    if kept is None or kept[0] != number:
      kept = number, self._rows.epoch(row, number)
      self._latest_epoch[row] = kept  # replaced whole: safe with a prefetching thread
    return kept[1]
