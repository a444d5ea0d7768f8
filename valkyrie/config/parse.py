"""gin files and flags as a list of statements, before gin acts on any of them.

gin itself imports whatever a file asks for while it is still reading it. Here its own parser only
reads: includes are found and expanded, imports are held against the allow-list, and what cannot be
read is explained. Nothing is imported, registered or bound.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json
import operator
import pathlib
import re
import shlex
import tokenize
from typing import Any, NamedTuple

from gin import config_parser

from valkyrie.config import paths
from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

WRITTEN_BY = 'valkyrie'  # config.json says so, and its folder is known as a run by it
FLAG = '--gin.'


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%name` where a value stands."""

  name: str

  def __str__(self):
    return f'%{self.name}'


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name`, or `@scope/name()` where evaluated."""

  name: str
  evaluated: bool

  def __str__(self):
    return f'@{self.name}()' if self.evaluated else f'@{self.name}'


class Statement(NamedTuple):
  """One statement of gin's parser, whose values hold `Macro`s and `Reference`s.

  where: 'gin/tiny_cpu.gin:12', or the flag as it was typed.
  parsed: a BindingStatement (a macro's has no arg_name), BlockDeclaration or ImportStatement.
  """

  where: str
  parsed: Any

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
    """What is bound, as it was written: `chunk_size` or `scope/S5.state_size`."""
    selector = '/'.join(filter(None, (self.parsed.scope, self.parsed.selector)))
    return selector if self.is_macro else f'{selector}.{self.parsed.arg_name}'


class _Delegate(config_parser.ParserDelegate):
  def configurable_reference(self, scoped_configurable_name, evaluate):
    return Reference(scoped_configurable_name, evaluate)

  def macro(self, macro_name):
    return Macro(macro_name)


def parse(text: str) -> Iterator[Any]:
  """The statements of a gin text.

  Raises:
    SyntaxError: with the line number, whatever the tokenizer or the parser met.
  """
  try:
    yield from config_parser.ConfigParser(text, _Delegate())
  except tokenize.TokenError as error:
    message, (line, _) = error.args
    raise SyntaxError(message, (None, line, None, '')) from None


def read(
  files: Sequence[str],
  flags: Sequence[str] = (),
  search_paths: Sequence[str] = (),
  allowed_imports: Sequence[str] = (),
) -> list[Statement]:
  """Every statement of `files` with their includes, then of `flags` ('--gin.NAME=VALUE'), in order.

  Raises:
    ConfigurationError: a file is missing, unreadable, includes itself, lies in the folder of a run,
      binds something twice or imports what it may not; or something is not gin syntax.
  """
  for package in allowed_imports:
    if not all(part.isidentifier() for part in package.split('.')):
      raise ConfigurationError(
        f'--gin_allow_import={package}: expected the name of a package as `import` knows it'
      )
  statements = []
  for name in files:
    path = _find(name, search_paths, f'--gin_file={name}')
    statements += _read_file(path, search_paths, ('valkyrie', *allowed_imports), ())
  return statements + [_read_flag(flag) for flag in flags]


def _read_flag(flag: str) -> Statement:
  name, _, value = flag.removeprefix(FLAG).partition('=')
  problem = 'the name before = is not a macro, or a configurable and its parameter'
  try:
    parsed = list(parse(f'{name} = {value}'))
    if len(parsed) == 1 and isinstance(parsed[0], config_parser.BindingStatement):
      return Statement(flag, parsed[0])
  except SyntaxError as error:
    problem = _explain(error, value, lambda right: f'{FLAG}{name}={shlex.quote(right)}')
  raise ConfigurationError(f'{flag}: {problem}')


def _read_file(
  path: pathlib.Path, search_paths: Sequence[str], allowed: Sequence[str], above: tuple
) -> list[Statement]:
  if path.resolve() in [other.resolve() for other in above]:
    chain = ' -> '.join(str(other) for other in (*above, path))
    raise ConfigurationError(f'{path}: includes itself: {chain}')
  text = _text(path)
  statements: list[Statement] = []
  first: dict[str, str] = {}
  try:
    for parsed in parse(text):
      statement = Statement(f'{path}:{parsed.location.line_num}', parsed)
      if isinstance(parsed, config_parser.IncludeStatement):
        included = _find(parsed.filename, search_paths, f'{statement.where}: include')
        statements += _read_file(included, search_paths, allowed, (*above, path))
        continue
      if statement.is_import:
        _check_import(statement, allowed)
      if statement.is_binding:
        earlier = first.setdefault(statement.name, statement.where)
        if earlier != statement.where:
          raise ConfigurationError(
            f'{statement.where}: {statement.name} is bound already at {earlier}: keep one of them'
          )
      statements.append(statement)
  except SyntaxError as error:
    lines = text.splitlines()
    number = min(error.lineno or 1, len(lines))
    line = lines[number - 1].strip()
    name, equals, value = line.partition('=')
    problem = _explain(error, value if equals else None, lambda right: f'{name.strip()} = {right}')
    raise ConfigurationError(f'{path}:{number}: {problem}\n  {line}') from None
  return statements


def _text(path: pathlib.Path) -> str:
  for folder in {*path.absolute().parents, *path.resolve().parents}:
    near = folder in (path.absolute().parent, path.resolve().parent)
    if (near and (folder / 'checkpoints').is_dir()) or _is_run(folder):
      raise ConfigurationError(
        f'{path}: {folder} is the folder of a run, and gin is never loaded from there, since gin '
        'files can run code: give the gin file that the run was started with'
      )
  try:
    data = path.read_bytes()
  except OSError as error:
    raise ConfigurationError(f'{path}: cannot be read: {error.strerror}') from error
  try:
    return data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    line = data.count(b'\n', 0, error.start) + 1
    raise ConfigurationError(
      f'{path}:{line}: byte {data[error.start]:#04x} is not UTF-8: save the file as UTF-8'
    ) from None


def _is_run(folder: pathlib.Path) -> bool:
  try:
    config = json.loads((folder / 'config.json').read_bytes())
  except (OSError, ValueError):
    return False
  return isinstance(config, dict) and config.get('written_by') == WRITTEN_BY


def _find(name: str, search_paths: Sequence[str], where: str) -> pathlib.Path:
  # gin/x.gin is found below paths.GIN from any folder, as an installed wheel needs.
  folders = [pathlib.Path(), *map(pathlib.Path, search_paths), paths.GIN.parent]
  candidates = [folder / pathlib.Path(name).expanduser() for folder in folders]
  for path in candidates:
    if path.is_file():
      return path
  wanted = pathlib.Path(name)
  known = [
    str(wanted.parent / path.name) for other in candidates for path in other.parent.glob('*.gin')
  ]
  known += [str(path.relative_to(paths.GIN.parent)) for path in paths.GIN.rglob('*.gin')]
  looked = ', '.join(dict.fromkeys(str(folder.absolute()) for folder in folders))
  raise ConfigurationError(
    f'{where}: there is no file {name!r}; looked below {looked}.{did_you_mean(name, known)}'
  )


def _check_import(statement: Statement, allowed: Sequence[str]) -> None:
  module = statement.parsed.module
  if module.startswith('__gin__'):
    raise ConfigurationError(
      f'{statement.where}: dynamic registration would make any function configurable, and is '
      'refused: decorate what you need with @gin.configurable, and leave this line out'
    )
  if not any(f'{module}.'.startswith(f'{package}.') for package in allowed):
    raise ConfigurationError(
      f'{statement.where}: a gin file may import {", ".join(allowed)}, not {module}: if you trust '
      f'that package, pass --gin_allow_import={module.split(".")[0]}'
    )


def _explain(error: SyntaxError, value: str | None, written: Callable[[str], str]) -> str:
  """What is wrong with the text after '=', and `written(right)` where the right one is known."""
  if value is not None:
    value = value.split('#')[0].strip()
    right = _CONSTANTS.get(value.lower()) or _arithmetic(value)
    if not value:
      return 'a value is missing'
    if right:
      return f'{value} is not gin syntax: write {written(right)}'
    if re.fullmatch(r'[\w./~:+ -]+', value) and re.search(r'[^\W\d]|/', value):
      return f'strings need quotes: {written(json.dumps(value, ensure_ascii=False))}'
    if re.search(r'\d\s*[-+*/<]+\s*\d', value):
      return 'gin has no expressions: write the resulting number'
  if token := re.search(r"Failed to parse token '(.*)'", error.msg, re.DOTALL):
    return f'{token[1]} is not a value (strings need quotes, references @ and macros %)'
  return f'not gin syntax: {error.msg}'


_CONSTANTS = {'true': 'True', 'false': 'False', 'none': 'None', 'null': 'None'}
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Pow: operator.pow,
  ast.LShift: operator.lshift,
}


def _arithmetic(value: str) -> str:
  """'8192' for '8*1024': the number to write in an expression's place; '' for anything else."""

  def number(node) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
      return node.value
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
      raise ValueError
    left, right = number(node.left), number(node.right)
    grows = isinstance(node.op, ast.Pow | ast.LShift)
    if max(abs(left), abs(right)) > 2**64 or (grows and abs(right) > 64):
      raise ValueError
    return _OPERATORS[type(node.op)](left, right)

  try:
    tree = ast.parse(value, mode='eval').body
    return repr(number(tree)) if isinstance(tree, ast.BinOp) else ''
  except (SyntaxError, ValueError, ArithmeticError, TypeError):
    return ''
