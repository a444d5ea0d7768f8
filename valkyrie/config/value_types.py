"""Checks of gin values: of flags against files, of bindings against annotations, with their ranges.

They know literal types, classes, protocols, and callables that return one of these; mismatches of
other annotations raise an error at construction. Every check raises ConfigurationError.
"""

import collections.abc
from collections.abc import Iterable, Sequence
import inspect
import types
import typing
from typing import Annotated, Any

from gin import config as gin_config
import haiku as hk

from valkyrie.config import ranges
from valkyrie.config.check import OPTAX_NUMBERS, Effective, check_buildable, find, parameters_of
from valkyrie.config.parse import Macro, Reference, Statement, leaves, macros_of, resolve
from valkyrie.errors import ConfigurationError

_LITERALS = {bool: 'True or False', int: 'an integer', float: 'a number', str: 'a string'}


def check_flag_types(bindings: Sequence[Statement]) -> None:
  """Checks that the value of a flag has the type of the file's value."""
  earlier: dict[str, Statement] = {}
  for statement in bindings:
    value = statement.parsed.value
    is_literal = not isinstance(value, Macro | Reference)
    if value is None or not is_literal:
      continue
    file = earlier.get(statement.name)
    if statement.is_flag and file and not _may_replace(value, file.parsed.value):
      advice = _as_integer(value) or ' Pass a value of the same type.'
      raise ConfigurationError(
        f'{statement.where} is {_shown(value)}, but {file.where} has '
        f'{_shown(file.parsed.value)}.{advice}'
      )
    earlier[statement.name] = statement


def check_parameter_types(effective: Effective) -> None:
  """Checks that each value fits the annotation of its parameter, and each number its range."""
  macros = macros_of(effective.values())
  for (_, selector, name), statement in effective.items():
    wrapped = gin_config._REGISTRY[selector].wrapped
    parameter = parameters_of(wrapped).get(name)
    if parameter is None:  # one of **kwargs
      continue
    value, source = resolve(statement.parsed.value, macros)
    parts = [value]
    if isinstance(value, list | tuple):
      parts = value
    references = [part for part in parts if isinstance(part, Reference)]
    expected = None
    if value is not None or parameter.default is not None:
      expected = _expected(value, parameter.annotation)
    if expected is None and _names(references, selector):
      expected = 'another part than itself'
    where = statement.where
    if source:
      where += f' (from {source.where})'
    if expected is not None:
      raise ConfigurationError(
        f'{where}: {statement.name} takes {expected}, not {_shown(value)}.{_as_integer(value)}'
      )
    _check_range(wrapped, parameter, value, where)
    if _makes_parts(parameter.annotation):
      for reference in references:
        check_buildable(reference, statement.where, effective)


def _names(references: Sequence[Reference], selector: str) -> bool:
  """Whether a reference names the configurable with this selector, in the scope of its binding."""
  unscoped = [reference.name for reference in references if '/' not in reference.name]
  selectors = [find(name).selector for name in unscoped]
  return selector in selectors


def _check_range(wrapped: Any, parameter: inspect.Parameter, value: Any, where: str) -> None:
  """Checks the numbers in a value, if the parameter of a configurable has a range."""
  annotation = parameter.annotation
  package, _, _ = wrapped.__module__.partition('.')
  if package == 'optax':
    annotation = OPTAX_NUMBERS.get(parameter.name)
  name = f'{wrapped.__name__}.{parameter.name}'
  for leaf in leaves(value):
    is_number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
    if is_number:
      ranges.check(name, leaf, annotation, f'{where}: ')


def _makes_parts(annotation: Any) -> bool:
  """Whether the parameter is a callable without arguments, or contains some."""
  arguments = typing.get_args(annotation)
  if typing.get_origin(annotation) is collections.abc.Callable:
    return arguments[0] == []
  return any(map(_makes_parts, arguments))


def _may_replace(value: Any, other: Any) -> bool:
  """Whether a literal has the type of another one, or is several in place of one number.

  A parameter that takes both, such as a schedule, says so in its annotation, which is checked next.
  """
  kinds = {type(value), type(other)}
  has_several = bool(kinds & {list, tuple})
  has_number = bool(kinds & {int, float})
  return (has_several and has_number) or _is_a(value, type(other))


