"""What the steps of a run read: ahead of time, by this process, and by none differently."""

from collections.abc import Iterator

from valkyrie.data.feed import TaskFeed
from valkyrie.data.prefetch import prefetch
from valkyrie.distributed.consistency import TokenConsistency
from valkyrie.errors import DataError
from valkyrie.models.language_model import Model
from valkyrie.sharding.partitioner import Partitioner
from valkyrie.training.curriculum import Curriculum
from valkyrie.types import Batch


def batches(
  feed: TaskFeed,
  model: Model,
  curriculum: Curriculum,
  layout: Partitioner,
  batch_size: int,
  steps: range,
) -> Iterator[tuple[int, Batch]]:
  """(step, its batch [B, N·C] on the devices) for each step, read ahead.

  Raises:
    DataError: the model would cut a document, or two processes read different tokens.
  """
  rows = layout.rows(batch_size)
  check_consistency = TokenConsistency(feed, rows)
  spans = ((curriculum.position(n), curriculum.phase(n).tokens_per_row) for n in steps)
  for step, batch in zip(steps, prefetch(feed, spans, rows=rows), strict=True):
    longest = int(batch.positions.max()) + 1
    if model.max_context is not None and longest > model.max_context:
      raise DataError(
        f'Step {step} reads a document of {longest} tokens or more, but the model sees at most '
        f'{model.max_context} (FullAttention.max_context). Raise it, or use LongformerAttention.'
      )
    check_consistency(step, curriculum.position(step), batch)
    yield step, layout.place_batch(batch, batch_size)
