"""Batches of a feed, read ahead in a background thread and checked."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import chex
import numpy as np

from valkyrie import edges, types
from valkyrie.errors import DataError
from valkyrie.types import Batch


def prefetch(
  feed: types.TaskFeed,
  spans: Iterable[tuple[int, int]],
  depth: int = 2,
  rows: Sequence[int] | None = None,
) -> Iterator[Batch]:
  """Reads (position, length) spans up to `depth` batches ahead, in a background thread.

  The error of a failed read is raised in place of its batch. Closing the iterator ends the thread.
  A DataError names a row that has tokens to learn in padding.
  """
  ahead: collections.deque[Future[Batch]] = collections.deque()
  reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix='prefetch')
  try:
    for position, length in spans:
      batch = reader.submit(_checked, feed, position, length, rows)
      ahead.append(batch)
      if len(ahead) > depth:
        yield ahead.popleft().result()
    while ahead:
      yield ahead.popleft().result()
  finally:
    reader.shutdown(cancel_futures=True)


def _checked(feed: types.TaskFeed, position: int, length: int, rows: Sequence[int] | None) -> Batch:
  """Reads a batch; raises a DataError if its arrays are not as `types.Batch` says.

  This includes a token to learn in padding, which mixers do not read.
  """
  batch = feed.read(position, length, rows)
  row_count = feed.batch_size
  if rows is not None:
    row_count = len(rows)
  shape = (row_count, length)
  with edges.asserted(
    lambda: (
      f'The feed {type(feed).__name__} returned {edges.described(batch)} for {shape[0]} rows of '
      f'{length} tokens'
    ),
    f'Return a valkyrie.types.Batch with arrays of shape {shape}: weights of floats, and otherwise '
    'integers.',
    DataError,
  ):
    chex.assert_shape([*batch], [shape] * len(batch))
    kinds = [float if name == 'weights' else int for name in Batch._fields]
    chex.assert_type([*batch], kinds)
  is_padding = np.asarray(batch.segment_ids) == 0
  is_learned = np.asarray(batch.weights) > 0
  is_lost = is_padding & is_learned
  if is_lost.any():
    places_lost = np.argwhere(is_lost)
    row, place = places_lost[0].tolist()
    raise DataError(
      f'The feed {type(feed).__name__} has a token to learn with segment_ids of 0, in row {row} at '
      f'token {position + place}. 0 is padding, which the model does not read. Count the documents '
      'of a row from 1, see valkyrie.types.Batch.'
    )
  return batch