def _is_a(value: Any, kind: type) -> bool:
  """Whether a literal has a type; integers are numbers, and tuples are lists."""
  pairs = {(int, float), (list, tuple), (tuple, list)}
  kind_of_value = type(value)
  return kind_of_value is kind or (kind_of_value, kind) in pairs


def _shown(value: Any) -> str:
  """A value as gin writes it; a literal with its type."""
  kind = type(value)
  if kind not in _LITERALS:
    return repr(value)
  return f'{_LITERALS[kind]} ({value!r})'


def _as_integer(value: Any) -> str:
  """The advice to write an integer without a point; '' for other values."""
  if not isinstance(value, float) or not value.is_integer():
    return ''
  return f' Write {int(value)}.'


def _expected(value: Any, annotation: Any) -> str | None:
  """The kind of value that an annotation expects in place of a value; None if it may fit."""
  if typing.get_origin(annotation) is Annotated:
    annotation, *_ = typing.get_args(annotation)
  if _is_union(annotation):
    return _expected_of_union(value, typing.get_args(annotation))
  if annotation in _LITERALS or annotation is types.NoneType:
    return _expected_literal(value, annotation)
  if isinstance(value, Macro):
    return None
  return _expected_part(value, annotation)


def _expected_part(value: Any, annotation: Any) -> str | None:
  """As `_expected`, for several values, a part, or a callable that makes a part."""
  origin = typing.get_origin(annotation)
  arguments = typing.get_args(annotation)
  if origin in (collections.abc.Sequence, list):
    return _expected_items(value, arguments[0])
  if origin is tuple:
    return _expected_tuple(value, arguments)
  if origin is collections.abc.Mapping:
    return _expected_mapping(value, *arguments)
  if origin is collections.abc.Callable:
    return _expected_maker(value, arguments[-1])
  is_annotated = annotation is not inspect.Parameter.empty
  if origin is None and is_annotated and inspect.isclass(annotation):
    return _expected_instance(value, annotation)
  return None


def _expected_of_union(value: Any, options: Sequence[Any]) -> str | None:
  """As `_expected`, for a value that may fit any of several annotations."""
  kinds = []
  for option in options:
    kind = _expected(value, option)
    if kind is None:
      return None
    kinds.append(kind)
  return ' or '.join(filter(None, kinds))


def _expected_literal(value: Any, kind: type) -> str | None:
  """As `_expected`, for a literal or None."""
  if _is_a(value, kind) or isinstance(value, Macro):
    return None
  is_call = isinstance(value, Reference) and value.evaluated
  is_literal = kind in _LITERALS
  if is_call and is_literal and not inspect.isclass(_target(value)):
    return None  # the result of a function is of an unknown type
  return _LITERALS.get(kind, 'None')


def _expected_items(value: Any, annotation: Any) -> str | None:
  """As `_expected`, for a list or a tuple of values."""
  if not isinstance(value, list | tuple):
    kind = _expected(value, annotation)
    if kind:
      return f'several in brackets, each {kind}'
    return f'several in brackets, such as ({value!r},)'
  return _first_expected((item, annotation) for item in value)


def _expected_tuple(value: Any, annotations: Sequence[Any]) -> str | None:
  """As `_expected`, for a value of each annotation, or any number of the first before an `...`."""
  if annotations[-1] is Ellipsis:
    return _expected_items(value, annotations[0])
  count = len(annotations)
  if not isinstance(value, list | tuple) or len(value) != count:
    return f'{count} values in brackets'
  return _first_expected(zip(value, annotations, strict=True))


def _expected_mapping(value: Any, key: Any, item: Any) -> str | None:
  """As `_expected`, for values by name."""
  if not isinstance(value, dict):
    return "values by name in braces, such as {'NAME': 1}"
  pairs = [(name, key) for name in value]
  if item is not Any:
    pairs += [(one, item) for one in value.values()]
  return _first_expected(pairs)


def _first_expected(pairs: Iterable[tuple[Any, Any]]) -> str | None:
  """As `_expected`, for the first of (value, annotation) that does not fit."""
  for value, annotation in pairs:
    kind = _expected(value, annotation)
    if kind:
      return kind
  return None


