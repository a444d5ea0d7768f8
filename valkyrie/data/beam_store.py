"""Build of a token store by a pipeline of Apache Beam, on the machines of its runner.

The elements of the pipeline are the numbers of the shards. A worker builds a shard, so every worker
reads the source and writes to the directory of the store.
"""

# Beam is an optional package.
# pyright: reportMissingImports=false

from collections.abc import Sequence
import functools
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.utils.shared import Shared

from valkyrie.data import store_builder
from valkyrie.data.store_builder import Order
from valkyrie.errors import ConfigurationError, DataError


def build(order: Order, options: Sequence[str], *, rebuild: bool = False) -> dict[str, Any]:
  """Builds the same store as `store_builder.build`; returns store.json.

  Args:
    order, rebuild: see `store_builder.build`.
    options: Beam's options, as on its command line, such as --runner=NAME.

  Raises:
    ConfigurationError: as in `store_builder.build`, or Beam rejects its options.
    DataError: as in `store_builder.build`, or the pipeline failed or wrote elsewhere.
  """
  try:
    pipeline = beam.Pipeline(options=PipelineOptions([*options]))
  except (AttributeError, ImportError, ValueError) as error:
    raise ConfigurationError(
      f'Apache Beam refuses its options {" ".join(options)}: {error}. Correct what follows --beam.'
    ) from error
  information = store_builder.build(
    order, rebuild=rebuild, build_shards=functools.partial(_run, pipeline, order)
  )
  if information is None:
    raise DataError(
      f'The pipeline has ended, but {order.output} lacks shards. The workers write there, so '
      '--output must be a directory that all their machines share.'
    )
  return information


def _run(pipeline: beam.Pipeline, order: Order, numbers: Sequence[int]) -> None:
  """Builds the shards with these numbers."""
  _ = pipeline | beam.Create(numbers) | beam.ParDo(_BuildShard(order))
  try:
    pipeline.run().wait_until_finish()
  except Exception as error:  # runners raise many types, with the traceback of a worker as text
    *_, reason = str(error).strip().splitlines() or [repr(error)]
    raise DataError(
      f'The pipeline has failed: {reason} The lines above have more. Finished shards are kept. Run '
      'the same command again to continue.'
    ) from error


class _BuildShard(beam.DoFn):
  """Builds the shard with a given number. The runner shows the numbers of documents and tokens."""

  def __init__(self, order: Order):
    self._order = order
    self._shared = Shared()
    self._documents = Metrics.counter('valkyrie', 'documents')
    self._tokens = Metrics.counter('valkyrie', 'tokens')

  def setup(self) -> None:
    # All threads of a worker share a bench.
    self._bench = self._shared.acquire(lambda: store_builder.Bench(self._order))

  def process(self, number: int) -> None:
    self._bench.build(number, self._count)

  def _count(self, documents: int, tokens: int) -> None:
    self._documents.inc(documents)
    self._tokens.inc(tokens)
