"""Settings for an unknown text: how much of it validates, and whether it is cut.

    python -m valkyrie.data.own_text LOCATION --gin_file=gin/words_cpu.gin [--gin.NAME=VALUE ...]

prints the flags of `valkyrie.main` that make this run read the text, a line each, and says in words
how it is read. Documents stay whole, so that a model is judged by what it remembers from their
beginnings, unless there are too few for the rows of a batch.
"""

import argparse
from collections.abc import Sequence
import math
import sys
from typing import Any, NamedTuple

from valkyrie.config import parse
from valkyrie.data.records import STREAMED, Records
from valkyrie.data.splits import TRAIN, VALIDATION
from valkyrie.distributed import console

_DOCUMENTS_PER_ROW = 2  # at least
_SMALLEST_CUT = 16  # bytes: shorter pieces teach nothing
# (bytes of the files, from which on this share validates): a large text is validated in seconds,
# and a small one has enough targets.
_SMALLEST_SHARE = 0.001
_LARGEST_SHARE = 0.1
_SHARES = ((200_000_000, _SMALLEST_SHARE), (20_000_000, 0.01))


class OwnText(NamedTuple):
  """How a text is read: the flags of a run for it, and sentences that say the same to a user."""

  flags: list[str]
  sentences: list[str]


def own_text(location: str, files: Sequence[str], flags: Sequence[str] = ()) -> OwnText:
  """How a run with these gin files and flags reads the text at a location.

  If the files and flags set `held_out` or `text_cut`, these values stay.

  Raises:
    ConfigurationError: a gin file or flag cannot be read.
    DataError: there is no text, or it is damaged.
    StorageError: a bucket refuses.
  """
  statements = parse.read_statements(files, flags)
  macros = parse.macros_of(statements)
  bound = {}
  for item in statements:
    if item.is_binding:
      bound[item.name] = item.parsed.value

  def value_of(name: str) -> Any:
    bound_value = bound.get(name, parse.Macro(name))
    value, _ = parse.resolve(bound_value, macros)
    if isinstance(value, parse.Macro):  # nothing gives it a value
      return None
    return value

  held_out = value_of('held_out')
  text_cut = value_of('text_cut')
  column = value_of('text_column') or 'text'
  values = {'text': location, 'text_column': column, 'text_splits': value_of('text_splits')}
  records = None  # the size and the number of documents of a stream are unknown
  if not location.startswith(STREAMED):
    split = TRAIN
    if values['text_splits'] is not None:
      split = None
    records = Records(location, [column], split=split)
  sentences = []
  if held_out is None:
    held_out = _share(records)
    if held_out is None:
      sentences.append('The files of the split validation validate.')
    else:
      sentences.append(f'{held_out:.1%} of the documents validate.')
  if text_cut is None and records is not None:
    rows = value_of('batch_size') or 1
    needed = _DOCUMENTS_PER_ROW * rows
    if isinstance(held_out, float):
      validation_rows = value_of('validation/TaskFeed.batch_size') or rows
      needed_for_validation = _DOCUMENTS_PER_ROW * validation_rows / held_out
      needed = max(needed, math.ceil(needed_for_validation))
    text_cut, sentence = _cut(records, column, needed)
    sentences.append(sentence)
  values['held_out'] = held_out
  values['text_cut'] = text_cut
  run_flags = ['--gin_file=gin/data/text.gin']
  for name, value in values.items():
    if value is not None:
      run_flags.append(f'{parse.FLAG}{name}={value!r}')
  return OwnText(run_flags, sentences)


def _share(records: Records | None) -> float | None:
  """The share of documents that validates; None if files do, by their names."""
  if records is None:
    return _SMALLEST_SHARE
  if VALIDATION in records.files.splits:
    return None
  size = sum(file.size for file in records.files.files)
  for least, share in _SHARES:
    if size >= least:
      return share
  return _LARGEST_SHARE


def _cut(records: Records, column: str, needed: int) -> tuple[int | None, str]:
  """The bytes above which documents are cut to be as many as needed, or None; and a sentence."""
  if not records.has_fewer_rows(needed):
    return None, 'Documents are read whole.'
  documents = 0
  size = 0
  for row in records.rows(0, 1):
    text = row[column] or ''
    documents += 1
    size += len(text.encode(errors='replace'))
  cut = max(_SMALLEST_CUT, size // needed)
  return cut, (
    f'The text has {documents:,} documents, and the rows of the batches need {needed:,}. They '
    f'are cut into pieces of at most {cut:,} bytes, so no longer memory is learned or measured. '
    'Set text_cut for another size.'
  )


@console.lasting_streams()
@console.program
def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the flags."""
  parser = argparse.ArgumentParser('valkyrie.data.own_text', allow_abbrev=False)
  parser.add_argument('location')
  parser.add_argument('--gin_file', action='append', default=[])
  known, others = parser.parse_known_args(arguments)
  gin_flags = [flag for flag in others if flag.startswith(parse.FLAG)]
  settings = own_text(known.location, known.gin_file, gin_flags)
  for sentence in settings.sentences:
    print(sentence, file=sys.stderr)
  print(*settings.flags, sep='\n')


if __name__ == '__main__':
  sys.exit(main())
