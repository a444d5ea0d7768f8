"""What can be wrong with gin statements, and the one message that says it.

Some of it shows in the statements alone, before jax is imported; the rest against the signatures
of what is registered. Every check raises ConfigurationError and names the flag, or file and line.
"""

from collections.abc import Callable, Iterator, Sequence
import inspect
import types
import typing
from typing import Any

import gin
from gin import config as gin_config

from valkyrie.config.parse import FLAG, Macro, Reference, Statement
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

# Every whole-run gin file defines these, whether or not one of its parts reads them.
RUN_MACROS = frozenset({
  'seed', 'batch_size', 'chunk_size', 'chunks', 'backprop_chunks', 'train_steps', 'log_every',
  'eval_every', 'checkpoint_every', 'learning_rate', 'warmup_steps',
})  # fmt: skip

# (scope, complete selector, parameter), as gin keys them; macros are (name, 'gin.macro', 'value').
_Key = tuple[str, str, str]

_KINDS = {
  bool: 'True or False',
  int: 'an integer',
  float: 'a number',
  str: 'a string',
  list: 'a list',
  dict: 'a dict',
}


# --- What the statements alone can tell.


def leaves(value: Any) -> Iterator[Any]:
  """Every leaf of a gin value."""
  if isinstance(value, dict):
    value = [*value.keys(), *value.values()]
  if isinstance(value, list | tuple):
    for item in value:
      yield from leaves(item)
  else:
    yield value


def _macros_in(value: Any) -> set[str]:
  return {leaf.name for leaf in leaves(value) if isinstance(leaf, Macro)}


def check_macro_names(statements: Sequence[Statement]) -> None:
  """A flag's macro is one of the files', and a file's macro is read by something."""
  bindings = [statement for statement in statements if statement.is_binding]
  used = set().union(*(_macros_in(statement.parsed.value) for statement in bindings))
  defined = {item.name for item in bindings if item.is_macro and not item.is_flag}
  parameters = {item.name: item.parsed.arg_name for item in bindings if not item.is_macro}
  for statement in bindings:
    name = statement.name
    if not statement.is_macro or name in used:
      continue
    if statement.is_flag and name not in defined:
      same = [binding for binding, parameter in parameters.items() if parameter == name]
      hint = f' Did you mean {same[0]}?' if same else did_you_mean(name, used | defined)
      raise ConfigurationError(
        f'{statement.where}: no gin file defines or reads a macro {name!r}.{hint} '
        f'There are: {", ".join(sorted(used | defined))}.'
      )
    if not statement.is_flag and name not in RUN_MACROS:
      raise ConfigurationError(
        f'{statement.where}: nothing reads the macro {name!r}: use it as %{name}, or remove it.'
        + did_you_mean(name, (used | RUN_MACROS) - defined)
      )


def check_kinds_kept(statements: Sequence[Statement]) -> None:
  """A flag's value is of the kind that the file had."""
  earlier: dict[str, Statement] = {}
  for statement in statements:
    if not statement.is_binding:
      continue
    before = earlier.get(statement.name)
    value = statement.parsed.value
    if statement.is_flag and before and not _fits(value, {_kind(before.parsed.value)}):
      raise ConfigurationError(
        f'{statement.where}: {_shown(value)}, but {before.where} has '
        f'{_shown(before.parsed.value)}{_as_integer(value)}'
      )
    if _kind(value):
      earlier[statement.name] = statement


def _kind(value: Any) -> type | None:
  """One of _KINDS, or None where only construction tells (a reference, a macro, None)."""
  kind = list if isinstance(value, tuple) else type(value)
  return kind if kind in _KINDS else None


def _fits(value: Any, kinds: set[type | None]) -> bool:
  kind = _kind(value)
  return kind is None or None in kinds or kind in kinds or (kind is int and float in kinds)


def _shown(value: Any) -> str:
  kind = _kind(value)
  return f'{_KINDS[kind]} ({value!r})' if kind else repr(value)


def _as_integer(value: Any) -> str:
  whole = isinstance(value, float) and value.is_integer()
  return f': write {int(value)}' if whole else ''


# --- What the registered signatures tell.


def _configurable(selector: str, where: str) -> gin_config.Configurable:
  """What gin has registered under `selector`, which may leave out leading modules."""
  registry = gin_config._REGISTRY  # gin has no public way to list what is registered
  matches = registry.matching_selectors(selector)
  if not matches:
    known = {registry.minimal_selector(complete) for complete, _ in registry.items()}
    raise ConfigurationError(
      f'{where}: nothing configurable is called {selector!r}.{did_you_mean(selector, known)}'
    )
  if len(matches) > 1:
    raise ConfigurationError(
      f'{where}: {selector!r} is ambiguous: write one of {", ".join(sorted(matches))}'
    )
  return registry[matches[0]]


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
  """The parameters that gin may bind, of a function or of what constructs a class."""
  if not inspect.isclass(function):
    return _signature(function)
  # Not the class's own signature: a metaclass, as Haiku's, may hide it.
  base = next(
    base for base in inspect.getmro(function) if {'__init__', '__new__'} & vars(base).keys()
  )
  parameters = _signature(base.__init__ if '__init__' in vars(base) else base.__new__)
  del parameters[next(iter(parameters))]  # self, or __new__'s class
  return parameters


