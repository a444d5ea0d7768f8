"""Background reading of batches ahead of their use."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from valkyrie.types import Batch, TaskFeed


def prefetch(
  feed: TaskFeed,
  spans: Iterable[tuple[int, int]],
  depth: int = 2,
  rows: Sequence[int] | None = None,
) -> Iterator[Batch]:
  """Reads (position, length) spans up to `depth` batches ahead, in a background thread.

  The error of a failed read is raised in place of its batch. Closing the iterator ends the thread.
  """
  ahead: collections.deque[Future[Batch]] = collections.deque()
  reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix='prefetch')
  try:
    for position, length in spans:
      ahead.append(reader.submit(feed.read, position, length, rows))
      if len(ahead) > depth:
        yield ahead.popleft().result()
    while ahead:
      yield ahead.popleft().result()
  finally:
    reader.shutdown(cancel_futures=True)
