"""Batches of several sources by weight, as a pure function of the position in the rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import functools
import itertools
import logging
import math
import operator
from typing import Any, NamedTuple

import gin
import numpy as np

from valkyrie.config.ranges import NonNegativeFloat
from valkyrie.data.feed import TaskFeed, segment_ids_of
from valkyrie.data.mixed_rows import MixedRow
from valkyrie.data.store_location import build
from valkyrie.data.token_store import content_hash
from valkyrie.errors import ConfigurationError
from valkyrie.types import Batch

Weights = Mapping[str, NonNegativeFloat]
_warn_once = functools.cache(logging.warning)
_MAX_NAMED = 8  # rows, and stretches of each row, in a message


class _Span(NamedTuple):
  """A stretch of a row from one source.

  start, length: tokens of the row before the stretch, and tokens of the stretch.
  source: the number of the source.
  place: tokens of the source's row before the stretch.
  other_units: units of the other sources before the stretch.
  """

  start: int
  length: int
  source: int
  place: int
  other_units: int


@gin.configurable
class Mixture:
  """B rows, each of the documents of several sources; see `mixed_rows.MixedRow` for their order.

  It has the attributes of `types.TaskFeed`, and

    sources: the TaskFeed of each source, by name.
    weights: the share of tokens of each source; in the last phase, if it changes.
  """

  def __init__(
    self,
    sources: str | Mapping[str, str | Mapping[str, Any]],
    weights: Weights | Sequence[Weights] | None = None,
    *,
    feed: Callable[..., TaskFeed],
    phases: Callable[[], Any] | None = None,
  ):
    """Creates the feed of each source. The first use of the tokens opens their stores.

    Args:
      sources: arguments of `feed` by the name of the source, over those that gin binds; a string
        is short for {'source': string}. With {'epochs': N} a source ends after N epochs, and its
        share goes to the others. Or the name of a seqio Mixture, 'package.module:NAME', whose
        tasks are the sources.
      weights: numbers in the ratio of the tokens, by the name of the source; or several of these,
        one for each phase of the curriculum. Each source is named in at least one phase: with
        0, or in the phases without its name, it is not read. None takes the rates of the seqio
        Mixture.
      feed: the class of the feeds.
      phases: the class of the curriculum, with several weights. Its `begins` are the positions at
        which its phases begin, in tokens of a row.

    Raises a ConfigurationError if the arguments do not fit together.
    """
    if isinstance(sources, str):
      rates = build([f'--mixture={sources}'], f'Reading the seqio mixture {sources}')
      if weights is None:
        weights = rates
      sources = {task: {'task': task} for task in rates}
    if weights is None:
      raise ConfigurationError(
        f'Mixture.weights has no value. Give each of {", ".join(sources)} a number; tokens '
        'are read in this ratio.'
      )
    phase_weights = weights
    if isinstance(phase_weights, Mapping):
      phase_weights = [phase_weights]
    shares = [_shares(sources, weights_of_phase) for weights_of_phase in phase_weights]
    begins = [0]
    if phases is not None and len(shares) > 1:
      begins = phases().begins
    if len(begins) != len(shares):
      raise ConfigurationError(
        f'Mixture.weights has the weights of {len(shares)} phases, but the curriculum has '
        f'{len(begins)}. Give one set of weights, or one for each phase, with '
        'Mixture.phases = @Curriculum.'
      )
    _check_named(sources, phase_weights)
    self.sources: dict[str, TaskFeed] = {}
    for name, given in sources.items():
      if isinstance(given, str):
        self.sources[name] = feed(source=given)
      else:
        self.sources[name] = feed(**given)
    _check_shared(self.sources)
    self._feeds = list(self.sources.values())
    self._begin = 0
    self.weights = dict(zip(sources, shares[-1], strict=True))
    self._changes = list(zip(begins, shares, strict=True))
    first = self._feeds[0]
    if first.reset_at == 'never':
      raise ConfigurationError(
        "TaskFeed.reset_at = 'never' would carry the memory of one source into another. Set it to "
        "'document' or 'sequence' for a mixture."
      )
    self.batch_size = first.batch_size
    self.vocabulary = first.vocabulary
    self.vocabulary_size = first.vocabulary_size

  @property
  def fingerprint(self) -> str:
    """The hash of the sources' content and of the weights."""
    fingerprints = []
    for name, feed in self.sources.items():
      fingerprints.append([name, feed.fingerprint])
    return content_hash([fingerprints, self._changes])

  @property
  def tokens_per_byte(self) -> float | None:
    """Tokens per byte of text; None if a source has none, or if the weights change."""
    if len(self._changes) > 1:
      return None
    ratios = {name: feed.tokens_per_byte for name, feed in self.sources.items()}
    return mean_tokens_per_byte(self.weights, ratios)

  @property
  def row_tokens(self) -> int:
    """Tokens of the longest row until every source with a weight has been read once."""
    lengths = []
    for feed, weight in zip(self._feeds, self.weights.values(), strict=True):
      if weight:
        length = math.ceil(feed.row_tokens / weight)
        lengths.append(length)
    return max(lengths)

  @property
  def row_end(self) -> int | None:
    ends = []
    for row in self._rows:
      if row.end is not None:
        ends.append(row.end)
    if len(ends) < len(self._rows):
      return None
    return max(ends)

  @property
  def longest(self) -> int:
    return max(feed.longest for feed in self.sources.values())

  def open(self) -> None:
    _ = self._rows

  @functools.cached_property
  def _rows(self) -> list[MixedRow]:
    selections = {name: feed.selection for name, feed in self.sources.items()}
    has_files = any(selection.source for selection in selections.values())
    if has_files:
      from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

      provenance.check_apart(selections)
    changes = []
    for position, shares in self._changes:
      changes.append((position - self._begin, shares))
    rows_of_feeds = [feed.rows for feed in self._feeds]
    mixed_rows = []
    for row, sources in enumerate(zip(*rows_of_feeds, strict=True)):
      mixed_row = MixedRow(sources, row, changes)
      mixed_rows.append(mixed_row)
    return mixed_rows

  def dealt(self, number: int, rows: int, begin: int) -> 'Mixture':
    dealt = copy.copy(self)
    dealt.__dict__.pop('_rows', None)
    dealt_sources = {name: feed.dealt(number, rows, 0) for name, feed in self.sources.items()}
    dealt.sources = dealt_sources
    dealt._feeds = list(dealt_sources.values())
    dealt._begin = begin
    return dealt

  def unfinished(self, position: int) -> int:
    unfinished = 0
    for row, mixed_row in enumerate(self._rows):
      places = mixed_row.places(position)
      for feed, place in zip(self._feeds, places, strict=True):
        unfinished += int(place % feed.rows[row].length)
    return unfinished

  def progress(self, position: int) -> dict[str, float]:
    """Tokens and epochs of each source before a position, over all rows."""
    places = np.array([row.places(position) for row in self._rows])
    read_tokens = places.sum(axis=0)
    progress = {}
    for name, feed, read in zip(self.sources, self._feeds, read_tokens, strict=True):
      progress[f'tokens/{name}'] = int(read)
      progress[f'epochs/{name}'] = read / feed.store.tokens
    return progress

  def read(self, position: int, length: int, rows: Sequence[int] | None = None) -> Batch:
    if rows is None:
      rows = range(len(self._rows))
    parts = [self._read_row(row, position, length) for row in rows]
    leaves = zip(*parts, strict=True)
    return Batch(*map(np.concatenate, leaves))

  def describe(self, position: int, length: int) -> str:
    """Names the documents of the tokens [position, position + length) of all rows by number."""
    names = list(self.sources)
    rows = []
    end = position + length
    named_rows = min(len(self._rows), _MAX_NAMED)
    for row in range(named_rows):
      documents = []
      spans = self._spans(row, position, end)
      for span in itertools.islice(spans, _MAX_NAMED):
        feed = self._feeds[span.source]
        end_of_span = span.place + span.length
        numbers = feed.documents(row, span.place, end_of_span)
        name = names[span.source]
        documents.append(f'{name} {numbers}')
      listed = ', '.join(documents)
      rows.append(f'row {row}: {listed}')
    places = []
    for name, feed in self.sources.items():
      places.append(f'{name} is {feed.store.path}')
    stores = ', '.join(places)
    shown_rows = '; '.join(rows)
    return f'these documents (the first of each row; {stores}): {shown_rows}'

  def _read_row(self, row: int, position: int, length: int) -> Batch:
    """One row, [1, length]."""
    shape = (1, length + 1)
    batch = Batch(
      inputs=np.zeros(shape, np.int32),
      targets=np.zeros(shape, np.int32),
      weights=np.zeros(shape, np.float32),
      positions=np.zeros(shape, np.int32),
      segment_ids=np.zeros(shape, np.int32),
    )
    end = position + length + 1
    for span in self._spans(row, position, end):
      feed = self._feeds[span.source]
      part = feed.read(span.place, span.length, rows=[row])
      unit_numbers = part.segment_ids.astype(np.int64) + span.other_units
      part = part._replace(segment_ids=segment_ids_of(unit_numbers))
      first = span.start - position
      last = first + span.length
      for leaf, values in zip(batch, part, strict=True):
        leaf[:, first:last] = values
    # The last target of a span is the first token of the next one, of another source.
    targets = np.roll(batch.inputs, -1)
    batch = batch._replace(targets=targets)
    leaves = [leaf[:, :length] for leaf in batch]
    return Batch(*leaves)

  def _spans(self, row: int, begin: int, end: int) -> Iterator[_Span]:
    """The stretches of single sources in the tokens [begin, end) of a row, in order."""
    pieces = self._rows[row].pieces(begin, end)
    by_source = itertools.groupby(pieces, operator.attrgetter('source'))
    for source, group in by_source:
      units = list(group)
      first = units[0]
      start = max(begin, first.start)
      stop = min(end, units[-1].end)
      tokens_before, units_before = first.before
      read = start - first.start
      place = int(tokens_before[source]) + read
      other_units = int(units_before.sum() - units_before[source])
      length = stop - start
      yield _Span(start, length, source, place, other_units)