def _signature(function: Callable) -> dict[str, inspect.Parameter]:
  function = inspect.unwrap(function)
  try:
    return dict(inspect.signature(function, eval_str=True).parameters)
  except (NameError, TypeError, AttributeError):  # an annotation meant for the type checker only
    return dict(inspect.signature(function).parameters)


def required(parameters: dict[str, inspect.Parameter]) -> list[str]:
  """The parameters that somebody must supply."""
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return [
    name
    for name, parameter in parameters.items()
    if (parameter.default is inspect.Parameter.empty or parameter.default is gin.REQUIRED)
    and parameter.kind not in variadic
  ]


def effective_bindings(statements: Sequence[Statement]) -> dict[_Key, Statement]:
  """The last statement for each binding; every name and parameter is known."""
  effective = {}
  for statement in statements:
    if statement.is_import:
      continue
    parsed = statement.parsed
    if statement.is_macro:
      effective[(statement.name, 'gin.macro', 'value')] = statement
      continue
    configurable = _configurable(parsed.selector, statement.where)
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
        f'{did_you_mean(parsed.arg_name, known)} It has: {", ".join(known)}.'
      )
    effective[(parsed.scope, configurable.selector, parsed.arg_name)] = statement
  return effective


def check_values(effective: dict[_Key, Statement]) -> None:
  """References and macros lead somewhere, and literals are what the parameter's annotation says."""
  macros = {key[0]: statement for key, statement in effective.items() if statement.is_macro}
  read = set()
  for (name, selector, parameter), statement in effective.items():
    for leaf in leaves(statement.parsed.value):
      if isinstance(leaf, Reference):
        _check_reference(leaf, statement.where, effective)
      elif isinstance(leaf, Macro):
        _check_macro(leaf.name, statement, macros)
    reached = _reached(statement.parsed.value, macros)
    if not statement.is_macro:
      read |= reached
      _check_annotation(statement, gin_config._REGISTRY[selector].wrapped, parameter, macros)
    elif name in reached:
      raise ConfigurationError(f'{statement.where}: %{name} is defined by itself: give it a value')
  for name, statement in macros.items():
    if statement.is_flag and name not in read:
      raise ConfigurationError(
        f'{statement.where}: this would change nothing: no binding that is in force reads %{name}'
      )


def _check_reference(leaf: Reference, where: str, effective: dict[_Key, Statement]) -> None:
  name = leaf.name.rsplit('/', 1)[-1]
  configurable = _configurable(name, where)
  if not leaf.evaluated:
    return
  # A surrounding scope may supply the value too, so a binding in any scope is enough.
  bound = {parameter for _, selector, parameter in effective if selector == configurable.selector}
  for parameter in required(parameters_of(configurable.wrapped)):
    if parameter not in bound:
      raise ConfigurationError(
        f'{where}: {leaf} cannot be built, since {name}.{parameter} has no value: add '
        f'`{name}.{parameter} = ...` to the gin file'
      )


def _check_macro(name: str, statement: Statement, macros: dict[str, Statement]) -> None:
  constant = _constant(name)
  if constant == 'gin.REQUIRED':
    raise ConfigurationError(
      f'{statement.where}: {statement.name} is required and has no value: pass '
      f'{FLAG}{statement.name}=VALUE'
    )
  if constant is None and name not in macros:
    raise ConfigurationError(
      f'{statement.where}: %{name} is read and defined nowhere: add `{name} = ...` to the gin '
      f'file, or pass {FLAG}{name}=VALUE.{did_you_mean(name, macros)}'
    )


def _constant(name: str) -> str | None:
  """The complete name of the gin constant that `%name` means, or None where it is a macro."""
  matches = gin_config._CONSTANTS.matching_selectors(name)
  return matches[0] if matches else None


def _reached(value: Any, macros: dict[str, Statement]) -> set[str]:
  """The macros that `value` reads, and those that they read."""
  reached, waiting = set(), _macros_in(value)
  while waiting:
    name = waiting.pop()
    reached.add(name)
    if name in macros:
      waiting |= _macros_in(macros[name].parsed.value) - reached
  return reached


def _check_annotation(
  statement: Statement, function: Callable, name: str, macros: dict[str, Statement]
) -> None:
  parameter = parameters_of(function).get(name)
  if parameter is None:  # one of **kwargs
    return
  annotation = parameter.annotation
  is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
  kinds = set(typing.get_args(annotation)) if is_union else {annotation}
  if not kinds <= {bool, int, float, str, types.NoneType}:
    return
  value, where = statement.parsed.value, statement.where
  value, source = resolve(value, macros)
  where += f' (from {source.where})' if source else ''
  refused = value is None and types.NoneType not in kinds and parameter.default is not None
  if refused or not _fits(value, kinds - {types.NoneType}):
    expected = ' or '.join(_KINDS.get(kind, 'None') for kind in sorted(kinds, key=str))
    raise ConfigurationError(
      f'{where}: {statement.name} takes {expected}, not {_shown(value)}{_as_integer(value)}'
    )


def resolve(value: Any, macros: dict[str, Statement]) -> tuple[Any, Statement | None]:
  """What `%a` stands for in the end, and the statement that says so."""
  source, seen = None, set()
  while isinstance(value, Macro) and value.name in macros and value.name not in seen:
    seen.add(value.name)
    source = macros[value.name]
    value = source.parsed.value
  return value, source
