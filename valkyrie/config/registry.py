"""gin's registry of configurables, and the parameters of a configurable."""

from collections.abc import Callable, Collection
import importlib
import inspect
from typing import Any

import gin
from gin import config as gin_config
import optax

from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError


def find(name: str, where: str = '') -> gin_config.Configurable:
  """The configurable of 'scope/selector', which may leave out leading modules.

  Raises:
    ConfigurationError: the name is unknown or ambiguous; the message begins with `where`.
  """
  registry = gin_config._REGISTRY
  selector = name.rsplit('/', 1)[-1]
  matches = registry.matching_selectors(selector) or _of_optax(selector)
  if not matches:
    known = {registry.minimal_selector(complete) for complete, _ in registry.items()}
    known |= {f'optax.{n}' for n in dir(optax)} | {f'optax.contrib.{n}' for n in dir(optax.contrib)}
    raise ConfigurationError(
      f'{where}: there is no configurable {selector!r}.{did_you_mean(selector, known)}'
    )
  if len(matches) > 1:
    raise ConfigurationError(
      f'{where}: {selector!r} is ambiguous. Write one of {", ".join(sorted(matches))}.'
    )
  return registry[matches[0]]


def _of_optax(selector: str) -> list[str]:
  """Registers a function of optax by its name, with its module or alone -> [its dotted name].

  Returns [] if optax has no such function. gin writes the name alone (record.write_configuration).
  """
  name = selector.rpartition('.')[2]
  for module in ('optax', 'optax.contrib'):
    if selector not in (name, f'{module}.{name}'):
      continue
    found = getattr(importlib.import_module(module), name, None)
    if callable(found):
      gin.external_configurable(found, name=name, module=module)
      return [f'{module}.{name}']
  return []


def constructor(function: Callable) -> Callable:
  """A function, or the constructor of a class, without gin's wrappers."""
  # A metaclass, such as Haiku's, may hide the signature of the class itself.
  is_class = inspect.isclass(function)
  callee: Any = gin_config._find_class_construction_fn(function) if is_class else function
  return inspect.unwrap(callee)


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
  """The parameters that gin may bind, of a function or of the constructor of a class."""
  is_class = inspect.isclass(function)
  function = constructor(function)
  try:
    signature = inspect.signature(function, eval_str=True)
  except (NameError, TypeError, AttributeError):  # an annotation for the type checker only
    signature = inspect.signature(function)
  except ValueError:  # a builtin without a signature
    return {}
  parameters = list(signature.parameters.items())
  return dict(parameters[1:] if is_class else parameters)  # without self, or __new__'s class


def missing(function: Callable, given: Collection[str]) -> list[str]:
  """The names of the parameters that have no default and are not `given`."""
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  return [
    name
    for name, parameter in parameters_of(function).items()
    if (parameter.default is inspect.Parameter.empty or parameter.default is gin.REQUIRED)
    and parameter.kind not in variadic
    and name not in given
  ]
