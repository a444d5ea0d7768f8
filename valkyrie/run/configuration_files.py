"""Writes the files of a configuration into the directory of a run; see `config.record`."""

import os
import pathlib

from valkyrie.config import record
from valkyrie.storage import whole_file


def write_configuration(model_dir: str | os.PathLike) -> None:
  """Writes config.gin and config.json; keeps other earlier versions as NAME.1, NAME.2, ...

  Raises a StorageError if the folder cannot be written.
  """
  for name, text in record.configuration_texts().items():
    whole_file.write_version(pathlib.Path(model_dir, name), text.encode())


def write_operative_configuration(model_dir: str | os.PathLike) -> None:
  """Writes operative_config.gin, as `write_configuration` does the others."""
  text = record.operative_configuration_text()
  whole_file.write_version(pathlib.Path(model_dir, 'operative_config.gin'), text.encode())
