"""FineWeb and FineWeb-Edu: web pages in .parquet files, or streamed from hf://HuggingFaceFW/fineweb.

It is the task text with the column `url` for its option `together`: the pages of a host are a
sequence, and one host of 200 is in 'validation'. Its other options are the same.
"""

from valkyrie.data.document_source import register
from valkyrie.tasks.text import TextSource


class FineWebSource(TextSource):
  """The pages of FineWeb at `location`."""

  FORMATS = ('.parquet',)  # a downloaded folder has a README.md as well

  def __init__(self, location: str | None = None, **options: str):
    super().__init__(location, **{'together': 'url'} | options)


register('fineweb', FineWebSource())
register('fineweb.edu', FineWebSource())
