"""A parser of gin files and flags into statements, without any effect on gin.

gin itself imports modules while it is still reading the file that names them. Here gin's parser
only reads: includes are expanded, imports are checked against the allow-list, and syntax errors are
explained. Nothing is imported, registered or bound.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import os
import pathlib
import shlex
import tokenize
from typing import Any, NamedTuple

from gin import config_parser

from valkyrie import foreign
from valkyrie.config import paths
from valkyrie.config.suggest import did_you_mean, explain, unclosed
from valkyrie.errors import ConfigurationError, is_there, reason_of, with_home

WRITTEN_BY = 'valkyrie'  # in config.json: identifies the folder of a run
RECORDED = '# All bindings of a run that were in force.\n'  # the first line of config.gin
FLAG = '--gin.'


@dataclasses.dataclass(frozen=True)
class Macro:
  """A value `%name`."""

  name: str

  def __repr__(self):
    return f'%{self.name}'


@dataclasses.dataclass(frozen=True)
class Reference:
  """A value `@scope/name`, or `@scope/name()` if evaluated."""

  name: str
  evaluated: bool

  def __repr__(self):
    if self.evaluated:
      return f'@{self.name}()'
    return f'@{self.name}'


class Statement(NamedTuple):
  """One statement of gin's parser; its value contains `Macro` and `Reference`."""

  where: str  # 'gin/tiny_cpu.gin:12', or the flag of the command line
  parsed: Any  # a BindingStatement (a macro's has no arg_name), BlockDeclaration or ImportStatement
  recorded: bool = False  # by a run, which leaves out overridden statements

  @property
  def is_flag(self) -> bool:
    return self.where.startswith(FLAG)

  @property
  def is_binding(self) -> bool:
    return isinstance(self.parsed, config_parser.BindingStatement)

  @property
  def is_import(self) -> bool:
    return isinstance(self.parsed, config_parser.ImportStatement)

  @property
  def is_macro(self) -> bool:
    return self.is_binding and not self.parsed.arg_name

  @property
  def name(self) -> str:
    """The bound name as written: `chunk_size` or `scope/S5.state_size`."""
    selector = self.parsed.selector
    if self.parsed.scope:
      selector = f'{self.parsed.scope}/{selector}'
    if self.is_macro:
      return selector
    return f'{selector}.{self.parsed.arg_name}'


def leaves(value: Any) -> Iterator[Any]:
  """All leaves of a tree of lists, tuples and dicts."""
  if isinstance(value, dict):
    value = [*value.keys(), *value.values()]
  if isinstance(value, list | tuple):
    for item in value:
      yield from leaves(item)
  else:
    yield value


def macros_of(statements: Iterable[Statement]) -> dict[str, Statement]:
  """The last statement that defines each macro, by name."""
  return {item.name: item for item in statements if item.is_macro}


def macros_in(value: Any, macros: Mapping[str, Statement]) -> set[str]:
  """The names of the macros in a value, and in the values of these macros."""
  names: set[str] = set()
  values = [value]
  while values:
    new_names = set()
    for leaf in leaves(values):
      if isinstance(leaf, Macro):
        new_names.add(leaf.name)
    new_names -= names
    names |= new_names
    values = []
    for name in new_names & macros.keys():
      values.append(macros[name].parsed.value)
  return names


def resolve(value: Any, macros: Mapping[str, Statement]) -> tuple[Any, Statement | None]:
  """The value of a macro, and the statement that defines it; any other value and None."""
  source = None
  seen: set[str] = set()
  while isinstance(value, Macro) and value.name in macros and value.name not in seen:
    seen.add(value.name)
    source = macros[value.name]
    value = source.parsed.value
  return value, source


class _Delegate(config_parser.ParserDelegate):
  configurable_reference: Any = Reference
  macro: Any = Macro


