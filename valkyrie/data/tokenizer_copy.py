"""The files of a tokenizer, copied into a folder that is used by itself: a run or an export."""

import filecmp
import functools
import logging
import os
import pathlib

from valkyrie import foreign
from valkyrie.config.paths import TOKENIZER
from valkyrie.data import template_files, tokenizer_config, tokenizer_file
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import reason_of
from valkyrie.storage import whole_file

# They tell other programs where texts end, and how to sample them.
_FOR_OTHERS = ('generation_config.json', 'special_tokens_map.json')
_LARGEST_FOR_OTHERS = 2**24  # bytes
_warn_once = functools.cache(logging.warning)  # a run copies its tokenizer at each start


def copy_tokenizer(vocabulary: Vocabulary, folder: pathlib.Path) -> None:
  """Copies the files of a vocabulary to FOLDER/tokenizer.json or .model, if it has any.

  A file for other programs that cannot be read is left out, with a warning. Raises a StorageError
  if the folder cannot be written.
  """
  if vocabulary.file is None:
    return
  source = vocabulary.file.parent
  codec = f'{TOKENIZER}{vocabulary.file.suffix}'
  files = [vocabulary.file, source / tokenizer_config.NAME, *template_files.found(source)]
  for file in files:
    if file.is_file():
      name = codec if file == vocabulary.file else str(file.relative_to(source))
      _copy(file, folder / name, tokenizer_file.LARGEST)
  for name in _FOR_OTHERS:
    file = source / name
    if not os.path.lexists(file):
      continue
    try:
      _copy(file, folder / name, _LARGEST_FOR_OTHERS)
    except (OSError, ValueError) as error:
      _warn_once(
        f'{file} is not copied to {folder} ({reason_of(error)}). Nothing here reads it; copy it '
        'beside an export for other programs.'
      )


def _copy(file: pathlib.Path, copied: pathlib.Path, largest: int) -> None:
  """Copies a file of at most `largest` bytes, unless the same content is there."""
  if copied.is_file() and filecmp.cmp(file, copied, shallow=False):
    return
  content = foreign.content(file, largest)
  copied.parent.mkdir(exist_ok=True)
  whole_file.write_version(copied, content)
