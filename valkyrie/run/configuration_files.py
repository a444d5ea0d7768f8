"""Writes the files of a configuration into the directory of a run; see `config.record`."""

import itertools
import os
import pathlib

from valkyrie import foreign
from valkyrie.config import record
from valkyrie.errors import storage_errors
from valkyrie.storage import held_folder, whole_file

_ADVICE = 'Make room, or pass another --model_dir.'


def write_configuration(model_dir: str | os.PathLike) -> None:
  """Writes config.gin and config.json; keeps other earlier versions as NAME.1, NAME.2, ...

  Raises a StorageError if the folder cannot be written.
  """
  for name, text in record.configuration_texts().items():
    _write(pathlib.Path(model_dir, name), text.encode())


def write_operative_configuration(model_dir: str | os.PathLike) -> None:
  """Writes operative_config.gin, as `write_configuration` does the others."""
  text = record.operative_configuration_text()
  _write(pathlib.Path(model_dir, 'operative_config.gin'), text.encode())


def _write(path: pathlib.Path, content: bytes) -> None:
  """Replaces a file, and keeps an earlier version under the next free number."""
  with storage_errors(f'{path} cannot be written', _ADVICE, also=(ValueError,)):
    place = held_folder.place(path)
    if place.is_file():
      old = foreign.content(place)
      if old == content:
        return
      whole_file.write(_free_number(path), old, _ADVICE)
    whole_file.write(path, content, _ADVICE)


def _free_number(path: pathlib.Path) -> pathlib.Path:
  versions = (path.with_name(f'{path.name}.{number}') for number in itertools.count(1))
  return next(each for each in versions if not os.path.lexists(held_folder.place(each)))
