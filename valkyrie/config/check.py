"""Checks of the names in gin statements against gin's registry of configurables.

Every check raises ConfigurationError, with the flag, or the file and line. The checks of values
are in `value_types`.
"""

from collections.abc import Callable, Collection, Sequence
import inspect
from typing import Any

import gin
from gin import config as gin_config
import optax

from valkyrie.config import parse, ranges, redact
from valkyrie.config.parse import FLAG
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

# Every whole-run gin file defines these, even if none of its parts reads them.
RUN_MACROS = frozenset({
  'seed', 'batch_size', 'chunk_size', 'chunks', 'backprop_chunks', 'train_steps', 'log_every',
  'eval_every', 'checkpoint_every', 'learning_rate', 'warmup_steps',
})  # fmt: skip

# {complete name: value}
_OPTAX: dict[str, Any] = {}
for _module in (optax, optax.contrib):
  for _name in dir(_module):
    _name_of_part = f'{_module.__name__}.{_name}'
    _OPTAX[_name_of_part] = getattr(_module, _name)

# The ranges of numbers that optax names; it annotates them as arrays or schedules.
OPTAX_NUMBERS = {
  **dict.fromkeys(('b1', 'b2', 'b3', 'decay', 'momentum'), ranges.ProperFraction),
  **dict.fromkeys(('weight_decay', 'eps', 'eps_root'), ranges.NonNegativeFloat),
}

# {(scope, complete selector, parameter): statement}, with gin's keys; the key of a macro is
# (name, 'gin.macro', 'value').
Effective = dict[tuple[str, str, str], parse.Statement]


def check_macros(bindings: Sequence[parse.Statement], effective: Effective) -> None:
  """Checks that macros are used.

  An active binding must read the macro of a flag, and any binding the macro of a file.
  """
  macros = parse.macros_of(effective.values())
  values = [item.parsed.value for item in bindings]
  used = parse.macros_in(values, {})
  in_force = []
  for item in effective.values():
    if not item.is_macro:
      in_force.append(item.parsed.value)
  read = parse.macros_in(in_force, macros)
  defined: set[str] = set()
  for item in bindings:
    if item.is_macro and not item.is_flag:
      defined.add(item.name)
  known = used | RUN_MACROS
  for statement in bindings:
    name = statement.name
    where = statement.where
    if not statement.is_macro or name in read:
      continue
    if not statement.is_flag:
      if not statement.recorded and name not in known:
        raise ConfigurationError(
          f'{where}: no binding reads the macro {name!r}. Use it as %{name}, or remove it.'
          + did_you_mean(name, known - defined)
        )
    elif name in used | defined:
      raise ConfigurationError(
        f'{where} has no effect: no binding in force reads %{name}. Leave it out.'
      )
    else:
      hint = did_you_mean(name, used | defined)
      same = [item.name for item in bindings if item.parsed.arg_name == name]
      if same:
        hint = f' Did you mean {same[0]}?'
      raise ConfigurationError(
        f'{where}: no gin file defines or reads a macro {name!r}.{hint} '
        f'The macros are {", ".join(sorted(used | defined))}.'
      )


def effective_bindings(statements: Sequence[parse.Statement]) -> Effective:
  """The last statement of each binding, after a check of its configurable and parameter."""
  effective: Effective = {}
  for statement in statements:
    if statement.is_import:
      continue
    parsed = statement.parsed
    if statement.is_macro:
      effective[(statement.name, 'gin.macro', 'value')] = statement
      continue
    configurable = find(parsed.selector, statement.where)
    if not statement.is_binding:  # the head of an indented block
      continue
    known = _parameters_to_bind(configurable, parsed.arg_name)
    if parsed.arg_name not in known:
      raise ConfigurationError(
        f'{statement.where}: {parsed.selector} has no parameter {parsed.arg_name!r} to bind.'
        f'{did_you_mean(parsed.arg_name, known)} Its parameters are {", ".join(known)}. '
        'If an earlier version had it, CHANGELOG.md has what took its place.'
      )
    effective[(parsed.scope, configurable.selector, parsed.arg_name)] = statement
  return effective


def _parameters_to_bind(configurable: gin_config.Configurable, name: str) -> list[str]:
  """The parameters that may be bound; with **kwargs also the named one."""
  parameters = parameters_of(configurable.wrapped)
  denied = configurable.denylist or ()
  candidates = configurable.allowlist or parameters
  known = [parameter for parameter in candidates if parameter not in denied]
  kinds = [parameter.kind for parameter in parameters.values()]
  has_keywords = inspect.Parameter.VAR_KEYWORD in kinds
  takes_any = has_keywords and not configurable.allowlist
  if takes_any and name not in denied:
    known.append(name)
  return known


def check_references(effective: Effective) -> None:
  """Checks that references, macros and secrets have values."""
  macros = parse.macros_of(effective.values())
  for statement in effective.values():
    where = statement.where
    name = statement.name
    for leaf in parse.leaves(statement.parsed.value):
      if isinstance(leaf, parse.Reference):
        find(leaf.name, where)
      elif isinstance(leaf, parse.Macro) and leaf.name not in macros:
        constants = gin_config._CONSTANTS.matching_selectors(leaf.name)
        if constants == ['gin.REQUIRED']:
          raise ConfigurationError(
            f'{where}: {name} is required and has no value. Pass {FLAG}{name}=VALUE.'
          )
        if not constants:
          raise ConfigurationError(
            f'{where}: no statement defines %{leaf.name}. Add `{leaf.name} = ...` to the gin file, '
            f'or pass {FLAG}{leaf.name}=VALUE.{did_you_mean(leaf.name, macros)}'
          )
      elif statement.recorded and _is_removed_secret(leaf):
        raise ConfigurationError(
          f'{where} was not recorded, since it is a secret. Pass {FLAG}{name}=VALUE.'
        )
    if not statement.is_macro:
      continue
    used = parse.macros_in(statement.parsed.value, macros)
    if name in used:
      raise ConfigurationError(f'{where}: the macro %{name} is defined by itself. Give it a value.')


