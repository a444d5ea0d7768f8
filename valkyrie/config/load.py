"""Strict loading of gin files and `--gin.NAME=VALUE` flags.

gin accepts misspelled and unused macros, and reports a missing value only at construction, possibly
after minutes of data processing and compilation. `load_gin` first checks all statements against the
registered signatures.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
import importlib
import inspect
import os
import threading
from typing import Any

import gin
from gin import config as gin_config

from valkyrie.config import check, current_folder, parse, record, redact, scopes, value_types
from valkyrie.errors import ConfigurationError

_ONE_AT_A_TIME = threading.RLock()  # gin has one configuration for all threads
# The attributes of gin that are its configuration.
_EMPTY: dict[str, Any] = {
  '_CONFIG': {},
  '_OPERATIVE_CONFIG': {},
  '_IMPORTS': set(),
  '_CONFIG_IS_LOCKED': False,
}


def load_gin(
  files: Sequence[str],
  flags: Sequence[str] = (),
  *,
  run: str | os.PathLike | None = None,
  search_paths: Sequence[str] = (),
  allowed_imports: Sequence[str] = (),
  modules: Sequence[str] = (),
) -> list[parse.Statement]:
  """Parses the configuration of a run, if one is named, `files`, then `flags`, and locks gin.

  Returns all statements in order; the last one of a name is in force.

  A ConfigurationError names the flag, or the file and line, and a correction.

  Args:
    files: gin files; later ones override earlier ones. `gin/x.gin` is found from any folder.
    flags: '--gin.NAME=VALUE' arguments; the last one of a name wins.
    run: the directory of a run, whose recorded configuration comes first.
    search_paths: folders to search for files and includes, after the current folder.
    allowed_imports: packages that gin files may import besides valkyrie; the current folder is
      searched for them, too.
    modules: the modules that define configurables, imported before gin is locked.
  """
  statements = parse.read_statements(files, flags, search_paths, allowed_imports)
  for package in allowed_imports:
    current_folder.search(package)
  if run is not None:
    overridden = {statement.name for statement in statements if statement.is_binding}
    statements = record.read_configuration(run, allowed_imports, overridden) + statements
  bindings = [statement for statement in statements if statement.is_binding]
  value_types.check_flag_types(bindings)
  for module in modules:
    importlib.import_module(module)
  for statement in statements:
    if statement.is_import:
      _import(statement)
  effective = check.effective_bindings(statements)
  check.check_macros(bindings, effective)
  check.check_references(effective)
  scopes.check_scopes(bindings, effective)
  check.check_tasks(effective, parse.importable(allowed_imports))
  value_types.check_parameter_types(effective)
  check.check_calls(effective)
  try:
    _bind(effective)
    gin.finalize()
  except (SyntaxError, ValueError) as error:
    raise ConfigurationError(
      f'gin does not accept the configuration. Correct the binding that it names: {error}'
    ) from error
  return statements


class Configuration:
  """A configuration beside the one of the process, in force only inside `installed`."""

  def __init__(self, load: Callable[[], object]):
    """Keeps what `load`, such as a call of `load_gin`, binds in an empty configuration."""
    with _in_force(_EMPTY):
      load()
      self._state = _state()

  @contextlib.contextmanager
  def installed(self) -> Iterator[None]:
    """A context with this configuration, which may be nested; it restores the previous one."""
    with _in_force(self._state):
      yield


@contextlib.contextmanager
def override_gin(files: Sequence[str], flags: Sequence[str]) -> Iterator[None]:
  """A context in which files and flags override the configuration; raises as `load_gin` does."""
  effective = check.effective_bindings(parse.read_statements(files, flags))
  for name, statement in parse.macros_of(effective.values()).items():
    if (name, 'gin.macro') not in gin_config._CONFIG:
      macros = []
      for scope, selector in gin_config._CONFIG:
        if selector == 'gin.macro':
          macros.append(scope)
      macros.sort()
      raise ConfigurationError(
        f'{statement.where}: no gin file of this run defines %{name}.'
        f'{check.did_you_mean(name, macros)} It defines {", ".join(macros) or "none"}.'
      )
  with _ONE_AT_A_TIME, _in_force(_state()):
    with gin.unlock_config():
      _bind(effective)
    yield


def check_call(function: Callable, *given: str) -> None:
  """Raises ConfigurationError if a parameter is not bound, not `given`, and has no default."""
  bound = gin.get_bindings(function, resolve_references=False)
  for parameter in check.missing(function, {*bound, *given}):
    name = f'{inspect.unwrap(function).__name__}.{parameter}'
    raise ConfigurationError(f'{name} has no value. Add `{name} = ...` to the gin file.')


def _import(statement: parse.Statement) -> None:
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
  gin.parse_config(statement.parsed.format())  # adds the line to config.gin


def _bind(effective: check.Effective) -> None:
  for key, statement in effective.items():
    # gin's own parser replaces our macros and references by gin's.
    value = gin_config.parse_value(repr(statement.parsed.value))
    gin.bind_parameter(key, _with_secrets(value))


class _Secret(str):
  """The text 'env:NAME'; a configurable gets the value of the variable, since gin copies for it."""

  def __deepcopy__(self, memo: dict) -> str:
    _, _, variable = self.partition(':')
    secret = os.environ.get(variable)
    if secret is None:
      raise ConfigurationError(
        f'{self} is bound, but the environment has no variable {variable}. Set it before the '
        f'command: export {variable}=VALUE'
      )
    return secret


def _with_secrets(value: Any) -> Any:
  if isinstance(value, str) and redact.NAMED.fullmatch(value):
    return _Secret(value)
  if isinstance(value, dict):
    return {key: _with_secrets(inner) for key, inner in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(map(_with_secrets, value))
  return value


def _state() -> dict[str, Any]:
  return {name: getattr(gin_config, name) for name in _EMPTY}


@contextlib.contextmanager
def _in_force(state: Mapping[str, Any]) -> Iterator[None]:
  """A context in which gin works on a copy of a state."""
  bound = {key: dict(values) for key, values in state['_CONFIG'].items()}
  with _ONE_AT_A_TIME:
    previous = _state()
    parts = {name: copy.copy(part) for name, part in state.items()}
    gin_config.__dict__.update({**parts, '_CONFIG': bound})
    try:
      yield
    finally:
      gin_config.__dict__.update(previous)
