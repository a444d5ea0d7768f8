"""Batches of a task, as a pure function of the position in the rows."""

from collections.abc import Mapping, Sequence
import copy
import functools
import importlib
import logging
from typing import Any

import gin
import numpy as np

from valkyrie.config.computation import may_change_on_resume
from valkyrie.config.ranges import NonNegativeInt, PositiveInt, ProperFraction, Seed, checked
from valkyrie.data import vocabularies
from valkyrie.data.few_documents import more_documents
from valkyrie.data.rows import Documents, Order, Row, deal, numbers_in
from valkyrie.data.selection import Selection
from valkyrie.data.store_location import open_store
from valkyrie.data.token_store import REBUILD, TokenStore
from valkyrie.errors import ConfigurationError, DataError
from valkyrie.types import Batch, position_of

RESETS = ('document', 'sequence', 'never')
_SEGMENTS = 2**30  # documents with the same segment id are too far apart to meet in a step
_UNEVEN = 4  # warn if the longest row has this many times the tokens of the shortest one
_MAX_NAMED = 8  # rows, and documents of each row, in a message
_FEWER_ROWS = {
  'train': 'Lower batch_size (--gin.batch_size)',
  'validation': 'Lower both validation/TaskFeed.batch_size and Evaluator.batch_size',
}
_warn_once = functools.cache(logging.warning)


