"""The loaded configuration as data, and its files in the directory of a run.

    model_dir/config.gin             the parsed statements; a copy elsewhere begins another run
    model_dir/config.json            the same as data: literals, and values with macros resolved
    model_dir/operative_config.gin   the constructed configurables, with their defaults

All three are written by one process, without secrets. StorageError is raised if the folder cannot
be written.
"""

import json
import os
import pathlib
from typing import Any

import gin

from valkyrie import __version__
from valkyrie.config import parse
from valkyrie.config.parse import Statement
from valkyrie.config.redact import redact
from valkyrie.errors import storage_errors


def bindings() -> dict[str, Any]:
  """{name: value} of all bindings, as JSON values: macros resolved, references as '@name'."""
  return _as_data(redact(gin.config_str()))['bindings']


def write_configuration(model_dir: str | os.PathLike) -> None:
  """Writes config.gin and config.json; keeps other earlier versions as NAME.1, NAME.2, ..."""
  text = redact(gin.config_str())
  _write(pathlib.Path(model_dir) / 'config.gin', parse.RECORDED + '\n' + text)
  data = json.dumps(_as_data(text), indent=2, ensure_ascii=False)
  _write(pathlib.Path(model_dir) / 'config.json', data + '\n')


def write_operative_configuration(model_dir: str | os.PathLike) -> None:
  """Writes operative_config.gin, with the configurables that have been constructed so far."""
  _write(pathlib.Path(model_dir) / 'operative_config.gin', redact(gin.operative_config_str()))


def _as_data(text: str) -> dict[str, Any]:
  """The imports, macros and bindings of a gin text, as config.json holds them."""
  statements = [Statement('config.gin', parsed) for parsed in parse.parse(text)]
  macros = parse.macros_of(statements)
  others = [item for item in statements if item.is_binding and not item.is_macro]

  def plain(value):
    value, _ = parse.resolve(value, macros)
    if isinstance(value, dict):
      return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)

  return {
    'written_by': parse.WRITTEN_BY,
    'version': __version__,
    'imports': [item.parsed.format() for item in statements if item.is_import],
    'macros': {name: plain(item.parsed.value) for name, item in macros.items()},
    'statements': {item.name: repr(item.parsed.value) for item in statements if item.is_binding},
    'bindings': {item.name: plain(item.parsed.value) for item in others},
  }


def _write(path: pathlib.Path, text: str) -> None:
  with storage_errors(f'{path} cannot be written', 'Make room, or pass another --model_dir.'):
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


def _replace(path: pathlib.Path, data: bytes) -> None:
  """Writes a file atomically."""
  temporary = path.with_name(f'.{path.name}.new')
  temporary.write_bytes(data)
  temporary.replace(path)