def parse(text: str) -> Iterator[Any]:
  """The statements of a gin text; raises a SyntaxError with the line number."""
  try:
    yield from config_parser.ConfigParser(text, _Delegate())
  except tokenize.TokenError as error:
    message, (line, _) = error.args
    raise SyntaxError(message, (None, line, None, '')) from None
  except (RecursionError, MemoryError):
    raise SyntaxError('too many brackets inside one another', (None, 1, None, '')) from None


def read_statements(
  files: Sequence[str],
  flags: Sequence[str] = (),
  search_paths: Sequence[str] = (),
  allowed_imports: Sequence[str] = (),
) -> list[Statement]:
  """The statements of `files` with their includes, then of `flags` ('--gin.NAME=VALUE'), in order.

  A ConfigurationError is raised if a file is missing, unreadable, includes itself, lies in the
  folder of a run, binds a name twice or above an include that binds it, imports a module that is
  not allowed, or has a syntax error.
  """
  statements = []
  allowed = importable(allowed_imports)
  for name in files:
    statements += _read_file(name, f'--gin_file={name}', search_paths, allowed)
  return statements + [_read_flag(flag) for flag in flags]


def importable(allowed_imports: Sequence[str]) -> tuple[str, ...]:
  """The packages that gin may import; a ConfigurationError if one is not a name."""
  for package in allowed_imports:
    names = package.split('.')
    if not all(part.isidentifier() for part in names):
      raise ConfigurationError(
        f'--gin_allow_import={package} is not the name of a package. Pass the name that '
        'Python imports, such as my_package.'
      )
  return ('valkyrie', *allowed_imports)


def _read_flag(flag: str) -> Statement:
  name, _, value = flag.removeprefix(FLAG).partition('=')
  problem = 'the name before = is neither a macro nor a configurable with its parameter'
  try:
    parsed = list(parse(f'{name} = {value}'))
    if len(parsed) == 1 and isinstance(parsed[0], config_parser.BindingStatement):
      return Statement(flag, parsed[0])
  except SyntaxError as error:
    problem = explain(error, value, lambda right: f'{FLAG}{name}={shlex.quote(right)}')
    opened = unclosed(value)
    if opened:
      _, bracket = opened
      problem = f'the bracket {bracket} is not closed'
  raise ConfigurationError(f'{flag}: {problem}')


def _read_file(
  name: str,
  where: str,
  search_paths: Sequence[str],
  allowed: Sequence[str],
  above: tuple = (),
) -> list[Statement]:
  path = _find(name, where, search_paths)
  if path.resolve() in [other.resolve() for other in above]:
    files = [str(other) for other in (*above, path)]
    chain = ' -> '.join(files)
    raise ConfigurationError(f'{path} includes itself: {chain}. Remove one of the includes.')
  text = _text(path)
  statements: list[Statement] = []
  first: dict[str, str] = {}
  recorded = text.startswith(RECORDED)
  try:
    for parsed in parse(text):
      place = f'{path}:{parsed.location.line_num}'
      statement = Statement(place, parsed, recorded)
      if isinstance(parsed, config_parser.IncludeStatement):
        where = f'{statement.where}: include'
        including = (*above, path)
        included = _read_file(parsed.filename, where, search_paths, allowed, including)
        for item in included:
          if item.is_binding and item.name in first:
            raise ConfigurationError(
              f'{first[item.name]}: {item.name} would be lost: {item.where}, which is included '
              'below it, binds it again. Move this line below the include.'
            )
        statements += included
        continue
      if statement.is_import:
        check_import(statement, allowed)
      if statement.is_binding:
        earlier = first.setdefault(statement.name, statement.where)
        if earlier != statement.where:
          raise ConfigurationError(
            f'{statement.where}: {statement.name} is already bound at {earlier}. Keep only one.'
          )
      statements.append(statement)
  except SyntaxError as error:
    lines = text.splitlines()
    number = min(error.lineno or 1, len(lines))
    line = lines[number - 1].strip()
    name, equals, value = line.partition('=')
    given = value if equals else None
    problem = explain(error, given, lambda right: f'{name.strip()} = {right}')
    opened = unclosed(text)
    if opened:
      number, bracket = opened
      line = lines[number - 1].strip()
      problem = f'the bracket {bracket} is not closed'
    quoted = ''
    if path.suffix == '.gin':  # any file may be included, also one with secrets
      quoted = f'\n  {line}'
    raise ConfigurationError(f'{path}:{number}: {problem}{quoted}') from None
  return statements


