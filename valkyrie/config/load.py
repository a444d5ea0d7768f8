"""Strict loading of gin files and `--gin.NAME=VALUE` flags.

gin accepts misspelled and unused macros, and reports a missing value only at construction, possibly
after minutes of data processing and compilation. `load_gin` first checks all statements against the
registered signatures.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import copy
import importlib
import inspect
from typing import Any

import gin
from gin import config as gin_config

from valkyrie.config import check, parse, value_types
from valkyrie.config.parse import Macro, Reference, Statement
from valkyrie.config.registry import parameters_of, required
from valkyrie.errors import ConfigurationError


def load_gin(
  files: Sequence[str],
  flags: Sequence[str] = (),
  *,
  search_paths: Sequence[str] = (),
  allowed_imports: Sequence[str] = (),
  modules: Sequence[str] = (),
) -> None:
  """Parses `files`, then `flags`, and locks gin.

  Args:
    files: gin files; later ones override earlier ones. `gin/x.gin` is found from any folder.
    flags: '--gin.NAME=VALUE' arguments; the last one of a name counts.
    search_paths: folders to search for files and includes, after the current folder.
    allowed_imports: packages that gin files may import besides valkyrie.
    modules: the modules of configurables, which must be imported before gin is locked.

  Raises:
    ConfigurationError: with the flag, or the file and line, and a correction.
  """
  statements = parse.read(files, flags, search_paths, allowed_imports)
  check.check_macro_names(statements)
  value_types.check_flag_types(statements)
  for module in modules:
    importlib.import_module(module)
  for statement in statements:
    if statement.is_import:
      _import(statement)
  effective = check.effective_bindings(statements)
  check.check_references(effective)
  value_types.check_parameter_types(effective)
  try:
    for key, statement in effective.items():
      gin.bind_parameter(key, _gin_value(statement.parsed.value))
    gin.finalize()
  except ValueError as error:
    raise ConfigurationError(f'gin does not accept the configuration: {error}') from error


@contextlib.contextmanager
def override_gin(files: Sequence[str], flags: Sequence[str]) -> Iterator[None]:
  """A context in which gin files and flags override the configuration of `load_gin`.

  Raises:
    ConfigurationError: like `load_gin`; a macro must exist already.
  """
  before = copy.copy(gin_config._CONFIG)
  before = {key: copy.copy(bound) for key, bound in before.items()}
  effective = check.effective_bindings(parse.read(files, flags))
  with gin.unlock_config():
    for key, statement in effective.items():
      scope, selector, _ = key
      if selector == 'gin.macro' and (scope, selector) not in before:
        raise ConfigurationError(f'{statement.where}: no gin file of this run defines %{scope}.')
      gin.bind_parameter(key, _gin_value(statement.parsed.value))
  try:
    yield
  finally:
    gin_config._CONFIG.clear()
    gin_config._CONFIG.update(before)


def check_call(function: Callable, *given: str) -> None:
  """Checks that every parameter of a run mode is bound, has a default, or is `given`.

  Raises:
    ConfigurationError: with the name of the parameter.
  """
  bound = gin.get_bindings(function, resolve_references=False)
  name = inspect.unwrap(function).__name__
  for parameter in required(parameters_of(function)):
    if parameter not in bound and parameter not in given:
      raise ConfigurationError(
        f'{name}.{parameter} has no value. Add `{name}.{parameter} = ...` to the gin file.'
      )


def _import(statement: Statement) -> None:
  module = statement.parsed.module
  try:
    importlib.import_module(module)
  except ModuleNotFoundError as error:
    if not f'{module}.'.startswith(f'{error.name}.'):
      raise  # the module exists, but one of its own imports fails: the traceback shows it
    raise ConfigurationError(
      f'{statement.where}: there is no module {error.name}. Install it, or start the command in '
      'the folder that contains it.'
    ) from error
  gin.parse_config(statement.parsed.format())  # which adds the line to config.gin


def _gin_value(value: Any) -> Any:
  """Replaces `Macro` and `Reference` by gin's own references."""
  if isinstance(value, dict):
    return {_gin_value(key): _gin_value(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_gin_value(item) for item in value)
  if isinstance(value, Macro):
    return gin_config.ParserDelegate().macro(value.name)
  if isinstance(value, Reference):
    return gin_config.ParserDelegate().configurable_reference(value.name, value.evaluated)
  return value
