"""The gin bindings that decide the computation of a training step.

A checkpoint records them: a resumed run must have the same ones, and so must all processes of a
run. Logging, evaluation and hooks are not among them.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
import inspect
from typing import Any, NamedTuple, TypeVar

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
    unknown = set(parameters) - known
    if unknown:
      raise ValueError(f'{configurable.__name__} has no parameter {", ".join(sorted(unknown))}.')
    target = inspect.unwrap(configurable)  # below the decorators, as `_declared` looks it up
    declared: set[str] = set(getattr(target, _DECLARED, ()))
    declared.update(parameters or known)
    setattr(target, _DECLARED, declared)
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
  bound: dict[str, Any] = {**default_references(), **bindings}
  references = list(_references(bound))
  left_out: set[str] = set()
  referrers: dict[str, set[str]] = {}  # the bindings that refer to the part of each binding
  for name in bound:
    configurable, _, parameter = name.rpartition('.')
    _, selector = _scope_and_selector(configurable)
    if parameter in _declared(selector):
      left_out.add(name)
    referrers[name] = set()
    for reference in references:
      if _sets(name, reference):
        referrers[name].add(reference.binding)
  # A binding that is left out may be the last one that refers to a further part.
  while True:
    more = set()
    for name, names in referrers.items():
      if names and names <= left_out:
        more.add(name)
    more -= left_out
    left_out |= more
    if not more:
      break
  kept = {}
  for name, value in bindings.items():
    if name not in left_out:
      kept[name] = value
  return kept


def reached(bindings: Mapping[str, Any], roots: Collection[str]) -> set[str]:
  """The names among `bindings` that set the parts to which the bindings `roots` lead."""
  bound: dict[str, Any] = {**default_references(), **bindings}
  references = list(_references(bound))
  names = {*roots} & bound.keys()
  while True:
    leading = [reference for reference in references if reference.binding in names]
    more: set[str] = set()
    for name in bound:
      if any(_sets(name, reference) for reference in leading):
        more.add(name)
    if more <= names:
      return names & bindings.keys()
    names |= more


class _Reference(NamedTuple):
  """A reference in the value of a binding to the part with a selector, under a scope."""

  binding: str
  scope: list[str]
  selector: str


def _sets(name: str, reference: _Reference) -> bool:
  """Whether a binding of this name applies to the part to which a reference leads."""
  configurable, _, _ = name.rpartition('.')
  scope, selector = _scope_and_selector(configurable)
  is_in_scope = reference.scope[: len(scope)] == scope
  return reference.selector == selector and is_in_scope


def _references(bindings: Mapping[str, Any]) -> Iterator[_Reference]:
  """The references in the values of bindings."""
  for name, value in bindings.items():
    for leaf in leaves(value):
      if isinstance(leaf, str) and leaf.startswith('@'):
        configurable = leaf[1:].removesuffix('()')
        scope, selector = _scope_and_selector(configurable)
        yield _Reference(name, scope, selector)


def _declared(selector: str) -> Collection[str]:
  """The parameters that a configurable declares with `may_change_on_resume`."""
  registry = gin_config._REGISTRY
  if selector not in registry:
    return ()
  target = inspect.unwrap(registry[selector].wrapped)
  return getattr(target, _DECLARED, ())


def default_of(name: str) -> Any:
  """The value of the parameter 'Selector.parameter' without a binding; `Parameter.empty` if none.

  A scoped name has no default of its own: the unscoped binding applies.
  """
  configurable, _, name_of_parameter = name.rpartition('.')
  scope, selector = _scope_and_selector(configurable)
  registry = gin_config._REGISTRY
  if scope or selector not in registry:
    return inspect.Parameter.empty
  parameters = parameters_of(registry[selector].wrapped)
  if name_of_parameter not in parameters:
    return inspect.Parameter.empty
  return parameters[name_of_parameter].default


def default_references() -> dict[str, list[str]]:
  """{parameter: references to the configurables in its default}, as bindings are."""
  registry = gin_config._REGISTRY
  defaults = {}
  for selector, configurable in registry.items():
    short_selector = registry.minimal_selector(selector)
    for name, parameter in parameters_of(configurable.wrapped).items():
      references = []
      for leaf in leaves(parameter.default):
        part = None
        if isinstance(leaf, Hashable):
          part = gin_config._inverse_lookup(leaf)
        if part:
          references.append(f'@{part.selector}')
      defaults[f'{short_selector}.{name}'] = references
  return defaults


def _scope_and_selector(name: str) -> tuple[list[str], str]:
  """(['a', 'b'], the complete selector of X) for 'a/b/X'."""
  *scope, selector = name.split('/')
  matches = gin_config._REGISTRY.matching_selectors(selector)
  if len(matches) == 1:
    selector = matches[0]
  return scope, selector
