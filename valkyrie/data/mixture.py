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

from valkyrie.data.feed import TaskFeed, segment_ids_of
from valkyrie.data.mixed_rows import MixedRow
from valkyrie.data.store_location import build
from valkyrie.data.token_store import content_hash
from valkyrie.errors import ConfigurationError
from valkyrie.types import Batch

Weights = Mapping[str, float]
_warn_once = functools.cache(logging.warning)
_MAX_NAMED = 8  # rows, and stretches of each row, in a message


class _Span(NamedTuple):
  """A stretch of a row from one source.

  start, length: tokens of the row before it, and its own.
  place: tokens of the source's row before it; others: units of the other sources before it.
  """

  start: int
  length: int
  source: int
  place: int
  others: int


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
        stands for {'source': string}. With {'epochs': N} a source ends after N epochs, and its
        share goes to the others. Or the name of a seqio Mixture, 'package.module:NAME', whose
        tasks are the sources.
      weights: numbers in the ratio of the tokens, by the name of the source; or several of these,
        one for each phase of the curriculum. Each source is named, in one phase at least: with
        0, or in the phases without its name, it is not read. None takes the rates of the seqio
        Mixture.
      feed: the class of the feeds.
      phases: the class of the curriculum, with several weights. Its `begins` are the positions at
        which its phases begin, in tokens of a row.

    Raises a ConfigurationError if the arguments do not fit together.
    """
    if isinstance(sources, str):
      rates = build([f'--mixture={sources}'], f'Reading the seqio mixture {sources}')
      weights = rates if weights is None else weights
      sources = {task: {'task': task} for task in rates}
    if weights is None:
      raise ConfigurationError(
        f'Mixture.weights has no value. Give each of {", ".join(sources)} a number; tokens '
        'are read in this ratio.'
      )
    of_phases = [weights] if isinstance(weights, Mapping) else weights
    shares = [_shares(sources, of_phase) for of_phase in of_phases]
    begins = [0] if phases is None or len(shares) == 1 else phases().begins
    if len(begins) != len(shares):
      raise ConfigurationError(
        f'Mixture.weights has the weights of {len(shares)} phases, but the curriculum has '
        f'{len(begins)}. Give one set of weights, or one for each phase, with '
        'Mixture.phases = @Curriculum.'
      )
    _check_named(sources, of_phases)
    self.sources = {
      name: feed(**({'source': given} if isinstance(given, str) else given))
      for name, given in sources.items()
    }
    self._feeds = list(self.sources.values())
    self._begin = 0
    self.weights = dict(zip(sources, shares[-1], strict=True))
    self._changes = list(zip(begins, shares, strict=True))
    for option in ('batch_size', 'reset_at', 'vocabulary.fingerprint'):
      first, *others = map(operator.attrgetter(option), self._feeds)
      for name, other in zip([*sources][1:], others, strict=True):
        if other != first:
          raise ConfigurationError(
            f'The sources of a mixture share {option}, but {name} has {other!r} and '
            f'{next(iter(sources))} has {first!r}.'
          )
    first = self._feeds[0]
    if first.reset_at == 'never':
      raise ConfigurationError(
        "A mixture needs TaskFeed.reset_at of 'document' or 'sequence': without resets, the memory "
        'of one source would run on in another.'
      )
    self.batch_size, self.vocabulary = first.batch_size, first.vocabulary
    self.vocabulary_size = first.vocabulary_size

  @property
  def fingerprint(self) -> str:
    """The hash of the sources' content and of the weights."""
    return content_hash([[[n, f.fingerprint] for n, f in self.sources.items()], self._changes])

  @property
  def tokens_per_byte(self) -> float | None:
    """Tokens per byte of text; None if a source has none, or if the weights change."""
    ratios = {name: feed.tokens_per_byte for name, feed in self.sources.items()}
    return mean_tokens_per_byte(self.weights, ratios) if len(self._changes) == 1 else None

  @property
  def row_tokens(self) -> int:
    """Tokens of the longest row until every source with a weight has been read once."""
    weighted = zip(self._feeds, self.weights.values(), strict=True)
    return max(math.ceil(feed.row_tokens / weight) for feed, weight in weighted if weight)

  @property
  def row_end(self) -> int | None:
    ends = [row.end for row in self._rows]
    return None if None in ends else max(end for end in ends if end is not None)

  @property
  def longest(self) -> int:
    return max(feed.longest for feed in self.sources.values())

  @functools.cached_property
  def _rows(self) -> list[MixedRow]:
    selections = {name: feed.selection for name, feed in self.sources.items()}
    if any(selection.source for selection in selections.values()):
      from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

      provenance.check_apart(selections)
    changes = [(position - self._begin, shares) for position, shares in self._changes]
    rows = zip(*(feed.rows for feed in self._feeds), strict=True)
    return [MixedRow(sources, row, changes) for row, sources in enumerate(rows)]

  def dealt(self, number: int, rows: int, begin: int) -> 'Mixture':
    dealt = copy.copy(self)
    dealt.__dict__.pop('_rows', None)
    dealt.sources = {name: feed.dealt(number, rows, 0) for name, feed in self.sources.items()}
    dealt._feeds, dealt._begin = list(dealt.sources.values()), begin
    return dealt

  def unfinished(self, position: int) -> int:
    return sum(
      int(place % feed.rows[row].length)
      for row, mixed in enumerate(self._rows)
      for feed, place in zip(self._feeds, mixed.places(position), strict=True)
    )

  def progress(self, position: int) -> dict[str, float]:
    """Tokens and epochs of each source before a position, over all rows."""
    places = np.array([row.places(position) for row in self._rows])
    found = {}
    for name, feed, read in zip(self.sources, self._feeds, places.sum(axis=0), strict=True):
      found |= {f'tokens/{name}': int(read), f'epochs/{name}': read / feed.store.tokens}
    return found

  def read(self, position: int, length: int, rows: Sequence[int] | None = None) -> Batch:
    rows = range(len(self._rows)) if rows is None else rows
    parts = [self._read_row(row, position, length) for row in rows]
    return Batch(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))

  def describe(self, position: int, length: int) -> str:
    """Names the documents of the tokens [position, position + length) of all rows by number."""
    rows, names = [], [*self.sources]
    for row in range(len(self._rows))[:_MAX_NAMED]:
      spans = itertools.islice(self._spans(row, position, position + length), _MAX_NAMED)
      named = (
        f'{names[number]} {self._feeds[number].documents(row, place, place + size)}'
        for _, size, number, place, _ in spans
      )
      rows.append(f'row {row}: {", ".join(named)}')
    stores = ', '.join(f'{name} is {feed.store.path}' for name, feed in self.sources.items())
    return f'these documents (the first of each row; {stores}): {"; ".join(rows)}'

  def _read_row(self, row: int, position: int, length: int) -> Batch:
    """One row, [1, length]."""
    leaves = Batch(*(np.zeros((1, length + 1), d) for d in ('i4', 'i4', 'f4', 'i4', 'i4')))
    for start, size, source, place, others in self._spans(row, position, position + length + 1):
      part = self._feeds[source].read(place, size, rows=[row])
      numbers = part.segment_ids.astype(np.int64) + others
      part = part._replace(segment_ids=segment_ids_of(numbers))
      for leaf, values in zip(leaves, part, strict=True):
        leaf[:, start - position : start - position + size] = values
    leaves = leaves._replace(targets=np.roll(leaves.inputs, -1))  # across sources too
    return Batch(*(leaf[:, :length] for leaf in leaves))

  def _spans(self, row: int, begin: int, end: int) -> Iterator[_Span]:
    """What the tokens [begin, end) of a row are, in order."""
    pieces = self._rows[row].pieces(begin, end)
    for source, group in itertools.groupby(pieces, operator.attrgetter('source')):
      units = [*group]
      (places, numbers), first, last = units[0].before, units[0], units[-1]
      start, stop = max(begin, first.start), min(end, last.start + last.length)
      place, others = int(places[source]) + start - first.start, numbers.sum() - numbers[source]
      yield _Span(start, stop - start, source, place, int(others))


