"""Checks of gin values: of flags against files, of bindings against annotations and `ranges`.

They know literal types, classes, protocols, and callables that return one of these; mismatches of
other annotations raise an error at construction. Every check raises ConfigurationError.
"""

import collections.abc
from collections.abc import Sequence
import inspect
import types
import typing
from typing import Any

from gin import config as gin_config
import haiku as hk

from valkyrie.config import ranges
from valkyrie.config.check import Effective, check_buildable, find, parameters_of
from valkyrie.config.parse import Macro, Reference, Statement, leaves, macros_of, resolve
from valkyrie.errors import ConfigurationError

_LITERALS = {bool: 'True or False', int: 'an integer', float: 'a number', str: 'a string'}


def check_flag_types(bindings: Sequence[Statement]) -> None:
  """Checks that the value of a flag has the type of the file's value."""
  earlier: dict[str, Statement] = {}
  for statement in bindings:
    before, value = earlier.get(statement.name), statement.parsed.value
    if value is None or isinstance(value, Macro | Reference):
      continue
    if statement.is_flag and before and not _is_a(value, type(before.parsed.value)):
      raise ConfigurationError(
        f'{statement.where} is {_shown(value)}, but {before.where} has '
        f'{_shown(before.parsed.value)}.{_as_integer(value)}'
      )
    earlier[statement.name] = statement


def check_parameter_types(effective: Effective) -> None:
  """Checks that each value fits the annotation of its parameter, and each number its range."""
  macros = macros_of(effective.values())
  for (scope, selector, name), statement in effective.items():
    wrapped = gin_config._REGISTRY[selector].wrapped
    parameter = parameters_of(wrapped).get(name)
    if parameter is None:  # one of **kwargs
      continue
    value, source = resolve(statement.parsed.value, macros)
    is_default = value is None and parameter.default is None
    expected = None if is_default else _expected(value, parameter.annotation)
    parts = value if isinstance(value, list | tuple) else [value]
    unscoped = [p.name for p in parts if isinstance(p, Reference) and '/' not in p.name]
    if expected is None and not scope and selector in [find(name).selector for name in unscoped]:
      expected = 'another part than itself'
    where = statement.where + (f' (from {source.where})' if source else '')
    if expected is not None:
      raise ConfigurationError(
        f'{where}: {statement.name} takes {expected}, not {_shown(value)}.{_as_integer(value)}'
      )
    package = wrapped.__module__.partition('.')[0]
    owner = wrapped.__name__ if package == 'valkyrie' else package
    for leaf in leaves(value) if package in ('valkyrie', 'optax') else ():
      if isinstance(leaf, int | float) and not isinstance(leaf, bool):
        ranges.check(owner, f'{where}: ', **{name: leaf})
    if _makes_parts(parameter.annotation):
      for part in parts:
        if isinstance(part, Reference):
          check_buildable(part, statement.where, effective)


def _makes_parts(annotation: Any) -> bool:
  """Whether the parameter is a callable without arguments, or contains some."""
  arguments = typing.get_args(annotation)
  if typing.get_origin(annotation) is collections.abc.Callable:
    return arguments[0] == []
  return any(map(_makes_parts, arguments))


def _is_a(value: Any, kind: type) -> bool:
  """Whether a literal has a type; integers are numbers, and tuples are lists."""
  pairs = {(int, float), (list, tuple), (tuple, list)}
  return type(value) is kind or (type(value), kind) in pairs


def _shown(value: Any) -> str:
  """A value as gin writes it; a literal with its type."""
  return f'{_LITERALS[type(value)]} ({value!r})' if type(value) in _LITERALS else repr(value)


def _as_integer(value: Any) -> str:
  return f' Write {int(value)}.' if isinstance(value, float) and value.is_integer() else ''


def _expected(value: Any, annotation: Any) -> str | None:
  """What an annotation expects in place of a value; None if the value may fit."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (types.UnionType, typing.Union):
    found = [_expected(value, option) for option in arguments]
    return None if None in found else ' or '.join(filter(None, found))
  if annotation in {*_LITERALS, types.NoneType}:
    # The result of a function is of an unknown type.
    of_call = isinstance(value, Reference) and value.evaluated
    is_result = of_call and not inspect.isclass(_target(value))
    fits = _is_a(value, annotation) or isinstance(value, Macro) or is_result
    return None if fits else _LITERALS.get(annotation, 'None')
  if isinstance(value, Macro):
    return None
  if origin in (collections.abc.Sequence, list):
    if not isinstance(value, list | tuple):
      return f'several in brackets, such as ({value!r},)'
    return next(filter(None, (_expected(item, arguments[0]) for item in value)), None)
  is_callable = origin is collections.abc.Callable
  part = arguments[-1] if is_callable else annotation
  is_class = origin is None and inspect.isclass(part) and part is not inspect.Parameter.empty
  return _expected_part(value, part, is_callable) if is_callable or is_class else None


def _expected_part(value: Any, part: Any, is_callable: bool) -> str | None:
  """As `_expected`, for an instance of `part`, or a callable that returns one."""
  name = getattr(part, '__name__', 'function')
  if not isinstance(value, Reference):
    is_ours = is_callable or part.__module__.startswith('valkyrie.')
    form = f'a reference to {name}' if is_callable else f'{name}, such as @NAME()'
    no_part = type(value) in _LITERALS or (is_callable and isinstance(value, list | tuple | None))
    return form if is_ours and no_part else None
  if value.evaluated != is_callable:
    return _expected_class(value, part)
  if not is_callable and inspect.isclass(_target(value)):
    return f'an instance of {name} (write {value}())'
  return None


def _expected_class(reference: Reference, expected: Any) -> str | None:
  """The expected type of a class or its instance; a protocol needs methods with its arguments."""
  target = _target(reference)
  if reference.evaluated and inspect.isclass(target) and issubclass(target, hk.Module):
    return f'no instance of a Haiku module (write {str(reference).removesuffix("()")})'
  if expected is Any or not (inspect.isclass(expected) and inspect.isclass(target)):
    return None
  if getattr(expected, '_is_protocol', False):
    unfit = [
      name
      for name, member in vars(expected).items()
      if inspect.isfunction(member)
      and (not name.startswith('_') or name == '__call__')
      and not _accepts_arguments(getattr(target, name, None), member)
    ]
    lack = f' ({target.__name__} has no {", ".join(unfit)} with its arguments)'
    return f'{expected.__name__}{lack}' if unfit else None
  return None if issubclass(target, expected) else expected.__name__


def _target(reference: Reference) -> Any:
  return find(reference.name).wrapped


def _accepts_arguments(method: Any, other: types.FunctionType) -> bool:
  """Whether a method can be called with all arguments of another one, `self` included."""
  parameters = inspect.signature(other).parameters.values()
  keywords = [item.name for item in parameters if item.kind is inspect.Parameter.KEYWORD_ONLY]
  try:
    arguments = [None] * (len(parameters) - len(keywords))
    inspect.signature(method).bind(*arguments, **dict.fromkeys(keywords))
  except TypeError:  # no method, or one with other parameters
    return False
  return True