def _text(path: pathlib.Path) -> str:
  folders = set(path.absolute().parents)
  folders.update(path.resolve().parents)
  for folder in folders:
    is_parent = folder in (path.absolute().parent, path.resolve().parent)
    has_checkpoints = is_parent and (folder / 'checkpoints').is_dir()
    if has_checkpoints or _is_run(folder):
      raise ConfigurationError(
        f'{path}: {folder} is the folder of a run, from which no gin file is loaded, since gin '
        'files can run code. Leave --gin_file out: the run opens with its own configuration. For '
        'another run with it, read the file and copy it to another folder.'
      )
  try:
    content = foreign.content(path)
  except (OSError, ValueError) as error:
    raise ConfigurationError(
      f'{path} cannot be read: {reason_of(error)}. Name a gin file that this user may read.'
    ) from error
  try:
    return content.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = error.object.count(b'\n', 0, error.start) + 1
    byte = error.object[error.start]
    raise ConfigurationError(
      f'{path}:{line}: byte {byte:#04x} is not UTF-8. Save the file as UTF-8.'
    ) from None


def _is_run(folder: pathlib.Path) -> bool:
  try:
    config = foreign.json_object(foreign.content(folder / 'config.json'))
  except (OSError, ValueError):
    return False
  return config.get('written_by') == WRITTEN_BY


def _find(name: str, where: str, search_paths: Sequence[str]) -> pathlib.Path:
  # gin/x.gin is found below paths.GIN from any folder, which an installed wheel needs.
  current = pathlib.Path()
  named = [pathlib.Path(with_home(path)) for path in search_paths]
  package = paths.GIN.parent
  folders = [current, *named, package]
  file = with_home(name)
  candidates = [folder / file for folder in folders]
  # A pipe, a folder or a broken link is refused as such when it is read.
  for is_found in (os.path.isfile, is_there):
    for path in filter(is_found, candidates):
      return path
  named_folder = pathlib.Path(name).parent
  known = []
  for candidate in candidates:
    for path in candidate.parent.glob('*.gin'):
      known.append(str(named_folder / path.name))
  for path in paths.GIN.rglob('*.gin'):
    known.append(str(path.relative_to(package)))
  absolute_folders = [str(folder.absolute()) for folder in folders]
  searched_folders = dict.fromkeys(absolute_folders)
  searched = ', '.join(searched_folders)
  raise ConfigurationError(
    f'{where}: there is no file {name!r} below {searched}.{did_you_mean(name, known)}'
  )


def check_import(statement: Statement, allowed: Sequence[str]) -> None:
  """Raises a ConfigurationError if a statement imports a package that is not allowed."""
  module = statement.parsed.module
  if module.startswith('__gin__'):
    raise ConfigurationError(
      f'{statement.where}: dynamic registration is not allowed, since it makes every function '
      'configurable. Leave this line out, and decorate your functions with @gin.configurable.'
    )
  check_package(module, statement.where, allowed)


def check_package(module: str, where: str, allowed: Sequence[str]) -> None:
  """Raises a ConfigurationError if a module that a gin file names is not in an allowed package."""
  if not any(f'{module}.'.startswith(f'{package}.') for package in allowed):
    root, _, _ = module.partition('.')
    raise ConfigurationError(
      f'{where}: a gin file may import {", ".join(allowed)}, not {module}. If you trust '
      f'that package, pass --gin_allow_import={root}.'
    )
