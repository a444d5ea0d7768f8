"""The gin bindings that decide the computation of a training step.

A checkpoint records them: a resumed run must have the same ones, and so must all processes of a
run. Logging, evaluation and hooks are not among them.
"""

from collections.abc import Callable, Hashable, Mapping
import inspect
from typing import Any, TypeVar

from gin import config as gin_config

from valkyrie.config.check import parameters_of
from valkyrie.config.parse import leaves

_Configurable = TypeVar('_Configurable', bound=Callable)
_DECLARED = '_may_change_on_resume'  # the attribute that holds the names


def may_change_on_resume(*parameters: str) -> Callable[[_Configurable], _Configurable]:
  """Declares parameters of a configurable, or all, that do not change the computation of a step.

  A decorator above or below `@gin.configurable`. Subclasses inherit the declaration.
  """

  def declare(configurable: _Configurable) -> _Configurable:
    known = parameters_of(configurable).keys()
    if unknown := set(parameters) - known:
      raise ValueError(f'{configurable.__name__} has no parameter {", ".join(sorted(unknown))}.')
    target = inspect.unwrap(configurable)  # which gin keeps in its registry
    setattr(target, _DECLARED, {*getattr(target, _DECLARED, ()), *(parameters or known)})
    return configurable

  return declare


def computation(bindings: Mapping[str, Any]) -> dict[str, Any]:
  """The bindings among `record.bindings` that change the computation of a training step.

  A binding `scope/Selector.parameter` is left out
  - if the configurable declares the parameter with `may_change_on_resume`, or
  - if the configurable is referenced, and all references to which the binding applies are in
    bindings that are left out: `train.hooks = (@MyHook(),)` leaves out every `MyHook.*`, and
    `Evaluator.feed = @validation/TaskFeed` every `validation/TaskFeed.*`.
  The default of an unbound parameter is a reference too.
  """
  registry = gin_config._REGISTRY
  bound = {**default_references(), **bindings}
  references = [
    (name, *_scope_and_selector(leaf[1:].removesuffix('()')))
    for name, value in bound.items()
    for leaf in leaves(value)
    if isinstance(leaf, str) and leaf.startswith('@')
  ]
  left_out, referrers = set(), {}
  for name in bound:
    configurable, _, parameter = name.rpartition('.')
    scope, selector = _scope_and_selector(configurable)
    wrapped = registry[selector].wrapped if selector in registry else None
    if parameter in getattr(wrapped, _DECLARED, ()):
      left_out.add(name)
    referrers[name] = {
      referrer
      for referrer, its_scope, its_selector in references
      if its_selector == selector and its_scope[: len(scope)] == scope
    }
  while more := {name for name, by in referrers.items() if by and by <= left_out} - left_out:
    left_out |= more
  return {name: value for name, value in bindings.items() if name not in left_out}


def default_of(name: str) -> Any:
  """The default of the parameter 'Selector.parameter', which is what it is without a binding.

  `inspect.Parameter.empty` if it has none, or in a scope, where the binding without one counts.
  """
  configurable, _, parameter = name.rpartition('.')
  scope, selector = _scope_and_selector(configurable)
  registry, empty = gin_config._REGISTRY, inspect.Parameter.empty
  if scope or selector not in registry:
    return empty
  found = parameters_of(registry[selector].wrapped).get(parameter)
  return found.default if found else empty


def default_references() -> dict[str, list[str]]:
  """{parameter: references to the configurables in its default}, as bindings are."""
  registry, found = gin_config._REGISTRY, {}
  for selector, configurable in registry.items():
    for name, parameter in parameters_of(configurable.wrapped).items():
      found[f'{registry.minimal_selector(selector)}.{name}'] = [
        f'@{part.selector}'
        for leaf in leaves(parameter.default)
        if isinstance(leaf, Hashable) and (part := gin_config._inverse_lookup(leaf))
      ]
  return found


def _scope_and_selector(name: str) -> tuple[list[str], str]:
  """(['a', 'b'], the complete selector of X) for 'a/b/X'."""
  *scope, selector = name.split('/')
  matches = gin_config._REGISTRY.matching_selectors(selector)
  return scope, matches[0] if len(matches) == 1 else selector
