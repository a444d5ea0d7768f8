"""Batches of training steps: read ahead, checked, and placed on the devices."""

from collections.abc import Iterator

from valkyrie.data.feed import prefetch
from valkyrie.distributed.consistency import TokenConsistency
from valkyrie.errors import DataError
from valkyrie.training.reading import Reading
from valkyrie.training.setup import Setup
from valkyrie.types import Batch


def batches(reading: Reading, setup: Setup, steps: range) -> Iterator[Batch]:
  """The batch [B, N·C] of each step, on the devices.

  Raises:
    DataError: a document is longer than the model's attention sees, or two processes read different
      tokens.
  """
  partitioner = setup.partitioner
  batch_size, max_context = setup.settings.batch_size, setup.model.about.max_context
  rows = partitioner.local_rows(batch_size)
  check_consistency = TokenConsistency(reading.feed, rows)
  spans = ((reading.place(n), setup.curriculum.phase(n).tokens_per_row) for n in steps)
  for step, batch in zip(steps, prefetch(reading.feed, spans, rows=rows), strict=True):
    longest = int(batch.positions.max()) + 1
    if max_context is not None and longest > max_context:
      raise DataError(
        f'Step {step} reads a document of {longest} tokens or more, but the model sees at most '
        f'{max_context} (FullAttention.max_context). Raise it, or use LongformerAttention.'
      )
    check_consistency(step, reading.place(step), batch)
    yield partitioner.place_batch(batch, batch_size)
