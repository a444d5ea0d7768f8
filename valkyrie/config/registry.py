"""gin's registry of configurables, and the parameters of a configurable."""

from collections.abc import Callable
import inspect

import gin
from gin import config as gin_config

from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError


def matching(name: str) -> list[str]:
  """The complete selectors that 'scope/selector' may mean; it may leave out leading modules."""
  return gin_config._REGISTRY.matching_selectors(name.rsplit('/', 1)[-1])


def find(name: str, where: str = '') -> gin_config.Configurable:
  """The configurable of 'scope/selector'.

  Raises:
    ConfigurationError: the name is unknown or ambiguous; the message begins with `where`.
  """
  registry, matches = gin_config._REGISTRY, matching(name)
  selector = name.rsplit('/', 1)[-1]
  if not matches:
    known = {registry.minimal_selector(complete) for complete, _ in registry.items()}
    raise ConfigurationError(
      f'{where}: there is no configurable {selector!r}.{did_you_mean(selector, known)}'
    )
  if len(matches) > 1:
    raise ConfigurationError(
      f'{where}: {selector!r} is ambiguous. Write one of {", ".join(sorted(matches))}.'
    )
  return registry[matches[0]]


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
  """The parameters that gin may bind, of a function or of the constructor of a class."""
  if not inspect.isclass(function):
    return _signature(function)
  # A metaclass, such as Haiku's, may hide the signature of the class itself.
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
  except (NameError, TypeError, AttributeError):  # an annotation for the type checker only
    return dict(inspect.signature(function).parameters)


def required(parameters: dict[str, inspect.Parameter]) -> list[str]:
  """The names of the parameters without a default."""
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return [
    name
    for name, parameter in parameters.items()
    if (parameter.default is inspect.Parameter.empty or parameter.default is gin.REQUIRED)
    and parameter.kind not in variadic
  ]
