"""FineWeb: web pages in files with its published columns (text, id, url, ...).

The location of the files is the `source`, see `valkyrie.tasks.text`:

  /data/fineweb/sample/10BT            a folder (all *.parquet below it), a file, or a pattern
  gs://bucket/fineweb/000_*.parquet    the same in a bucket (s3:// and hdfs:// too, by pyarrow)
  hf://HuggingFaceFW/fineweb           a stream from Hugging Face (needs the package `datasets`);
                                       hf://HuggingFaceFW/fineweb/sample-10BT for one configuration

A page is a document. The pages of one host are a sequence. All pages of a host are in the same
split: the hash of its name puts one host of 200 into 'validation'.
"""

from collections.abc import Iterator
import itertools
from typing import Any, Self
import urllib.parse

from valkyrie.data.document_source import DocumentSource, TextDocument, register, stable_hash
from valkyrie.data.records import Records
from valkyrie.data.source_files import SourceFiles
from valkyrie.errors import ConfigurationError, DataError

COLUMNS = ('text', 'id', 'url')
FORMATS = ('.parquet',)  # a downloaded folder has a README.md as well
VALIDATION_ONE_IN = 200
_STREAMED = 'hf://'


class FineWebSource(DocumentSource):
  """The pages of FineWeb at `location`."""

  def __init__(self, location: str | None = None):
    super().__init__(splits=('train', 'validation'))
    self._location = location

  def at(self, location: str | None, **options: str) -> Self:
    if options:
      raise ConfigurationError(f'The task fineweb has no options, but got {", ".join(options)}.')
    return type(self)(location)

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    location = self._known_location()
    if location.startswith(_STREAMED):
      pages = itertools.islice(_stream(location), shard, None, shards)
    else:
      pages = Records(location, COLUMNS, FORMATS).rows(shard, shards)
    for page in pages:
      host = _host(page['url'])
      if _split(host) == split:
        yield TextDocument(page['text'] or '', sequence_key=host, name=page['id'] or '')

  def describe(self, split: str) -> dict[str, Any]:
    location = self._known_location()
    if location.startswith(_STREAMED):
      return {'kind': 'fineweb, streamed'}
    return {'kind': 'fineweb'} | Records(location, COLUMNS, FORMATS).describe()

  def files(self, split: str) -> SourceFiles | None:
    location = self._known_location()
    return None if location.startswith(_STREAMED) else SourceFiles(location, FORMATS)

  def _known_location(self) -> str:
    if self._location is None:
      raise ConfigurationError(
        'The task fineweb needs the location of its parquet shards. Bind TaskFeed.source = '
        "'/data/fineweb' (a directory, a pattern, gs://... or hf://HuggingFaceFW/fineweb), or "
        'pass --source to build_store.'
      )
    return self._location


def _host(url: str | None) -> str:
  try:
    host = urllib.parse.urlsplit(url or '').hostname
  except ValueError:  # crawls contain invalid hosts, such as an unclosed bracket
    host = None
  return host or url or ''


def _split(host: str) -> str:
  return 'train' if stable_hash(host) % VALIDATION_ONE_IN else 'validation'


def _stream(location: str) -> Iterator[dict[str, Any]]:
  try:
    import datasets  # noqa: PLC0415  (an optional package)
  except ImportError as error:
    raise ConfigurationError(
      f'The source {location} needs the package datasets, which is not installed. '
      'Run pip install datasets, or use a directory of parquet shards.'
    ) from error
  owner, _, rest = location.removeprefix(_STREAMED).partition('/')
  name, _, configuration = rest.partition('/')
  try:
    pages = datasets.load_dataset(
      f'{owner}/{name}', configuration or None, split='train', streaming=True
    )
    missing = [column for column in COLUMNS if column not in (pages.column_names or COLUMNS)]
    if missing:
      raise DataError(
        f'{location} has no column {", ".join(missing)}, so it is not FineWeb. Use '
        'hf://HuggingFaceFW/fineweb or a data set with the columns text, id and url.'
      )
    yield from pages
  except (OSError, ValueError) as error:
    raise DataError(f'Streaming {location} failed ({error}). Run again to continue.') from error


register('fineweb', FineWebSource())
