"""From gin files and `--gin.NAME=VALUE` flags to a locked gin configuration, strictly.

gin lets a misspelt or unused macro pass, and finds a forgotten value only when something is
constructed, maybe after minutes of data and compilation. `load_gin` checks everything that can be
known from the statements and the registered signatures, and says it in one message.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import copy
import importlib
import inspect
from typing import Any

import gin
from gin import config as gin_config

from valkyrie.config import check, parse, references
from valkyrie.config.parse import Macro, Reference, Statement
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
    flags: '--gin.NAME=VALUE' as typed; the last one of a name counts.
    search_paths: folders where files and includes are looked for, after the current one.
    allowed_imports: packages that gin files may import besides valkyrie.
    modules: those that hold configurables. They are imported here: none can be added once gin is
      locked.

  Raises:
    ConfigurationError: naming the flag, or the file and line, and what to write instead.
  """
  statements = parse.read(files, flags, search_paths, allowed_imports)
  check.check_macro_names(statements)
  check.check_kinds_kept(statements)
  for module in modules:
    importlib.import_module(module)
  for statement in statements:
    if statement.is_import:
      _import(statement)
  effective = check.effective_bindings(statements)
  check.check_values(effective)
  references.check_parts(effective)
  try:
    for key, statement in effective.items():
      gin.bind_parameter(key, _gin_value(statement.parsed.value))
    gin.finalize()
  except ValueError as error:
    raise ConfigurationError(f'gin refuses the configuration: {error}') from error


@contextlib.contextmanager
def override_gin(files: Sequence[str], flags: Sequence[str]) -> Iterator[None]:
  """Within it, these gin files and flags lie over what `load_gin` has loaded.

  Raises:
    ConfigurationError: as `load_gin` does; what they bind must be there already, or have a default.
  """
  before = copy.copy(gin_config._CONFIG)
  before = {key: copy.copy(bound) for key, bound in before.items()}
  effective = check.effective_bindings(parse.read(files, flags))
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

  For a run mode before it is called; what gin itself constructs (`@X()`) is checked by `load_gin`.
  """
  bound = gin.get_bindings(function, resolve_references=False)
  name = inspect.unwrap(function).__name__
  for parameter in check.required(check.parameters_of(function)):
    if parameter not in bound and parameter not in given:
      raise ConfigurationError(
        f'{name}.{parameter} has no value: add `{name}.{parameter} = ...` to the gin file'
      )


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
