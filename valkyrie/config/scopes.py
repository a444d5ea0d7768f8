"""Checks that bindings in a scope reach something.

gin reads the bindings of `scope/X` where X is built under this scope: by a reference `@scope/X`, or
by a part that was built under it and refers to `@X`. A reference with a scope of its own leaves the
scope of the part that has it: `@local/Block` in a teacher's pattern is not under `teacher/`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
import inspect

from gin import config as gin_config

from valkyrie.config import parse
from valkyrie.config.check import Effective, constructor, find
from valkyrie.config.computation import default_references
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

# (a scope, the complete selector of what is built under it)
_Built = tuple[tuple[str, ...], str]


def check_scopes(bindings: Sequence[parse.Statement], effective: Effective) -> None:
  """Checks that something is built under the scope of each binding, of the binding's kind.

  A binding of a file counts as used if an overridden reference would use it, as a file for another
  model may have one; a flag must be in force. Those that a run has recorded are not checked.
  """
  known = {
    scope
    for statement in bindings
    for reference in _references([statement])
    for scope in reference.name.split('/')[:-1]
  }
  from_files = _Reach(bindings)
  in_force = _Reach([*effective.values()])
  for statement in bindings:
    scope = statement.parsed.scope
    if not scope or statement.is_macro or statement.recorded:
      continue
    for part in scope.split('/'):
      if part not in known:
        raise ConfigurationError(
          f'{statement.where}: {statement.name} has no effect, since no binding refers to a '
          f'@{part}/{statement.parsed.selector}.{did_you_mean(part, known)} The scopes are '
          f'{", ".join(sorted(known)) or "none"}.'
        )
    reach = in_force if statement.is_flag else from_files
    selector = find(statement.parsed.selector, statement.where).selector
    if not reach.builds(tuple(scope.split('/')), selector):
      name = statement.parsed.selector
      others = ', '.join(sorted(f'@{found}' for found in reach.references_to(selector)))
      raise ConfigurationError(
        f'{statement.where}: {statement.name} has no effect, since no {name} is built in the scope '
        f'{scope}: the references to it are {others}, and a reference has its own scope. Put '
        f'@{scope}/{name} where the part should be used, or bind parameters of one of these.'
      )


class _Reach:
  """What is built under which scope by the references of some statements."""

  def __init__(self, statements: Sequence[parse.Statement]):
    self._edges: dict[str, set[_Built]] = {}  # of the references of a part, by its selector
    self._names: dict[str, set[str]] = {}  # of the references to a part, by its selector
    macros = {item.name: item for item in statements if item.is_macro}
    for statement in statements:
      if not statement.is_binding:
        continue
      holder = '' if statement.is_macro else find(statement.parsed.selector).selector
      within = [macros[n] for n in parse.macros_in(statement.parsed.value, macros) & macros.keys()]
      for reference in _references([statement, *within]):
        *scope, _ = reference.name.split('/')
        built = find(reference.name, statement.where).selector
        self._edges.setdefault(holder, set()).add((tuple(scope), built))
        self._names.setdefault(built, set()).add(reference.name)
    self._add_defaults({item.name for item in statements if item.is_binding})
    self._built = self._under_scopes()

  def _add_defaults(self, bound: Collection[str]) -> None:
    """Adds the references in the defaults of parameters that are not bound.

    A package that was imported may have parts that this configuration does not use: only parts of
    valkyrie, which Python may build, and what they and the statements refer to count.
    """
    defaults: dict[str, set[str]] = {}  # of a part, by its selector
    used = {*self._names, *self._edges}
    for name, references in default_references().items():
      part = find(name.rpartition('.')[0])
      if name not in bound:
        selectors = {find(reference[1:]).selector for reference in references}
        defaults.setdefault(part.selector, set()).update(selectors)
      if part.wrapped.__module__.startswith('valkyrie.'):
        used.add(part.selector)
    waiting = [*used]
    while waiting:
      holder = waiting.pop()
      for selector in defaults.get(holder, ()):
        self._edges.setdefault(holder, set()).add(((), selector))
        if selector not in used:
          used.add(selector)
          waiting.append(selector)

  def _under_scopes(self) -> set[_Built]:
    """All parts that are built under a scope."""
    waiting = [built for edges in self._edges.values() for built in edges if built[0]]
    # What no reference names, Python may build under any scope.
    by_python = [selector for selector in self._edges if selector not in self._names]
    waiting += [(scope, part) for scope, _ in waiting for part in by_python if part]
    found: set[_Built] = set()
    while waiting:
      scope, part = built = waiting.pop()
      if built not in found:
        found.add(built)
        waiting += [(own or scope, other) for own, other in self._edges.get(part, ())]
    return found

  def builds(self, scope: tuple[str, ...], selector: str) -> bool:
    """Whether such a part is built under a scope; parts that Python builds may be anywhere."""
    kinds = _sharing_bindings(selector)
    if kinds.isdisjoint(self._names):
      return True
    return any(part in kinds and under[: len(scope)] == scope for under, part in self._built)

  def references_to(self, selector: str) -> set[str]:
    """The names of the references to a part."""
    return {name for kind in _sharing_bindings(selector) for name in self._names.get(kind, ())}


def _references(statements: Iterable[parse.Statement]) -> Iterator[parse.Reference]:
  for statement in statements:
    if statement.is_binding:
      for leaf in parse.leaves(statement.parsed.value):
        if isinstance(leaf, parse.Reference):
          yield leaf


def _sharing_bindings(selector: str) -> set[str]:
  """The part, and its subclasses that inherit its constructor, which use its bindings."""
  registry = gin_config._REGISTRY
  part = registry[selector].wrapped
  if not inspect.isclass(part):
    return {selector}
  made = constructor(part)
  return {
    name
    for name, known in registry.items()
    if inspect.isclass(known.wrapped)
    and issubclass(known.wrapped, part)
    and constructor(known.wrapped) is made
  }