# The fingerprints of store and vocabulary tell whether the tokens are the same, and a checkpoint
# records the rows.
@may_change_on_resume('data_dir', 'source', 'options', 'vocabulary', 'batch_size')
@gin.configurable
class TaskFeed:
  """B rows of a task's documents, each a stream of tokens: endless, or of `epochs` epochs.

  It has the attributes of `types.TaskFeed`, and selection, batch_size, reset_at and store.
  """

  @checked
  def __init__(
    self,
    task: str,
    split: str,
    batch_size: PositiveInt,
    seed: Seed,
    *,
    vocabulary: str = 'bytes',
    reset_at: str = 'document',
    pass_carry: ProperFraction = 0.0,
    shuffle: bool = True,
    epochs: PositiveInt | None = None,
    data_dir: str | None = None,
    source: str | None = None,
    options: Mapping[str, Any] | None = None,
    unique: bool = False,
    learn_eos: bool = False,
    bad_documents: NonNegativeInt = 0,
  ):
    """Loads the vocabulary. The first use of the tokens opens the store, or builds it.

    Args:
      task: NAME, which valkyrie.tasks.NAME registers, or 'package.module:NAME', which
        package.module registers.
      split: split of the task, such as 'train' or 'validation'.
      batch_size: B, the number of rows.
      seed: seed of the order of documents, in [0, 2**32).
      vocabulary: 'bytes', or the path of a SentencePiece .model or a tokenizer.json.
      reset_at: positions restart at 0, and the carry is reset, at each 'document', at each
        'sequence' of related documents, or 'never'. With 'sequence' and 'never' the documents of a
        sequence stay together.
      pass_carry: the probability, below 1, that a document (or sequence) has no reset: it begins
        with the carry of the end of the one before it in its row (Buitrago & Gu 2025, arXiv
        2507.02782, "state passing"). The first one of an epoch always has a reset.
      shuffle: False reads in the store's order.
      epochs: number of epochs after which the feed ends; None is endless.
      data_dir: directory of the stores; default $VALKYRIE_CACHE, $XDG_CACHE_HOME/valkyrie or
        ~/.cache/valkyrie. Finished stores at an address (gs://, s3://) are copied to that default.
      source: location of the documents, for tasks that read files of a user, such as text.
      options: options of the task's source; None leaves one out.
      unique: keep only the first of several documents with equal tokens.
      learn_eos: also train on the EOS after an answer (texts without prompts always do).
      bad_documents: most damaged documents of a row that one `read` accepts: they are logged, read
        as EOS tokens, and have weight 0.

    Raises:
      ConfigurationError: an argument is out of range, or does not fit the store (at first use).
      DataError: the store or its source is missing or damaged (at first use).
      StorageError: a store in a bucket cannot be copied (at first use).
    """
    if reset_at not in RESETS:
      raise ConfigurationError(
        f'TaskFeed.reset_at={reset_at!r} is unknown. Use one of {", ".join(RESETS)}.'
      )
    self.vocabulary = vocabularies.load(vocabulary)
    self.vocabulary_size = self.vocabulary.size
    given_options = {}
    for name, value in (options or {}).items():
      if value is not None:
        given_options[name] = str(value)
    self.selection = Selection(task, split, self.vocabulary, source, given_options, unique)
    self._data_dir = data_dir
    self.batch_size = batch_size
    self.reset_at = reset_at
    self._order = Order([seed], shuffle, epochs, pass_carry)
    self._learn_eos = learn_eos
    self._bad_documents = bad_documents

  @functools.cached_property
  def store(self) -> TokenStore:
    if self.selection.task == 'synthetic':
      # RandomTokens has those members of a store that a feed uses.
      synthetic = importlib.import_module('valkyrie.tasks.synthetic')
      made: Any = synthetic.RandomTokens(self.selection)
      return made
    return open_store(self.selection, self._data_dir)

  @functools.cached_property
  def rows(self) -> list[Row]:
    """The documents of each row in their order."""
    keys = None
    unit = 'documents'
    units = len(self.store.lengths)
    if self.reset_at != 'document':
      keys = self.store.sequence_keys
      unit = 'sequences of documents'
      units = len(np.unique(keys))
    if units < self.batch_size:
      lower = _FEWER_ROWS.get(self.selection.split, 'Lower TaskFeed.batch_size')
      text_bytes = self.store.information['text_bytes']
      bytes_of_half_row = text_bytes // (2 * self.batch_size)
      cut = min(max(16, bytes_of_half_row), 2048)
      raise ConfigurationError(
        f'{self.selection} has {units} {unit}, fewer than batch_size={self.batch_size}, but each '
        f'row needs one. {lower}; use a larger split; or '
        f'{more_documents(self.selection, cut)}.'
      )
    rows = deal(self.store.lengths, keys, self.batch_size, self._order)
    lengths = [row.length for row in rows]
    shortest = min(lengths)
    longest = max(lengths)
    if self._order.epochs is None and longest >= _UNEVEN * shortest:
      logging.warning(
        '%s: the shortest of the %d rows has %s tokens and repeats %.3g times while the longest '
        'reads its %s once, so its documents count that much more. Cut long documents (text_cut, '
        "with reset_at = 'document'), or lower batch_size.",
        self.selection, len(rows), f'{shortest:,}', longest / shortest, f'{longest:,}',
      )  # fmt: skip
    return rows

  def open(self) -> None:
    _ = self.rows

  @property
  def fingerprint(self) -> str:
    return self.store.fingerprint

  @property
  def tokens_per_byte(self) -> float | None:
    """Tokens per byte of text, with EOS; None with prompts: an answer is only a part of a text."""
    if self.store.prompts.any():
      return None
    return self.store.tokens_per_byte

  @property
  def row_tokens(self) -> int:
    lengths = [row.length for row in self.rows]
    return max(lengths)

  @property
  def row_end(self) -> int | None:
    if self._order.epochs is None:
      return None
    return self._order.epochs * self.row_tokens

  @property
  def longest(self) -> int:
    """Tokens of the longest document, or sequence, with those that it may join."""
    return max(row.longest_unit for row in self.rows)

  def dealt(self, number: int, rows: int, begin: int) -> 'TaskFeed':
    """As `types.TaskFeed`; ConfigurationError for `epochs`, which end within one deal."""
    del begin  # an endless feed is dealt in one way, whatever the position of the run
    if self._order.epochs is not None:
      raise ConfigurationError(
        f'{self.selection} has TaskFeed.epochs={self._order.epochs}, and a run with an end cannot '
        'deal its documents to rows again. Keep the batch_size of the run, or set TaskFeed.epochs '
        '= None.'
      )
    dealt = copy.copy(self)
    dealt.__dict__.pop('rows', None)
    dealt.batch_size = rows
    if number:  # the first deal uses only the seed
      seeds = [*self._order.seeds, number]
      dealt._order = self._order._replace(seeds=seeds)
    return dealt

  def unfinished(self, position: int) -> int:
    read_again = [position % row.length for row in self.rows]
    return sum(read_again)

  def progress(self, position: int) -> dict[str, float]:
    read = 0
    for row in self.rows:
      if row.end is None:
        read += position
      else:
        read += min(position, row.end)
    return {'epochs': read / self.store.tokens}

  def read(self, position: int, length: int, rows: Sequence[int] | None = None) -> Batch:
    """As `types.TaskFeed`; DataError if a row has more than `bad_documents` damaged documents."""
    if rows is None:
      rows = range(self.batch_size)
    shape = (len(rows), length)
    batch = Batch(
      inputs=np.zeros(shape, np.int32),
      targets=np.zeros(shape, np.int32),
      weights=np.zeros(shape, np.float32),
      positions=np.zeros(shape, np.int32),
      segment_ids=np.zeros(shape, np.int32),
    )
    for place, row in enumerate(rows):
      leaves = [leaf[place] for leaf in batch]
      self._read_row(row, position, Batch(*leaves))
    return batch

  def describe(self, position: int, length: int) -> str:
    """Names the documents of the tokens [position, position + length) of all rows by number."""
    end = position + length
    rows = []
    for row in range(self.batch_size):
      documents = self.documents(row, position, end)
      rows.append(f'row {row}: {documents}')
    documents = _some(rows, '; ')
    return f'these documents of {self.store.path}: {documents}'

  def documents(self, row: int, begin: int, end: int) -> str:
    """The numbers in the store of the documents of the tokens [begin, end) of a row."""
    documents = self.rows[row].documents(begin, end)
    numbers = [str(number) for number in documents.numbers]
    return _some(numbers, ', ')

  def _read_row(self, row: int, position: int, batch: Batch):
    """Fills the leaves [T], zero so far, of one row's Batch."""
    length = len(batch.inputs)
    wanted = length + 1  # the last target is one token ahead
    row_end = self.rows[row].end
    if row_end is not None:
      wanted = min(wanted, row_end - position)
    if wanted <= 0:
      return
    end = position + wanted
    documents = self.rows[row].documents(position, end)
    begins = np.maximum(documents.starts, position)
    ends = np.minimum(documents.ends, end)
    skipped = begins - documents.starts  # tokens of the first document that were read earlier
    counts = ends - begins
    tokens = self.store.read(documents.numbers, skipped, counts)
    damaged = self.store.damaged(documents.numbers)
    is_damaged = np.repeat(damaged, counts)
    if damaged.any():
      numbers = documents.numbers[damaged]
      damaged_numbers = set(numbers.tolist())
      self._report_damaged(row, sorted(damaged_numbers))
      tokens[is_damaged] = self.vocabulary.eos_id
    n = min(wanted, length)
    batch.inputs[:n] = tokens[:n]
    batch.targets[: wanted - 1] = tokens[1:]

    counted = self._is_answer(documents, position, counts, skipped)
    counted &= ~is_damaged
    batch.weights[:n] = counted[:n]

    unit_starts = documents.unit_starts
    units = documents.unit_numbers
    if self.reset_at == 'never':
      unit_starts = np.zeros_like(unit_starts)
      units = np.zeros_like(units)
    places = np.arange(position, end)
    starts_of_tokens = np.repeat(unit_starts, counts)
    distances = places - starts_of_tokens
    positions = position_of(distances)
    batch.positions[:n] = positions[:n]
    segment_ids = segment_ids_of(units + 1)
    segments_of_tokens = np.repeat(segment_ids, counts)
    batch.segment_ids[:n] = segments_of_tokens[:n]

  def _is_answer(
    self,
    documents: Documents,
    position: int,
    counts: np.ndarray,
    skipped: np.ndarray,
  ) -> np.ndarray:
    """Which targets are learned, bool [T]: in a document with prompts only the answers.

    position: tokens of the row before those that are read; each target is one token ahead.
    counts, skipped: tokens of each document that are read, and those before them, [documents].
    """
    prompts = self.store.prompts[documents.numbers]
    firsts = documents.starts + prompts
    lasts = documents.ends
    if not self._learn_eos:
      has_prompt = prompts > 0
      lasts = lasts - has_prompt
    first_target = position + 1
    targets = np.arange(first_target, first_target + counts.sum())
    first_answers = np.repeat(firsts, counts)
    last_answers = np.repeat(lasts, counts)
    is_answer = targets >= first_answers
    is_answer &= targets < last_answers
    later_prompts = self.store.later_prompts
    if later_prompts.size:
      places_of_documents = self.store.places(documents.numbers)
      first_targets = places_of_documents + skipped + 1
      places = numbers_in(first_targets, counts)
      bounds_before = np.searchsorted(later_prompts, places, side='right')
      is_outside = bounds_before % 2 == 0  # as many prompts have ended as begun
      is_answer &= is_outside
    return is_answer

  def _report_damaged(self, row: int, damaged: list[int]):
    """Logs the damaged documents of a row; raises DataError if they are too many."""
    shown = damaged[:_MAX_NAMED]
    names = [str(self.store.damage(document)) for document in shown]
    if len(damaged) > self._bad_documents:
      more = ''
      if len(damaged) > _MAX_NAMED:
        more = f'; and {len(damaged) - _MAX_NAMED} more'
      raise DataError(
        f'Row {row} reads {len(damaged)} damaged documents at once, but the limit is '
        f'TaskFeed.bad_documents={self._bad_documents}: {"; ".join(names)}{more}. They were '
        f'damaged after they were written. {REBUILD}'
      )
    for name in names:
      _warn_once(f'Passing over {name}')


def _some(names: Sequence[str], separator: str) -> str:
  text = separator.join(names[:_MAX_NAMED])
  if len(names) > _MAX_NAMED:
    text += f'{separator}...'
  return text


def segment_ids_of(numbers: np.ndarray) -> np.ndarray:
  """The segment ids of the documents of a row from their int64 numbers, which begin at 1."""
  return (numbers - 1) % _SEGMENTS + 1