def _is_removed_secret(leaf: Any) -> bool:
  if not isinstance(leaf, str):
    return False
  return redact.RECORDED.fullmatch(leaf) is not None


def check_calls(effective: Effective) -> None:
  """Checks that what is called has all its parameters."""
  for statement in effective.values():
    for leaf in parse.leaves(statement.parsed.value):
      if isinstance(leaf, parse.Reference) and leaf.evaluated:
        check_buildable(leaf, statement.where, effective)


def check_tasks(effective: Effective, allowed: Sequence[str]) -> None:
  """Checks that the module of a task that a file names, which a run imports, is allowed."""
  macros = parse.macros_of(effective.values())
  for (_, _, parameter), statement in effective.items():
    if parameter not in ('task', 'sources'):
      continue
    value, source = parse.resolve(statement.parsed.value, macros)
    sources = [{'task': value}]
    if isinstance(value, dict):
      sources = value.values()
    for arguments in sources:
      has_task = isinstance(arguments, dict) and 'task' in arguments
      if not has_task:
        continue
      task, inner_source = parse.resolve(arguments['task'], macros)
      from_statement = inner_source or source or statement
      names_module = isinstance(task, str) and ':' in task
      if names_module and not from_statement.is_flag:
        module, _, _ = task.partition(':')
        parse.check_package(module, from_statement.where, allowed)


def check_buildable(leaf: parse.Reference, where: str, effective: Effective) -> None:
  """Checks that all parameters of a part that gets no arguments are bound."""
  part = find(leaf.name, where).wrapped
  # Subclasses that inherit a constructor use the bindings of their base class. A surrounding scope
  # may supply the value too, so a binding in any scope is enough.
  classes = (part,)
  if inspect.isclass(part):
    classes = inspect.getmro(part)
  part_constructor = constructor(part)
  selectors = set()
  for name, known in gin_config._REGISTRY.items():
    is_base = known.wrapped in classes
    if is_base and constructor(known.wrapped) is part_constructor:
      selectors.add(name)
  bound = {parameter for _, selector, parameter in effective if selector in selectors}
  for parameter in missing(part, bound):
    _, _, selector = leaf.name.rpartition('/')
    binding = f'{selector}.{parameter}'
    raise ConfigurationError(
      f'{where}: {leaf} cannot be built, since {binding} has no value. Add `{binding} = ...` to '
      'the gin file.'
    )


def find(name: str, where: str = '') -> gin_config.Configurable:
  """The configurable of 'scope/selector', which may omit leading modules; registers optax's.

  An unknown or ambiguous name raises a ConfigurationError, whose message begins with `where`.
  """
  registry = gin_config._REGISTRY
  _, _, selector = name.rpartition('/')
  matches = registry.matching_selectors(selector)
  if not matches:
    for complete, function in _OPTAX.items():
      module, _, short = complete.rpartition('.')
      if selector in (complete, short) and callable(function):
        gin.external_configurable(function, name=short, module=module)
        return registry[complete]
    known = set(_OPTAX)
    for complete, _ in registry.items():
      known.add(registry.minimal_selector(complete))
    raise ConfigurationError(
      f'{where}: there is no configurable {selector!r}.{did_you_mean(selector, known)} One of your '
      'own is known after `import PACKAGE.MODULE` in a gin file, with --gin_allow_import=PACKAGE.'
    )
  if len(matches) > 1:
    raise ConfigurationError(
      f'{where}: {selector!r} is ambiguous. Write one of {", ".join(sorted(matches))}.'
    )
  return registry[matches[0]]


def constructor(function: Callable) -> Callable:
  """A function, or the constructor of a class, without gin's wrappers."""
  # A metaclass, such as Haiku's, may hide the signature of the class itself.
  callee: Any = function
  if inspect.isclass(function):
    callee = gin_config._find_class_construction_fn(function)
  return inspect.unwrap(callee)


def parameters_of(function: Callable) -> dict[str, inspect.Parameter]:
  """The parameters that gin may bind, of a function or of the constructor of a class."""
  is_class = inspect.isclass(function)
  function = constructor(function)
  try:
    signature = inspect.signature(function, eval_str=True)
  except (NameError, TypeError, AttributeError):  # an annotation only for the type checker
    signature = inspect.signature(function)
  except ValueError:  # a builtin without a signature
    return {}
  parameters = list(signature.parameters.items())
  if is_class:
    del parameters[0]  # self, or the class of __new__
  return dict(parameters)


def missing(function: Callable, given: Collection[str]) -> list[str]:
  """The names of the parameters that have no default and are not `given`."""
  variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
  names = []
  for name, parameter in parameters_of(function).items():
    default = parameter.default
    is_required = default is inspect.Parameter.empty or default is gin.REQUIRED
    is_named = parameter.kind not in variadic
    if is_required and is_named and name not in given:
      names.append(name)
  return names
