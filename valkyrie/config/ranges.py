"""The ranges of numbers, as parts of the annotations of their parameters, and their checks.

`rank: PositiveInt = 8` takes 1 or more. `load_gin` checks all bindings before anything is built;
`checked` and `check_fields` check what functions and classes get from Python.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
import numbers
import typing
from typing import Annotated, Any, NamedTuple, TypeVar

from valkyrie.errors import ConfigurationError


class Range(NamedTuple):
  """A mathematical interval, such as '(0, 1]': a round bracket leaves its bound out.

  '[0, 1] or inf' has one number more.
  """

  interval: str

  def __contains__(self, number: Any) -> bool:
    interval, *others = self.interval.split(' or ')
    if number in map(_bound, others):
      return True
    bounds = interval[1:-1].split(', ')
    least, most = map(_bound, bounds)
    if number == least:
      is_closed = interval.startswith('[')
      return is_closed and number <= most
    if number == most:
      is_closed = interval.endswith(']')
      return is_closed and number >= least
    return least < number < most


def _bound(text: str) -> int | float:
  if text.isdigit():
    return int(text)
  return float(text)


# Counts fit the 32-bit integers of devices.
PositiveInt = Annotated[int, Range('[1, 2147483647]')]
NonNegativeInt = Annotated[int, Range('[0, 2147483647]')]
# Those of hosts only: an interval of steps beyond the last one is never due.
PositiveInt64 = Annotated[int, Range('[1, 9223372036854775807]')]
Seed = Annotated[int, Range('[0, 4294967295]')]

# Those of devices fit float32: a larger number is infinite there, and a smaller one 0.
PositiveFloat = Annotated[float, Range('[1.2e-38, 3.4e38]')]
FiniteFloat = Annotated[float, Range('[-3.4e38, 3.4e38]')]
NonNegativeFloat = Annotated[float, Range('[0, 3.4e38]')]
Fraction = Annotated[float, Range('[0, 1]')]
ProperFraction = Annotated[float, Range('[0, 1)')]
Factor = Annotated[float, Range('[1, 3.4e38]')]
Limit = Annotated[float, Range('[1.2e-38, 3.4e38] or inf')]  # infinity limits nothing
Seconds = Annotated[float, Range('[0, inf]')]

_Function = TypeVar('_Function', bound=Callable)


def check(name: str, value: Any, annotation: Any, where: str = '') -> None:
  """Raises a ConfigurationError, which begins with `where`, for a value out of its range.

  Each of several numbers, which may be in pairs, is in the range, which may be anywhere in the
  annotation, as in `Sequence[PositiveInt] | None`. None is in every range, and an empty sequence in
  none.
  """
  kind, permitted = range_in(annotation)
  if permitted is None:
    return
  number = 'a number'
  numeric = numbers.Real
  if kind is int:
    number = 'an integer'
    numeric = numbers.Integral
  is_several = isinstance(value, list | tuple)
  if is_several and value:
    for item in value:
      check(name, item, annotation, where)
    return
  if value is None:
    return
  is_truth = isinstance(value, bool)
  is_number = isinstance(value, numeric) and not is_truth
  if not is_number or value not in permitted:
    raise ConfigurationError(
      f'{where}{name} = {value!r} is out of range. Use {number} in {permitted.interval}.'
    )


def check_fields(settings: Any) -> None:
  """Checks the numbers of a dataclass against the annotations of its fields."""
  annotations = _annotations(type(settings))
  for field in dataclasses.fields(settings):
    name = f'{type(settings).__name__}.{field.name}'
    value = getattr(settings, field.name)
    check(name, value, annotations[field.name])


def checked(function: _Function) -> _Function:
  """Decorates a function or a constructor, whose calls then check their arguments.

  Not the constructor of a Haiku module, whose metaclass reads the signature in its own way.
  """
  owner = function.__qualname__.removesuffix('.__init__').rpartition('.')[2]
  signature = inspect.signature(function)
  names = list(signature.parameters)

  @functools.wraps(function)
  def check_and_call(*args: Any, **kwargs: Any) -> Any:
    annotations = _annotations(function)
    given_by_place = zip(names, args, strict=False)
    given = dict(given_by_place) | kwargs
    for name, value in given.items():
      annotation = annotations.get(name)
      check(f'{owner}.{name}', value, annotation)
    return function(*args, **kwargs)

  # gin looks for it there, and not behind `__wrapped__`, to know what a caller gives by position.
  setattr(check_and_call, '__signature__', signature)  # noqa: B010, functions have no such attribute
  return typing.cast(_Function, check_and_call)


def range_in(annotation: Any) -> tuple[Any, Range | None]:
  """The type and the range of the first `Annotated` type in an annotation that has one."""
  parts = typing.get_args(annotation)
  for part in parts:
    if isinstance(part, Range):
      return parts[0], part
    kind, permitted = range_in(part)
    if permitted is not None:
      return kind, permitted
  return None, None


@functools.cache
def _annotations(part: Any) -> Mapping[str, Any]:
  """The annotations of a function, or of a class and its bases."""
  annotations = {}
  for owner in reversed(getattr(part, '__mro__', (part,))):
    try:
      own = inspect.get_annotations(owner, eval_str=True)
    except (NameError, TypeError, AttributeError):  # an annotation only for the type checker
      own = inspect.get_annotations(owner)
    annotations.update(own)
  return annotations
