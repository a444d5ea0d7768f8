"""The configuration as data: its files in the directory of a run, written and read back.

    model_dir/config.gin             the parsed statements; a copy elsewhere starts another run
    model_dir/config.json            the same as data: literals, and values with macros resolved
    model_dir/operative_config.gin   the constructed configurables, with their defaults

One process writes all three, without secrets. Only config.json is read: it holds names and
literals, no gin file. StorageError is raised if the folder cannot be written.
"""

from collections.abc import Sequence
import itertools
import json
import os
import pathlib
from typing import Any

import gin

from valkyrie import __version__, foreign
from valkyrie.config import parse
from valkyrie.config.parse import Statement
from valkyrie.config.paths import TOKENIZER
from valkyrie.config.redact import redact
from valkyrie.errors import ConfigurationError, storage_errors


def bindings() -> dict[str, Any]:
  """{name: value} of all bindings as JSON: macros are resolved, and references are '@name'."""
  return _as_data(redact(gin.config_str()))['bindings']


def write_configuration(model_dir: str | os.PathLike) -> None:
  """Writes config.gin and config.json; keeps other earlier versions as NAME.1, NAME.2, ..."""
  text = redact(gin.config_str())
  _write(pathlib.Path(model_dir) / 'config.gin', parse.RECORDED + '\n' + text)
  data = json.dumps(_as_data(text), indent=2, ensure_ascii=False)
  _write(pathlib.Path(model_dir) / 'config.json', data + '\n')


def write_operative_configuration(model_dir: str | os.PathLike) -> None:
  """Writes operative_config.gin, with the configurables that have been constructed so far."""
  _write(pathlib.Path(model_dir) / 'operative_config.gin', redact(gin.operative_config_str()))


def read_configuration(
  model_dir: str | os.PathLike, allowed_imports: Sequence[str] = ()
) -> list[Statement]:
  """The statements in the config.json of a run.

  A ConfigurationError is raised if the run or its file is missing, the file has other content, or
  it imports a package that is neither valkyrie nor in `allowed_imports`.
  """
  path = pathlib.Path(model_dir) / 'config.json'
  try:
    data = foreign.json_object(foreign.content(path))
    if data['written_by'] != parse.WRITTEN_BY:
      raise ValueError(f'it was written by {data["written_by"]!r}')
    imports = [_statement(path, line) for line in data['imports']]
    bound = {**data['statements'], **_kept_tokenizer(path.parent)}
    bindings = [_statement(path, f'{name} = {value}', name) for name, value in bound.items()]
  except FileNotFoundError:
    raise ConfigurationError(
      f'{model_dir} is not the directory of a run: it has no config.json. Pass one as --model_dir, '
      'or pass the --gin_file of a new run.'
    ) from None
  except (OSError, KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
    raise ConfigurationError(
      f'{path} cannot be read, or is not the record of a configuration ({type(error).__name__}: '
      f'{error}). Restore it, or pass the --gin_file of the run.'
    ) from error
  for statement in imports:
    parse.check_import(statement, parse.importable(allowed_imports))
  return imports + bindings


def _as_data(text: str) -> dict[str, Any]:
  """The imports, macros and bindings of a gin text, as config.json holds them."""
  statements = [Statement('config.gin', parsed) for parsed in parse.parse(text)]
  macros, bound = parse.macros_of(statements), [item for item in statements if item.is_binding]

  def plain(value):
    value, _ = parse.resolve(value, macros)
    if isinstance(value, dict):
      return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)

  return {
    'written_by': parse.WRITTEN_BY,
    'version': __version__,
    'imports': [item.parsed.format() for item in statements if item.is_import],
    'macros': {name: plain(item.parsed.value) for name, item in macros.items()},
    'statements': {item.name: repr(item.parsed.value) for item in bound},
    'bindings': {item.name: plain(item.parsed.value) for item in bound if not item.is_macro},
  }


def _write(path: pathlib.Path, text: str) -> None:
  """Replaces a file atomically, and keeps an earlier version under the next free number."""
  temporary = path.with_name(f'.{path.name}.new')
  with storage_errors(f'{path} cannot be written', 'Make room, or pass another --model_dir.'):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
      if (old := path.read_bytes()) == text.encode():
        return
      versions = (path.with_name(f'{path.name}.{number}') for number in itertools.count(1))
      next(version for version in versions if not version.exists()).write_bytes(old)
    temporary.write_bytes(text.encode())
    temporary.replace(path)


def _kept_tokenizer(model_dir: pathlib.Path) -> dict[str, str]:
  """The binding of the run's own copy of its tokenizer, if there is one: it moves with the run."""
  files = (model_dir / f'{TOKENIZER}{suffix}' for suffix in ('.json', '.model'))
  return next(({'vocabulary': repr(str(file))} for file in files if file.is_file()), {})


def _statement(path: pathlib.Path, line: str, name: str | None = None) -> Statement:
  """A line as exactly one import, or as exactly one binding of `name`."""
  (statement,) = (Statement(f'{path}: {name or line}', p, True) for p in parse.parse(line))
  if not (statement.is_import if name is None else statement.is_binding):
    raise ValueError(f'{line!r} is another statement')
  if name is not None and statement.name != name:
    raise ValueError(f'{line!r} binds {statement.name}')
  return statement
