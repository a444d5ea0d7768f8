"""The loaded configuration as data, and the files that a run keeps of it.

    model_dir/config.gin             the parsed statements
    model_dir/config.json            the same as data, macros resolved
    model_dir/operative_config.gin   what was constructed, with its defaults

Secrets are left out of all three.
"""

import json
import os
import pathlib
import tempfile
from typing import Any

import gin

from valkyrie.config import check, parse
from valkyrie.config.parse import Statement
from valkyrie.config.redact import redact
from valkyrie.errors import StorageError


def bindings() -> dict[str, Any]:
  """What is bound, by name, as JSON can hold it: macros resolved, references as '@name'."""
  return _as_data(redact(gin.config_str()))['bindings']


def write_configuration(model_dir: str | os.PathLike) -> None:
  """Writes config.gin (what was parsed) and config.json (the same as data, macros resolved).

  Secrets are left out of both.
  A file that is there with other content is kept as NAME.1, NAME.2, ... To be called by one
  process only.

  Raises:
    StorageError: the folder cannot be written.
  """
  text = redact(gin.config_str())
  _write(pathlib.Path(model_dir) / 'config.gin', text)
  data = json.dumps(_as_data(text), indent=2, ensure_ascii=False)
  _write(pathlib.Path(model_dir) / 'config.json', data + '\n')


def write_operative_configuration(model_dir: str | os.PathLike) -> None:
  """Writes operative_config.gin: what has been constructed so far, with its defaults.

  Raises:
    StorageError: the folder cannot be written.
  """
  _write(pathlib.Path(model_dir) / 'operative_config.gin', redact(gin.operative_config_str()))


def _as_data(text: str) -> dict[str, Any]:
  """config.json: imports, macros and bindings of a gin text; references stand as '@name'."""
  statements = [Statement('config.gin', parsed) for parsed in parse.parse(text)]
  bindings = [item for item in statements if item.is_binding]
  macros = {item.name: item for item in bindings if item.is_macro}

  def plain(value):
    value, _ = check.resolve(value, macros)
    if isinstance(value, dict):
      return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [plain(item) for item in value]
    known = value is None or isinstance(value, bool | int | float | str)
    return value if known else str(value)

  return {
    'written_by': parse.WRITTEN_BY,
    'imports': [item.parsed.format() for item in statements if item.is_import],
    'macros': {name: plain(item.parsed.value) for name, item in macros.items()},
    'bindings': {item.name: plain(item.parsed.value) for item in bindings if not item.is_macro},
  }


def _write(path: pathlib.Path, text: str) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
      old = path.read_bytes()
      if old == text.encode():
        return
      number = 1
      while (kept := path.with_name(f'{path.name}.{number}')).exists():
        number += 1
      _replace(kept, old)
    _replace(path, text.encode())
  except OSError as error:
    raise StorageError(
      f'{path} cannot be written: {error}: free space, or pass another --model_dir'
    ) from error


def _replace(path: pathlib.Path, data: bytes) -> None:
  """Writes `path` whole or not at all."""
  handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.')
  try:
    with os.fdopen(handle, 'wb') as file:
      file.write(data)
    os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide it from the run's other readers
    os.replace(temporary, path)
  except BaseException:
    os.unlink(temporary)
    raise
