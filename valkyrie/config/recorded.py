"""The configuration of a run, read back from its config.json: names and literals, no gin file."""

from collections.abc import Sequence
import json
import os
import pathlib

from valkyrie.config import parse
from valkyrie.config.check import Effective
from valkyrie.config.parse import FLAG, Statement, leaves
from valkyrie.config.paths import TOKENIZER
from valkyrie.config.redact import REDACTED
from valkyrie.errors import ConfigurationError


def read(model_dir: str | os.PathLike, allowed_imports: Sequence[str] = ()) -> list[Statement]:
  """The statements that a run recorded.

  Args:
    model_dir: the directory of the run.
    allowed_imports: packages that they may import besides valkyrie.

  Raises:
    ConfigurationError: there is no run, its file has other content, or it imports a package that
      is not allowed.
  """
  path = pathlib.Path(model_dir) / 'config.json'
  try:
    data = json.loads(path.read_bytes())
  except FileNotFoundError:
    raise ConfigurationError(
      f'{model_dir} is not the directory of a run: it has no config.json. Name one as --model_dir, '
      'or pass the --gin_file of a new run.'
    ) from None
  except (OSError, ValueError) as error:
    raise ConfigurationError(
      f'{path} cannot be read ({error}). Restore it, or pass the --gin_file of the run.'
    ) from error
  try:
    if data['written_by'] != parse.WRITTEN_BY:
      raise ValueError(f'it was written by {data["written_by"]!r}')
    imports = [_statement(path, line) for line in data['imports']]
    bound = {**data['statements'], **_kept_tokenizer(path.parent)}
    bindings = [_statement(path, f'{name} = {value}', name) for name, value in bound.items()]
  except (KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
    raise ConfigurationError(
      f'{path} is not the record of a configuration ({type(error).__name__}: {error}). Restore it, '
      'or pass the --gin_file of the run.'
    ) from error
  for statement in imports:
    parse.check_import(statement, parse.importable(allowed_imports))
  return imports + bindings


def _kept_tokenizer(model_dir: pathlib.Path) -> dict[str, str]:
  """The binding of the tokenizer that the run has kept, if it has one: it moves with the run."""
  for suffix in ('.json', '.model'):
    file = model_dir / f'{TOKENIZER}{suffix}'
    if file.is_file():
      return {'vocabulary': repr(str(file))}
  return {}


def _statement(path: pathlib.Path, line: str, name: str | None = None) -> Statement:
  """One import, or the binding of a name, and nothing else."""
  statements = [Statement(f'{path}: {name or line}', p, True) for p in parse.parse(line)]
  (statement,) = statements
  if not (statement.is_import if name is None else statement.is_binding):
    raise ValueError(f'{line!r} is another statement')
  if name is not None and statement.name != name:
    raise ValueError(f'{line!r} binds {statement.name}')
  return statement


def check_secrets(effective: Effective) -> None:
  """Raises a ConfigurationError if a binding in force is a secret that was not recorded."""
  for statement in effective.values():
    strings = [leaf for leaf in leaves(statement.parsed.value) if isinstance(leaf, str)]
    if statement.recorded and any(REDACTED in leaf for leaf in strings):
      raise ConfigurationError(
        f'{statement.where} was not recorded, since it is a secret. Pass '
        f'{FLAG}{statement.name}=VALUE.'
      )
