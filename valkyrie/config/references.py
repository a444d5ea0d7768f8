"""Whether a reference in a gin file is of the kind of part that its parameter asks for."""

import collections.abc
from collections.abc import Callable, Sequence
import inspect
import types
import typing
from typing import Any

from gin import config as gin_config
import haiku as hk

from valkyrie.config.check import parameters_of, resolve
from valkyrie.config.parse import Macro, Reference, Statement
from valkyrie.errors import ConfigurationError

_PLAIN = (bool, int, float, str)


def check_parts(effective: dict[tuple[str, str, str], Statement]) -> None:
  """Refuses a part where another kind of it is needed, by the annotations of what gin registered.

  What an annotation does not tell, construction will: only what must fail is refused.

  Raises:
    ConfigurationError: naming the file and line, and what is expected there.
  """
  macros = {key[0]: statement for key, statement in effective.items() if statement.is_macro}
  for (scope, selector, name), statement in effective.items():
    if statement.is_macro:
      continue
    parameter = parameters_of(gin_config._REGISTRY[selector].wrapped).get(name)
    value, _ = resolve(statement.parsed.value, macros)
    if parameter is None or value is None or isinstance(value, Macro):
      continue
    expected = _mismatch(value, parameter.annotation)
    if expected is None and not scope and _names_itself(value, selector):
      expected = 'something else than itself'
    if expected is not None:
      raise ConfigurationError(
        f'{statement.where}: {statement.name} takes {expected}, not {_text(value)}'
      )


def _mismatch(value: Any, annotation: Any) -> str | None:
  """What is expected in the place of `value`; None where it may be right."""
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (types.UnionType, typing.Union):
    found = [_mismatch(value, one) for one in arguments if one is not types.NoneType]
    return None if None in found else ' or '.join(filter(None, found))
  if origin in (collections.abc.Sequence, list):
    if not isinstance(value, list | tuple):
      return f'several in brackets, such as ({_text(value)},)'
    return next(filter(None, (_mismatch(item, arguments[0]) for item in value)), None)
  if origin is collections.abc.Callable:
    return _no_maker(value, arguments[-1])
  plain = (*_PLAIN, inspect.Parameter.empty)
  is_kind = inspect.isclass(annotation) and annotation not in plain and origin is None
  return _no_instance(value, annotation) if is_kind else None


def _no_maker(value: Any, kind: Any) -> str | None:
  if isinstance(value, Reference):
    return None if value.evaluated else _not_made_by(value, kind)
  named = getattr(kind, '__name__', 'function')
  return f'a reference to a {named}' if isinstance(value, _PLAIN) else None


def _no_instance(value: Any, kind: type) -> str | None:
  if isinstance(value, Reference):
    if value.evaluated:
      return _not_made_by(value, kind)
    if inspect.isclass(_target(value)):
      return f'a {kind.__name__} that is built: {value}()'
    return None
  own = kind.__module__.startswith('valkyrie.')
  return f'a {kind.__name__}, such as @NAME()' if own and isinstance(value, _PLAIN) else None


def _not_made_by(value: Reference, kind: Any) -> str | None:
  target = _target(value)
  if value.evaluated and inspect.isclass(target) and issubclass(target, hk.Module):
    return f'no part of a model that is built: {str(value).removesuffix("()")}'
  if not inspect.isclass(kind) or not inspect.isclass(target):
    return None
  if getattr(kind, '_is_protocol', False):
    named = [name for name, member in vars(kind).items() if inspect.isfunction(member)]
    asked = [name for name in named if not name.startswith('_') or name == '__call__']
    fits = all(hasattr(target, name) for name in asked)
  else:
    fits = issubclass(target, kind)
  return None if fits else f'a {kind.__name__}'


def _text(value: Any) -> str:
  """As gin writes it."""
  if isinstance(value, list | tuple):
    items = ', '.join(map(_text, value))
    return f'({items},)' if len(value) == 1 else f'({items})'
  return str(value) if isinstance(value, Reference) else repr(value)


def _target(value: Reference) -> Callable:
  registry = gin_config._REGISTRY
  return registry[registry.matching_selectors(value.name.rsplit('/', 1)[-1])[0]].wrapped


def _names_itself(value: Any, selector: str) -> bool:
  items: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
  registry = gin_config._REGISTRY
  return any(
    isinstance(item, Reference)
    and '/' not in item.name
    and registry.matching_selectors(item.name) == [selector]
    for item in items
  )