def _expected_maker(value: Any, part: Any) -> str | None:
  """As `_expected`, for a callable that returns an instance of `part`."""
  name = _name_of(part)
  if not isinstance(value, Reference):
    return f'a reference to {name}'
  if not value.evaluated:
    if inspect.isclass(_target(value)):
      return _expected_class(value, part)
    return None
  if not _is_result(value, part):
    return None
  plain = str(value).removesuffix('()')
  return f'a reference to {name} (write {plain})'


def _expected_instance(value: Any, part: Any) -> str | None:
  """As `_expected`, for an instance of `part`."""
  name = _name_of(part)
  if not isinstance(value, Reference):
    if part.__module__.startswith('valkyrie.'):
      return f'{name}, such as @NAME()'
    return None
  if value.evaluated:
    return _expected_class(value, part)
  if inspect.isclass(_target(value)) or not _accepts_functions(part):
    return f'an instance of {name} (write {value}())'
  return None


def _name_of(part: Any) -> str:
  """The name of a type, or the names of a union, for a message."""
  names = []
  for kind in _options(part):
    if kind is not Any:
      name = getattr(kind, '__name__', 'function')
      names.append(name)
  return ' or '.join(names) or 'a part'


def _is_result(reference: Reference, part: Any) -> bool:
  """Whether the result of a call is known to be an instance of `part`, not what makes one."""
  target = _target(reference)
  if inspect.isclass(target):
    classes = inspect.getmro(target)
    if not any('__call__' in vars(kind) for kind in classes):
      return True
  else:
    target = inspect.signature(target).return_annotation
  if not inspect.isclass(target):
    return False
  classes = [option for option in _options(part) if inspect.isclass(option)]
  return any(_lacks(target, option) is None for option in classes)


def _is_union(annotation: Any) -> bool:
  return typing.get_origin(annotation) in (types.UnionType, typing.Union)


def _options(part: Any) -> tuple[Any, ...]:
  """The types of a union, or the one type."""
  if _is_union(part):
    return typing.get_args(part)
  return (part,)


def _accepts_functions(part: Any) -> bool:
  """Whether a function may be an instance: of a protocol that only asks for a call."""
  if part is object:
    return True
  if not getattr(part, '_is_protocol', False):
    return False
  methods = set()
  for name, member in vars(part).items():
    if inspect.isfunction(member):
      methods.add(name)
  return methods <= {'__call__', '__init__', '__subclasshook__'}


def _expected_class(reference: Reference, expected: Any) -> str | None:
  """The expected type of a class or its instance; a protocol needs methods with its arguments."""
  target = _target(reference)
  is_instance = reference.evaluated and inspect.isclass(target)
  if is_instance and issubclass(target, hk.Module):
    plain = str(reference).removesuffix('()')
    return f'no instance of a Haiku module (write {plain})'
  are_classes = inspect.isclass(expected) and inspect.isclass(target)
  if expected is Any or not are_classes:
    return None
  return _lacks(target, expected)


def _lacks(target: type, expected: type) -> str | None:
  """The expected type, if a class is another one, with the methods that it lacks; else None."""
  name = expected.__name__
  if not getattr(expected, '_is_protocol', False):
    return None if issubclass(target, expected) else name
  unfit = []
  for method_name, method in vars(expected).items():
    is_public = not method_name.startswith('_') or method_name == '__call__'
    if inspect.isfunction(method) and is_public:
      target_method = getattr(target, method_name, None)
      if not _accepts_arguments(target_method, method):
        unfit.append(method_name)
  if not unfit:
    return None
  return f'{name} ({target.__name__} has no {", ".join(unfit)} with its arguments)'


def _target(reference: Reference) -> Any:
  return find(reference.name).wrapped


def _accepts_arguments(method: Any, other: types.FunctionType) -> bool:
  """Whether a method can be called with all arguments of another one, `self` included."""
  parameters = inspect.signature(other).parameters.values()
  keywords = []
  for item in parameters:
    if item.kind is inspect.Parameter.KEYWORD_ONLY:
      keywords.append(item.name)
  try:
    placed = len(parameters) - len(keywords)
    arguments = [None] * placed
    signature = inspect.signature(method)
    signature.bind(*arguments, **dict.fromkeys(keywords))
  except TypeError:  # no method, or one with other parameters
    return False
  return True
