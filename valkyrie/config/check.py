"""Checks of the names in gin statements: macros, configurables, parameters and references.

Every check raises ConfigurationError, with the flag, or the file and line. The checks of values
are in `value_types`.
"""

from collections.abc import Sequence
import inspect

from gin import config as gin_config

from valkyrie.config.parse import (
  FLAG,
  Macro,
  Reference,
  Statement,
  check_package,
  leaves,
  macros_in,
  macros_of,
  resolve,
)
from valkyrie.config.registry import constructor, find, missing, parameters_of
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

# Every whole-run gin file defines these, even if none of its parts reads them.
RUN_MACROS = frozenset({
  'seed', 'batch_size', 'chunk_size', 'chunks', 'backprop_chunks', 'train_steps', 'log_every',
  'eval_every', 'checkpoint_every', 'learning_rate', 'warmup_steps',
})  # fmt: skip

# {(scope, complete selector, parameter): statement}, with gin's keys; the key of a macro is
# (name, 'gin.macro', 'value').
Effective = dict[tuple[str, str, str], Statement]


def check_macro_names(bindings: Sequence[Statement]) -> None:
  """Checks that files define the macros of flags, and that bindings read the macros of files."""
  macros = macros_of(bindings)
  used = set().union(*(macros_in(item.parsed.value, macros) for item in bindings))
  defined = {item.name for item in bindings if item.is_macro and not item.is_flag}
  for statement in bindings:
    name = statement.name
    if not statement.is_macro or name in used:
      continue
    if statement.is_flag and name not in defined:
      same = [item.name for item in bindings if item.parsed.arg_name == name]
      hint = f' Did you mean {same[0]}?' if same else did_you_mean(name, used | defined)
      raise ConfigurationError(
        f'{statement.where}: no gin file defines or reads a macro {name!r}.{hint} '
        f'The macros are {", ".join(sorted(used | defined))}.'
      )
    if not statement.is_flag and not statement.recorded and name not in RUN_MACROS:
      raise ConfigurationError(
        f'{statement.where}: no binding reads the macro {name!r}. Use it as %{name}, or remove it.'
        + did_you_mean(name, (used | RUN_MACROS) - defined)
      )


def effective_bindings(statements: Sequence[Statement]) -> Effective:
  """The last statement of each binding, after a check of its configurable and parameter."""
  effective: Effective = {}
  for statement in statements:
    if statement.is_import:
      continue
    parsed = statement.parsed
    if statement.is_macro:
      effective[(statement.name, 'gin.macro', 'value')] = statement
      continue
    configurable = find(parsed.selector, statement.where)
    if not statement.is_binding:  # the head of an indented block
      continue
    parameters = parameters_of(configurable.wrapped)
    variadic = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    denied = configurable.denylist or ()
    known = [name for name in configurable.allowlist or parameters if name not in denied]
    if variadic and not configurable.allowlist and parsed.arg_name not in denied:
      known.append(parsed.arg_name)
    if parsed.arg_name not in known:
      raise ConfigurationError(
        f'{statement.where}: {parsed.selector} has no parameter {parsed.arg_name!r} to bind.'
        f'{did_you_mean(parsed.arg_name, known)} Its parameters are {", ".join(known)}.'
      )
    effective[(parsed.scope, configurable.selector, parsed.arg_name)] = statement
  return effective


def check_scopes(bindings: Sequence[Statement]) -> None:
  """Checks that each scope of a binding is one of a reference, also of one that was overridden."""
  known = {
    scope
    for statement in bindings
    for leaf in leaves(statement.parsed.value)
    if isinstance(leaf, Reference)
    for scope in leaf.name.split('/')[:-1]
  }
  for statement in bindings:
    if statement.is_macro or statement.recorded:
      continue
    scopes = (statement.parsed.scope or '').split('/')
    for scope in filter(None, scopes):
      if scope not in known:
        raise ConfigurationError(
          f'{statement.where}: {statement.name} has no effect, since no binding refers to a '
          f'@{scope}/{statement.parsed.selector}.{did_you_mean(scope, known)} The scopes are '
          f'{", ".join(sorted(known)) or "none"}.'
        )


def check_references(effective: Effective) -> None:
  """Checks that all references and macros are defined, and that all macros of flags are read."""
  macros = macros_of(effective.values())
  read = set()
  for statement in effective.values():
    for leaf in leaves(statement.parsed.value):
      if isinstance(leaf, Reference):
        _check_reference(leaf, statement.where, effective)
      elif isinstance(leaf, Macro):
        _check_macro(leaf.name, statement, macros)
    its_macros = macros_in(statement.parsed.value, macros)
    if not statement.is_macro:
      read |= its_macros
    elif statement.name in its_macros:
      raise ConfigurationError(
        f'{statement.where}: the macro %{statement.name} is defined by itself. Give it a value.'
      )
  for name, statement in macros.items():
    if statement.is_flag and name not in read:
      raise ConfigurationError(
        f'{statement.where} has no effect: no binding in force reads %{name}. Leave it out.'
      )


def check_tasks(effective: Effective, allowed: Sequence[str]) -> None:
  """Checks that a task of a file, whose module a run imports, lies in a package that is allowed."""
  macros = macros_of(effective.values())
  for (_, _, parameter), statement in effective.items():
    if parameter not in ('task', 'sources'):
      continue
    value, source = resolve(statement.parsed.value, macros)
    of_sources = list(value.values()) if isinstance(value, dict) else [{'task': value}]
    named = [found['task'] for found in of_sources if isinstance(found, dict) and 'task' in found]
    for task, inner in (resolve(found, macros) for found in named):
      from_statement = inner or source or statement
      if isinstance(task, str) and ':' in task and not from_statement.is_flag:
        check_package(task.partition(':')[0], from_statement.where, allowed)


def _check_reference(leaf: Reference, where: str, effective: Effective) -> None:
  find(leaf.name, where)
  if leaf.evaluated:
    check_buildable(leaf, where, effective)


def check_buildable(leaf: Reference, where: str, effective: Effective) -> None:
  """Checks that all that a part needs is bound, for one that is made without further arguments."""
  part = find(leaf.name, where).wrapped
  # The bindings of a base class count for subclasses that inherit its constructor. A surrounding
  # scope may supply the value too, so a binding in any scope is enough.
  classes = inspect.getmro(part) if inspect.isclass(part) else (part,)
  made = constructor(part)
  selectors = {
    name
    for name, known in gin_config._REGISTRY.items()
    if known.wrapped in classes and constructor(known.wrapped) is made
  }
  bound = {parameter for _, selector, parameter in effective if selector in selectors}
  for parameter in missing(part, bound):
    binding = f'{leaf.name.rsplit("/", 1)[-1]}.{parameter}'
    raise ConfigurationError(
      f'{where}: {leaf} cannot be built, since {binding} has no value. Add `{binding} = ...` to '
      'the gin file.'
    )


def _check_macro(name: str, statement: Statement, macros: dict[str, Statement]) -> None:
  constants = gin_config._CONSTANTS.matching_selectors(name)
  if constants == ['gin.REQUIRED']:
    raise ConfigurationError(
      f'{statement.where}: {statement.name} is required and has no value. Pass '
      f'{FLAG}{statement.name}=VALUE.'
    )
  if not constants and name not in macros:
    raise ConfigurationError(
      f'{statement.where}: no statement defines %{name}. Add `{name} = ...` to the gin file, or '
      f'pass {FLAG}{name}=VALUE.{did_you_mean(name, macros)}'
    )
