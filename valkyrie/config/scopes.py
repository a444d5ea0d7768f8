"""Checks that bindings in a scope reach something.

gin reads the bindings of `scope/X` where X is built under this scope: by a reference `@scope/X`, or
by a part that was built under it and refers to `@X`. A reference with another scope leaves the
scope of the part that has it: `@local/Block` in a teacher's pattern is not under `teacher/`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
import inspect
from typing import NamedTuple

from gin import config as gin_config

from valkyrie.config import parse
from valkyrie.config.check import Effective, constructor, find
from valkyrie.config.computation import default_references
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

Scope = tuple[str, ...]


class _Built(NamedTuple):
  """A part, by its complete selector, that is built under a scope, () for none."""

  scope: Scope
  selector: str


class _Edge(NamedTuple):
  """A part to which a binding of another part refers, where that is built under `within`."""

  within: Scope
  part: _Built


def check_scopes(bindings: Sequence[parse.Statement], effective: Effective) -> None:
  """Checks that something is built under the scope of each binding, of the binding's kind.

  A binding of a file counts as used if an overridden reference would use it, as a file for another
  model may have one; a flag must be in force, also one without a scope. Those that a run has
  recorded are not checked.
  """
  known: set[str] = set()
  for reference in _references(bindings):
    known.update(_scope_of(reference))
  from_files = _Reach(bindings)
  in_force = _Reach(list(effective.values()))
  for statement in bindings:
    scope = statement.parsed.scope
    if statement.is_macro or statement.recorded:
      continue
    if not scope:
      if statement.is_flag:
        _check_not_hidden(statement, in_force, effective)
      continue
    parts = scope.split('/')
    for part in parts:
      if part not in known:
        raise ConfigurationError(
          f'{statement.where}: {statement.name} has no effect, since no binding refers to a '
          f'@{part}/{statement.parsed.selector}.{did_you_mean(part, known)} The scopes are '
          f'{", ".join(sorted(known)) or "none"}.'
        )
    reach = from_files
    if statement.is_flag:
      reach = in_force
    selector = find(statement.parsed.selector, statement.where).selector
    if not reach.builds(tuple(parts), selector):
      name = statement.parsed.selector
      references = [f'@{reference}' for reference in reach.references_to(selector)]
      others = ', '.join(sorted(references))
      raise ConfigurationError(
        f'{statement.where}: {statement.name} has no effect, since no {name} is built in the scope '
        f'{scope}: the references to it are {others}, and a reference has its own scope. Put '
        f'@{scope}/{name} where the part should be used, or bind parameters of one of these.'
      )


def _check_not_hidden(statement: parse.Statement, reach: '_Reach', effective: Effective) -> None:
  """Raises a ConfigurationError if all scopes under which the part is built bind it themselves.

  Imported models bind every parameter in the scopes of their layers.
  """
  parsed = statement.parsed
  selector = find(parsed.selector, statement.where).selector
  hiding = []
  for place in reach.scopes_of(selector):
    ends = range(1, len(place) + 1)
    scopes = ['/'.join(place[:end]) for end in ends]
    own = [scope for scope in scopes if (scope, selector, parsed.arg_name) in effective]
    if not own:
      return
    hiding.append(f'{own[-1]}/{statement.name}')
  if hiding:
    raise ConfigurationError(
      f'{statement.where} has no effect, since {parsed.selector} is built only in scopes that bind '
      f'{parsed.arg_name} themselves. Bind {" or ".join(sorted(set(hiding)))}.'
    )


class _Reach:
  """The parts that the references of some statements build, and under which scopes."""

  def __init__(self, statements: Sequence[parse.Statement]):
    # {selector of a part: the parts that its bindings refer to}; '' has the parts of macros.
    self._edges: dict[str, set[_Edge]] = {}
    # {selector of a part: the names of the references to it}
    self._names: dict[str, set[str]] = {}
    macros = parse.macros_of(statements)
    for statement in statements:
      if statement.is_binding:
        self._add(statement, macros)
    bound = {statement.name for statement in statements if statement.is_binding}
    self._add_defaults(bound)
    self._built = self._under_scopes()
    self._unscoped = self._without_scope()

  def _add(self, statement: parse.Statement, macros: Mapping[str, parse.Statement]) -> None:
    """Adds the references of a binding and of the macros in its value."""
    holder = ''
    within: Scope = ()
    if not statement.is_macro:
      holder = find(statement.parsed.selector).selector
      within = tuple(filter(None, statement.parsed.scope.split('/')))
    statements = [statement]
    for name in parse.macros_in(statement.parsed.value, macros):
      if name in macros:
        statements.append(macros[name])
    for reference in _references(statements):
      part = find(reference.name, statement.where).selector
      built = _Built(_scope_of(reference), part)
      edges = self._edges.setdefault(holder, set())
      edges.add(_Edge(within, built))
      names = self._names.setdefault(part, set())
      names.add(reference.name)

  def _add_defaults(self, bound: Collection[str]) -> None:
    """Adds the references in the defaults of parameters that are not bound.

    A package that was imported may have parts that this configuration does not use. So only parts
    of valkyrie, which Python may build, and the parts that they and the statements refer to count.
    """
    defaults: dict[str, set[str]] = {}  # {selector of a part: those in its defaults}
    used = self._names.keys() | self._edges.keys()
    for name, references in default_references().items():
      configurable, _, _ = name.rpartition('.')
      part = find(configurable)
      if name not in bound:
        selectors = {find(reference[1:]).selector for reference in references}
        parts = defaults.setdefault(part.selector, set())
        parts.update(selectors)
      if part.wrapped.__module__.startswith('valkyrie.'):
        used.add(part.selector)
    waiting = list(used)
    while waiting:
      holder = waiting.pop()
      for selector in defaults.get(holder, ()):
        edges = self._edges.setdefault(holder, set())
        edges.add(_Edge((), _Built((), selector)))
        if selector not in used:
          used.add(selector)
          waiting.append(selector)

  def _under_scopes(self) -> set[_Built]:
    """All parts that are built under a scope."""
    waiting: list[_Built] = []
    for edges in self._edges.values():
      for edge in edges:
        if edge.part.scope:
          waiting.append(edge.part)
    scopes = {built.scope for built in waiting}
    # Parts that no reference names may be built by Python, under any scope.
    for selector in self._edges:
      if selector and selector not in self._names:
        for scope in scopes:
          waiting.append(_Built(scope, selector))
    under_scopes: set[_Built] = set()
    while waiting:
      built = waiting.pop()
      if built not in under_scopes:
        under_scopes.add(built)
        for edge in self._edges.get(built.selector, ()):
          if built.scope[: len(edge.within)] == edge.within:
            scope = edge.part.scope or built.scope
            waiting.append(_Built(scope, edge.part.selector))
    return under_scopes

  def _without_scope(self) -> set[str]:
    """The parts that are built under no scope: by Python, and by references of such parts."""
    waiting = [selector for selector in self._edges if selector not in self._names]
    unscoped: set[str] = set()
    while waiting:
      holder = waiting.pop()
      if not holder or holder in unscoped:
        continue
      unscoped.add(holder)
      for edge in self._edges.get(holder, ()):
        if not edge.within and not edge.part.scope:
          waiting.append(edge.part.selector)
    return unscoped

  def scopes_of(self, selector: str) -> set[Scope]:
    """The scopes under which such a part is built; () too if it is built under none, or may be."""
    kinds = _sharing_bindings(selector)
    if kinds.isdisjoint(self._names) or not kinds.isdisjoint(self._unscoped):
      return {()}
    return {built.scope for built in self._built if built.selector in kinds}

  def builds(self, scope: tuple[str, ...], selector: str) -> bool:
    """Whether such a part is built under a scope; parts that Python builds may be anywhere."""
    kinds = _sharing_bindings(selector)
    if kinds.isdisjoint(self._names):
      return True
    for built in self._built:
      is_under = built.scope[: len(scope)] == scope
      if is_under and built.selector in kinds:
        return True
    return False

  def references_to(self, selector: str) -> set[str]:
    """The names of the references to a part."""
    names: set[str] = set()
    for kind in _sharing_bindings(selector):
      names.update(self._names.get(kind, ()))
    return names


def _scope_of(reference: parse.Reference) -> Scope:
  *scope, _ = reference.name.split('/')
  return tuple(scope)


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
  part_constructor = constructor(part)
  selectors = set()
  for name, known in registry.items():
    kind = known.wrapped
    inherits = inspect.isclass(kind) and issubclass(kind, part)
    if inherits and constructor(kind) is part_constructor:
      selectors.add(name)
  return selectors
