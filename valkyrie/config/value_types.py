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
      advice = _as_integer(value) or ' Pass a value of the same type.'
      raise ConfigurationError(
        f'{statement.where} is {_shown(value)}, but {before.where} has '
        f'{_shown(before.parsed.value)}.{advice}'
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
    is_result = of_call and not inspect.isclass(_target(value)) and annotation in _LITERALS
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
  options = _options(part)
  name = ' or '.join(getattr(one, '__name__', 'function') for one in options if one is not Any)
  name = name or 'a part'
  if not isinstance(value, Reference):
    is_ours = is_callable or part.__module__.startswith('valkyrie.')
    form = f'a reference to {name}' if is_callable else f'{name}, such as @NAME()'
    no_part = type(value) in _LITERALS or (is_callable and isinstance(value, list | tuple | None))
    return form if is_ours and no_part else None
  if value.evaluated != is_callable:
    if value.evaluated or inspect.isclass(_target(value)):
      return _expected_class(value, part)
    return None
  if is_callable:
    plain = str(value).removesuffix('()')
    return f'a reference to {name} (write {plain})' if _is_result(value, part) else None
  if inspect.isclass(_target(value)) or not _accepts_functions(part):
    return f'an instance of {name} (write {value}())'
  return None


def _is_result(reference: Reference, part: Any) -> bool:
  """Whether the result of a call is known to be an instance of `part`, not what makes one."""
  target = _target(reference)
  if inspect.isclass(target):
    if not any('__call__' in vars(one) for one in inspect.getmro(target)):
      return True
  else:
    target = inspect.signature(target).return_annotation
  classes = [option for option in _options(part) if inspect.isclass(option)]
  return inspect.isclass(target) and any(_lacks(target, option) is None for option in classes)


def _options(part: Any) -> tuple[Any, ...]:
  """The types of a union, or the one type."""
  is_union = typing.get_origin(part) in (types.UnionType, typing.Union)
  return typing.get_args(part) if is_union else (part,)


def _accepts_functions(part: Any) -> bool:
  """Whether a function may be an instance: of a protocol that only asks for a call."""
  methods = [name for name, member in vars(part).items() if inspect.isfunction(member)]
  known = {'__call__', '__init__', '__subclasshook__'}
  return part is object or (getattr(part, '_is_protocol', False) and {*methods} <= known)


def _expected_class(reference: Reference, expected: Any) -> str | None:
  """The expected type of a class or its instance; a protocol needs methods with its arguments."""
  target = _target(reference)
  if reference.evaluated and inspect.isclass(target) and issubclass(target, hk.Module):
    return f'no instance of a Haiku module (write {str(reference).removesuffix("()")})'
  if expected is Any or not (inspect.isclass(expected) and inspect.isclass(target)):
    return None
  return _lacks(target, expected)


def _lacks(target: type, expected: type) -> str | None:
  """The expected type, if a class is another one, with the methods that it lacks; else None."""
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
