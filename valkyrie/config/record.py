"""The configuration as data: the texts of its files in the directory of a run, and back.

    model_dir/config.gin             the parsed statements; a copy elsewhere starts another run
    model_dir/config.json            the same as data: literals, and values with macros resolved
    model_dir/operative_config.gin   the constructed configurables, with their defaults

`run.configuration_files` writes all three, without secrets. Only config.json is read: it holds
names and literals, no gin file. It has each value twice, as the statement that is read and as the
resolved binding, and a digest of all of it.
"""

from collections.abc import Collection, Mapping, Sequence
import hashlib
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
from valkyrie.errors import ConfigurationError

_DIGEST = 'sha256'  # the field of config.json with the digest of the others


def bindings() -> dict[str, Any]:
  """{name: value} of all bindings as JSON: macros are resolved, and references are '@name'."""
  text = redact(gin.config_str())
  return _as_data(text)['bindings']


def configuration_texts() -> dict[str, str]:
  """{name: text} of config.gin and config.json."""
  text = redact(gin.config_str())
  fields = sealed(_as_data(text))
  data = json.dumps(fields, indent=2, ensure_ascii=False)
  statements = f'{parse.RECORDED}\n{text}'
  return {'config.gin': statements, 'config.json': f'{data}\n'}


def operative_configuration_text() -> str:
  """The text of operative_config.gin, with the configurables that have been constructed so far."""
  return redact(gin.operative_config_str())


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
  """The data of config.json with their digest, which no longer fits after any change."""
  fields = {name: value for name, value in data.items() if name != _DIGEST}
  text = json.dumps(fields, sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()
  return {**fields, _DIGEST: digest}


def read_configuration(
  model_dir: str | os.PathLike,
  allowed_imports: Sequence[str] = (),
  overridden: Collection[str] = (),
) -> list[Statement]:
  """The statements in the config.json of a run.

  A ConfigurationError is raised if the run or its file is missing, the file has other content or
  was changed since it was written, except for `overridden` values, or it imports a package that is
  neither valkyrie nor in `allowed_imports`.
  """
  path = pathlib.Path(model_dir) / 'config.json'
  try:
    data = foreign.json_object(foreign.content(path))
    _check_is_no_folder_of_weights(path.parent, data)
    if data['written_by'] != parse.WRITTEN_BY:
      raise ValueError(f'it was written by {data["written_by"]!r}')
    imports = [_statement(path, line) for line in data['imports']]
    values = dict(data['statements'].items())
    values |= _kept_tokenizer(path.parent)
    bindings = []
    for name, value in values.items():
      binding = _statement(path, f'{name} = {value}', name)
      bindings.append(binding)
    _check_unchanged(path, data, overridden)
  except FileNotFoundError:
    raise ConfigurationError(
      f'{model_dir} is not the directory of a run: it has no config.json. Pass one as --model_dir, '
      'or pass the --gin_file of a new run.'
    ) from None
  except (OSError, KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
    raise ConfigurationError(
      f'{path} cannot be read, or is not the record of a configuration ({type(error).__name__}: '
      f'{foreign.reason(error)}). Restore it, or pass the --gin_file of the run.'
    ) from error
  allowed = parse.importable(allowed_imports)
  for statement in imports:
    parse.check_import(statement, allowed)
  return imports + bindings


def _check_is_no_folder_of_weights(folder: pathlib.Path, data: Mapping[str, Any]) -> None:
  """Raises a ConfigurationError for an export, or a folder of another program."""
  if 'format' in data or 'model_type' in data:
    raise ConfigurationError(
      f'{folder} holds weights, and is not the directory of a run. Begin a run with them: '
      f'--gin.train.initial_weights=\'"{folder}"\' with --gin.train_steps=0 saves them as step 0 '
      'of another --model_dir, for every run mode (docs/finetune.md).'
    )


def _as_data(text: str) -> dict[str, Any]:
  """The imports, macros and bindings of a gin text, as config.json holds them."""
  statements = [Statement('config.gin', parsed) for parsed in parse.parse(text)]
  macros = parse.macros_of(statements)
  bound = [item for item in statements if item.is_binding]

  def plain(value):
    value, _ = parse.resolve(value, macros)
    if isinstance(value, dict):
      return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
      return [plain(item) for item in value]
    if isinstance(value, int | float | str | None):
      return value
    return str(value)

  imports = [item.parsed.format() for item in statements if item.is_import]
  plain_macros = {}
  for name, item in macros.items():
    plain_macros[name] = plain(item.parsed.value)
  texts = {}
  plain_bindings = {}
  for item in bound:
    texts[item.name] = repr(item.parsed.value)
    if not item.is_macro:
      plain_bindings[item.name] = plain(item.parsed.value)
  return {
    'written_by': parse.WRITTEN_BY,
    'version': __version__,
    'imports': imports,
    'macros': plain_macros,
    'statements': texts,
    'bindings': plain_bindings,
  }


def _check_unchanged(
  path: pathlib.Path,
  data: Mapping[str, Any],
  overridden: Collection[str],
) -> None:
  """Raises a ConfigurationError if config.json is not as it was written.

  A value is named that differs between the statements and the bindings, unless it is `overridden`.
  Versions before 0.3 wrote no digest.
  """
  digest = sealed(data)[_DIGEST]
  if data.get(_DIGEST) == digest:
    return
  lines = [f'{name} = {value}' for name, value in data['statements'].items()]
  read = _as_data('\n'.join(lines))['bindings']
  written = data['bindings']
  names = sorted(read.keys() | written.keys())
  differing = []
  for name in names:
    if _text(read, name) != _text(written, name):
      differing.append(name)
  wrong = [name for name in differing if name not in overridden]
  if wrong:
    name = wrong[0]
    advice = 'Restore the file from a copy'
    is_in_both = name in read and name in written
    if is_in_both:  # otherwise the name itself was changed
      advice += f', or pass the value that is right: --gin.{name}=VALUE'
    raise ConfigurationError(
      f'{path} was changed since the run wrote it: {name} is {_text(read, name):.100} in its '
      f'"statements", and {_text(written, name):.100} in its "bindings". {advice}.'
    )
  if _DIGEST in data and not differing:
    raise ConfigurationError(
      f'{path} was changed since the run wrote it: its content has another SHA-256 than '
      f'"{_DIGEST}" says. Restore the file from a copy. If you have changed it yourself, delete '
      f'its field "{_DIGEST}".'
    )


def _text(values: Mapping[str, Any], name: str) -> str:
  """A value as JSON, in which a NaN equals itself."""
  if name not in values:
    return 'missing'
  return json.dumps(values[name], sort_keys=True)


def _kept_tokenizer(model_dir: pathlib.Path) -> dict[str, str]:
  """The binding of the run's copy of its tokenizer, if there is one: it moves with the run."""
  for suffix in ('.json', '.model'):
    file = model_dir / f'{TOKENIZER}{suffix}'
    if file.is_file():
      return {'vocabulary': repr(str(file))}
  return {}


def _statement(path: pathlib.Path, line: str, name: str | None = None) -> Statement:
  """A line as exactly one import, or as exactly one binding of `name`."""
  (parsed,) = parse.parse(line)
  place = f'{path}: {name or line}'
  statement = Statement(place, parsed, recorded=True)
  is_right = statement.is_binding
  if name is None:
    is_right = statement.is_import
  if not is_right:
    raise ValueError(f'{line!r} is another statement')
  if name is not None and statement.name != name:
    raise ValueError(f'{line!r} binds {statement.name}')
  return statement
