"""From gin files and `--gin.NAME=VALUE` flags to a locked gin configuration, strictly.

gin lets a misspelt or unused macro pass, and finds a forgotten value only when something is
constructed, maybe after minutes of data and compilation. `load` checks everything that can be
known from the statements and the registered signatures, and says it in one message.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import copy
import importlib
import inspect
import json
import os
import pathlib
import tempfile
from typing import Any

import gin
from gin import config as gin_config

from valkyrie import gin_checks, gin_parts, gin_reader
from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.gin_reader import Macro, Reference, Statement
from valkyrie.redaction import redact


def load(
  files: Sequence[str],
  flags: Sequence[str] = (),
  *,
  search_paths: Sequence[str] = (),
  allowed_imports: Sequence[str] = (),
  rooms: Sequence[str] = (),
) -> None:
  """Parses `files`, then `flags`, and locks gin.

  Args:
    files: gin files; later ones override earlier ones. `gin/x.gin` is found from any folder.
    flags: '--gin.NAME=VALUE' as typed; the last one of a name counts.
    search_paths: folders where files and includes are looked for, after the current one.
    allowed_imports: packages that gin files may import besides valkyrie.
    rooms: modules that hold configurables. They are imported here: none can be added once gin is
      locked.

  Raises:
    ConfigurationError: naming the flag, or the file and line, and what to write instead.
  """
  statements = gin_reader.read(files, flags, search_paths, allowed_imports)
  gin_checks.check_macro_names(statements)
  gin_checks.check_kinds_kept(statements)
  for room in rooms:
    importlib.import_module(room)
  for statement in statements:
    if statement.is_import:
      _import(statement)
  effective = gin_checks.effective_bindings(statements)
  gin_checks.check_values(effective)
  gin_parts.check_parts(effective)
  try:
    for key, statement in effective.items():
      gin.bind_parameter(key, _gin_value(statement.parsed.value))
    gin.finalize()
  except ValueError as error:
    raise ConfigurationError(f'gin refuses the configuration: {error}') from error


@contextlib.contextmanager
def overlaid(files: Sequence[str], flags: Sequence[str]) -> Iterator[None]:
  """Within it, these gin files and flags lie over what `load` has loaded.

  Raises:
    ConfigurationError: as `load` does; what they bind must be there already, or have a default.
  """
  before = copy.copy(gin_config._CONFIG)
  before = {key: copy.copy(bound) for key, bound in before.items()}
  effective = gin_checks.effective_bindings(gin_reader.read(files, flags))
  with gin.unlock_config():
    for key, statement in effective.items():
      scope, selector, _ = key
      if selector == 'gin.macro' and (scope, selector) not in before:
        raise ConfigurationError(f'{statement.where}: no gin file of this run defines %{scope}')
      gin.bind_parameter(key, _gin_value(statement.parsed.value))
  try:
    yield
  finally:
    gin_config._CONFIG.clear()
    gin_config._CONFIG.update(before)


def check_call(function: Callable, *given: str) -> None:
  """Raises ConfigurationError unless gin or the caller, who gives `given`, supplies every argument.

  For a run mode before it is called; what gin itself constructs (`@X()`) is checked by `load`.
  """
  bound = gin.get_bindings(function, resolve_references=False)
  name = inspect.unwrap(function).__name__
  for parameter in gin_checks.required(gin_checks.parameters_of(function)):
    if parameter not in bound and parameter not in given:
      raise ConfigurationError(
        f'{name}.{parameter} has no value: add `{name}.{parameter} = ...` to the gin file'
      )


def bindings() -> dict[str, Any]:
  """What is bound, by name, as JSON can hold it: macros resolved, references as '@name'."""
  return _as_data(redact(gin.config_str()))['bindings']


def save(model_dir: str | os.PathLike) -> None:
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


def save_operative(model_dir: str | os.PathLike) -> None:
  """Writes operative_config.gin: what has been constructed so far, with its defaults.

  Raises:
    StorageError: the folder cannot be written.
  """
  _write(pathlib.Path(model_dir) / 'operative_config.gin', redact(gin.operative_config_str()))


def _import(statement: Statement) -> None:
  module = statement.parsed.module
  try:
    importlib.import_module(module)
  except ModuleNotFoundError as error:
    if not f'{module}.'.startswith(f'{error.name}.'):
      raise  # the package is there and misses one of its own: its traceback tells more
    raise ConfigurationError(
      f'{statement.where}: there is no module {error.name}: is it installed, or in the folder '
      'where this was started?'
    ) from error
  gin.parse_config(statement.parsed.format())  # so that config.gin has the line


def _gin_value(value: Any) -> Any:
  """`value` with gin's own references in the place of ours."""
  if isinstance(value, dict):
    return {_gin_value(key): _gin_value(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_gin_value(item) for item in value)
  if isinstance(value, Macro):
    return gin_config.ParserDelegate().macro(value.name)
  if isinstance(value, Reference):
    return gin_config.ParserDelegate().configurable_reference(value.name, value.evaluated)
  return value


def _as_data(text: str) -> dict[str, Any]:
  """config.json: imports, macros and bindings of a gin text; references stand as '@name'."""
  statements = [Statement('config.gin', parsed) for parsed in gin_reader.parse(text)]
  bindings = [item for item in statements if item.is_binding]
  macros = {item.name: item for item in bindings if item.is_macro}

  def plain(value):
    value, _ = gin_checks.resolve(value, macros)
    if isinstance(value, dict):
      return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [plain(item) for item in value]
    known = value is None or isinstance(value, bool | int | float | str)
    return value if known else str(value)

  return {
    'written_by': gin_reader.WRITTEN_BY,
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