def mean_tokens_per_byte(weights: Weights, ratios: Mapping[str, float | None]) -> float | None:
  """Tokens per byte of a text whose tokens come from sources by weight; None if one has none."""
  read = {name: weight for name, weight in weights.items() if weight}
  known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
  if not read.keys() <= known.keys():
    return None
  return 1 / sum(weight / known[name] for name, weight in read.items())


def _check_named(sources: Mapping[str, Any], of_phases: Sequence[Weights]) -> None:
  """Raises a ConfigurationError for a source without a weight; warns of one that is not read."""
  unnamed = [name for name in sources if not any(name in weights for weights in of_phases)]
  if unnamed:
    raise ConfigurationError(
      f'Mixture.weights does not name the source {", ".join(unnamed)}. Give it a number; tokens '
      'are read in this ratio. With 0 it is evaluated and not trained on.'
    )
  unread = [name for name in sources if not any(weights.get(name) for weights in of_phases)]
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
      f'{", ".join(sources) or "none"}.'
    )
  numbers = weights.values()
  right = all(isinstance(w, int | float) and w is not True and 0 <= w < math.inf for w in numbers)
  if not right or not sum(weights.values()):
    raise ConfigurationError(
      f'Mixture.weights has {dict(weights)}. Use numbers of 0 or more, at least one above 0; '
      'tokens are read in this ratio.'
    )
  return [weights.get(name, 0) / sum(weights.values()) for name in sources]