def mean_tokens_per_byte(weights: Weights, ratios: Mapping[str, float | None]) -> float | None:
  """Tokens per byte of a text whose tokens come from sources by weight; None if one has none."""
  bytes_per_token = 0
  for name, weight in weights.items():
    if weight:
      ratio = ratios.get(name)
      if ratio is None:
        return None
      bytes_per_token += weight / ratio
  return 1 / bytes_per_token


def _check_shared(feeds: Mapping[str, TaskFeed]) -> None:
  """Raises a ConfigurationError if the feeds of the sources differ in what a batch shares."""
  first_name, first_feed = next(iter(feeds.items()))
  for option in ('batch_size', 'reset_at', 'vocabulary.fingerprint'):
    value_of = operator.attrgetter(option)
    expected = value_of(first_feed)
    for name, feed in feeds.items():
      value = value_of(feed)
      if value != expected:
        raise ConfigurationError(
          f'The sources of a mixture share {option}, but {name} has {value!r} and '
          f'{first_name} has {expected!r}. Bind the same value for both.'
        )


def _check_named(sources: Mapping[str, Any], phase_weights: Sequence[Weights]) -> None:
  """Raises a ConfigurationError for a source without a weight; warns of one that is not read."""
  named: set[str] = set()
  read: set[str] = set()
  for weights in phase_weights:
    for name, weight in weights.items():
      named.add(name)
      if weight:
        read.add(name)
  unnamed = [name for name in sources if name not in named]
  if unnamed:
    raise ConfigurationError(
      f'Mixture.weights does not name the source {", ".join(unnamed)}. Give it a number; tokens '
      'are read in this ratio. With 0 it is evaluated and not trained on.'
    )
  unread = [name for name in sources if name not in read]
  if unread:
    _warn_once(
      f'Mixture.weights has 0 for {", ".join(unread)}: it is evaluated, and not trained on.'
    )


def _shares(sources: Mapping[str, Any], weights: Weights) -> list[float]:
  """The share of each source by the weights of a phase."""
  unknown = [name for name in weights if name not in sources]
  if unknown or not sources:
    raise ConfigurationError(
      f'Mixture.weights names {", ".join(unknown) or "no source"}, but Mixture.sources has '
      f'{", ".join(sources) or "none"}. Use the same names in both.'
    )
  numbers = list(weights.values())
  are_weights = [_is_weight(number) for number in numbers]
  if not all(are_weights) or not sum(numbers):
    raise ConfigurationError(
      f'Mixture.weights has {dict(weights)}. Use numbers of 0 or more, at least one above 0; '
      'tokens are read in this ratio.'
    )
  total = sum(numbers)
  return [weights.get(name, 0) / total for name in sources]


def _is_weight(value: Any) -> bool:
  if value is True or not isinstance(value, int | float):
    return False
  return 0 <= value < math.inf
