"""Checks of the types of gin values: of flags against files, of bindings against annotations.

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

from valkyrie.config.check import Effective, check_buildable, find, parameters_of
from valkyrie.config.parse import Macro, Reference, Statement, macros_of, resolve
from valkyrie.errors import ConfigurationError

_LITERALS = {bool: 'True or False', int: 'an integer', float: 'a number', str: 'a string'}


def check_flag_types(bindings: Sequence[Statement]) -> None:
  """Checks that the value of a flag has the type of the file's value."""
  earlier: dict[str, Statement] = {}
  for statement in bindings:
    before = earlier.get(statement.name)
    value = statement.parsed.value
    if statement.is_flag and before and not _fits(value, {_type(before.parsed.value)}):
      raise ConfigurationError(
        f'{statement.where} is {_shown(value)}, but {before.where} has '
        f'{_shown(before.parsed.value)}.{_as_integer(value)}'
      )
    if _type(value):
      earlier[statement.name] = statement


def check_parameter_types(effective: Effective) -> None:
  """Checks that each value fits the annotation of its parameter."""
  macros = macros_of(effective.values())
  for (scope, selector, name), statement in effective.items():
    parameter = parameters_of(gin_config._REGISTRY[selector].wrapped).get(name)
    if parameter is None:  # one of **kwargs
      continue
    value, source = resolve(statement.parsed.value, macros)
    expected = _mismatch(value, parameter)
    parts = value if isinstance(value, list | tuple) else [value]
    unscoped = [p.name for p in parts if isinstance(p, Reference) and '/' not in p.name]
    if expected is None and not scope and selector in [find(name).selector for name in unscoped]:
      expected = 'another part than itself'
    if expected is not None:
      where = statement.where + (f' (from {source.where})' if source else '')
      raise ConfigurationError(
        f'{where}: {statement.name} takes {expected}, not {_shown(value)}.{_as_integer(value)}'
      )
    if _makes_parts(parameter.annotation):
      for part in parts:
        if isinstance(part, Reference):
          check_buildable(part, statement.where, effective)


def _makes_parts(annotation: Any) -> bool:
  """Whether the parameter is a callable without arguments, or a sequence of these."""
  for option in _options(annotation):
    origin, arguments = typing.get_origin(option), typing.get_args(option)
    if origin is collections.abc.Callable and arguments[0] == []:
      return True
    if origin in (collections.abc.Sequence, list) and _makes_parts(arguments[0]):
      return True
  return False


def _type(value: Any) -> type | None:
  """The type of a literal, list or dict; None for a reference, a macro or None."""
  found = list if isinstance(value, tuple) else type(value)
  return found if found in {*_LITERALS, list, dict} else None


def _fits(value: Any, expected: set[type | None]) -> bool:
  found = _type(value)
  return found is None or found in expected or (found is int and float in expected)


def _is_part(value: Any) -> bool:
  """Whether a value is a function or an instance of a class, rather than a literal."""
  if not isinstance(value, Reference):
    return False
  return not value.evaluated or inspect.isclass(find(value.name).wrapped)


def _shown(value: Any) -> str:
  """A value as gin writes it; a literal with its type."""
  return f'{_LITERALS[type(value)]} ({value!r})' if type(value) in _LITERALS else repr(value)


def _as_integer(value: Any) -> str:
  return f' Write {int(value)}.' if isinstance(value, float) and value.is_integer() else ''


def _mismatch(value: Any, parameter: inspect.Parameter) -> str | None:
  """The expected type of a parameter's value; None if the value may fit."""
  options = set(_options(parameter.annotation))
  if not options <= {*_LITERALS, types.NoneType}:
    is_known = value is not None and not isinstance(value, Macro)
    return _part_mismatch(value, parameter.annotation) if is_known else None
  optional = types.NoneType in options or parameter.default is None
  fits = _fits(value, options - {types.NoneType}) and not _is_part(value)
  if fits and (value is not None or optional):
    return None
  return ' or '.join(_LITERALS.get(option, 'None') for option in sorted(options, key=str))


def _options(annotation: Any) -> tuple[Any, ...]:
  """The members of a union, or the annotation itself."""
  is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
  return typing.get_args(annotation) if is_union else (annotation,)


def _part_mismatch(value: Any, annotation: Any) -> str | None:
  """The expected part, or parts in brackets; None if the value may fit."""
  options = _options(annotation)
  if len(options) > 1:
    found = [_part_mismatch(value, option) for option in options if option is not types.NoneType]
    return None if None in found else ' or '.join(filter(None, found))
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (collections.abc.Sequence, list):
    if not isinstance(value, list | tuple):
      return f'several in brackets, such as ({value!r},)'
    return next(filter(None, (_part_mismatch(item, arguments[0]) for item in value)), None)
  if origin is collections.abc.Callable:
    return _callable_mismatch(value, arguments[-1])
  is_part = inspect.isclass(annotation) and annotation not in {*_LITERALS, inspect.Parameter.empty}
  return _instance_mismatch(value, annotation) if is_part and origin is None else None


def _callable_mismatch(value: Any, returned: Any) -> str | None:
  """The expected reference, for a parameter that takes a callable of a type."""
  if isinstance(value, Reference):
    return None if value.evaluated else _class_mismatch(value, returned)
  name = getattr(returned, '__name__', 'function')
  return f'a reference to a {name}' if type(value) in _LITERALS else None


def _instance_mismatch(value: Any, expected: type) -> str | None:
  """The expected instance, for a parameter that takes one of a type."""
  if not isinstance(value, Reference):
    is_ours = expected.__module__.startswith('valkyrie.')
    is_literal = type(value) in _LITERALS
    return f'a {expected.__name__}, such as @NAME()' if is_ours and is_literal else None
  if value.evaluated:
    return _class_mismatch(value, expected)
  if inspect.isclass(find(value.name).wrapped):
    return f'an instance of {expected.__name__} (write {value}())'
  return None


def _class_mismatch(value: Reference, expected: Any) -> str | None:
  """The expected type, for a reference to a class; a protocol needs methods with its arguments."""
  target = find(value.name).wrapped
  if value.evaluated and inspect.isclass(target) and issubclass(target, hk.Module):
    return f'no instance of a Haiku module (write {str(value).removesuffix("()")})'
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
    return f'a {expected.__name__}{lack}' if unfit else None
  return None if issubclass(target, expected) else f'a {expected.__name__}'


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
