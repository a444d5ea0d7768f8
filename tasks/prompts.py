"""Prompts and answers of your own; only the answers are learned.

The files are as in the task text: JSON, CSV, .parquet and .arrow, also compressed. The options are

  prompt      the column of the prompt (default: prompt)
  answer      the column of the answer (default: answer)
  held_out    the validation split, as in the task text (default: validation files, or 0.01)
  splits      as in the task text
"""

from collections.abc import Iterator

from valkyrie.data.document_source import TextDocument, register
from valkyrie.tasks.text import TextSource


class PromptSource(TextSource):
  """The prompts and answers in the files at `location`."""

  SHARE = '0.01'
  COLUMNS = ('prompt', 'answer')
  OPTIONS = ('prompt', 'answer', 'held_out', 'splits')

  def __init__(
    self,
    location: str | None = None,
    prompt: str = 'prompt',
    answer: str = 'answer',
    held_out: str | None = None,
    splits: str | None = None,
  ):
    super().__init__(location, held_out=held_out, splits=splits)
    self._columns = [prompt, answer]

  def documents(self, split: str, shard: int, shards: int) -> Iterator[TextDocument]:
    for prompt, answer in self._rows(split, shard, shards):
      if self._is_in(split, prompt + answer):
        yield TextDocument(answer, '', name='', prompt=prompt)


register('prompts', PromptSource(), prompts=True)
