"""Rows of a data set that Hugging Face streams: hf://OWNER/NAME, or hf://OWNER/NAME/CONFIGURATION."""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import itertools
from typing import Any

from valkyrie.data.records import Row, check_columns, check_texts
from valkyrie.errors import ConfigurationError, DataError

STREAMED = 'hf://'


class StreamedRecords:
  """The rows of the split 'train', of which the columns are checked; see `Records`."""

  def __init__(self, location: str, columns: Sequence[str]):
    self._location, self._columns = location, columns

  def rows(self, part: int, parts: int) -> Iterator[Row]:
    """The rows of one of `parts` parts. Every part streams all rows."""
    return itertools.islice(self._all(), part, None, parts)

  def describe(self) -> dict[str, Any]:
    """For store.json: the hash of the revision, since the files are not known."""
    with self._errors():
      return {'streamed': _revision(self._location).hash}

  def _all(self) -> Iterator[Row]:
    with self._errors():
      for row in _revision(self._location).as_streaming_dataset(split='train'):
        check_columns(self._columns, list(row), self._location)
        check_texts(row, self._columns, self._location)
        yield row

  @contextlib.contextmanager
  def _errors(self) -> Iterator[None]:
    try:
      yield
    except (OSError, ValueError) as error:
      raise DataError(
        f'Streaming {self._location} failed ({error}). Run again to continue.'
      ) from error


@functools.cache
def _revision(location: str) -> Any:
  """The builder of a data set, which has the revision of its first use in this process."""
  try:
    import datasets  # noqa: PLC0415  (an optional package)  # pyright: ignore
  except ImportError as error:
    raise ConfigurationError(
      f'The source {location} needs the package datasets, which is not installed. '
      'Run pip install datasets, or use a directory of parquet shards.'
    ) from error
  owner, _, rest = location.removeprefix(STREAMED).partition('/')
  name, _, configuration = rest.partition('/')
  return datasets.load_dataset_builder(f'{owner}/{name}', configuration or None)
