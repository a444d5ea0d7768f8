"""Location of a run's token store, and its build on first use in a separate process.

The separate process keeps TensorFlow (seconds and hundreds of megabytes) out of training.
"""

from collections.abc import Mapping
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import types

from valkyrie import errors
from valkyrie.data import token_store
from valkyrie.data.token_store import STORE_FILE
from valkyrie.data.vocabularies import Vocabulary

Options = Mapping[str, str]
NO_OPTIONS: Options = types.MappingProxyType({})


def store_path(
  task: str,
  split: str,
  vocabulary: Vocabulary,
  source: str | None,
  data_dir: str | None,
  options: Options = NO_OPTIONS,
) -> pathlib.Path:
  """The store's directory: <data_dir>/<task>-<split>-<vocabulary>-<origin of the documents>.

  The documents of a task without a `source` may depend on the Python version (python_stdlib), so
  the version is their origin; otherwise the origin is a hash of the source and the options.
  """
  if data_dir is None:
    data_dir = os.environ.get('VALKYRIE_CACHE')
  if data_dir is None:
    cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    data_dir = f'{cache}/valkyrie'
  origin = f'python{platform.python_version()}'
  if source is not None:
    named = f'{source} {json.dumps(options, sort_keys=True)}' if options else source
    origin = hashlib.sha256(named.encode()).hexdigest()[:8]
  kind, _, digest = vocabulary.fingerprint.partition('-')
  words = [task, split, kind, digest[:8], origin]
  name = '-'.join(re.sub(r'[^\w.]+', '_', word) for word in words if word)
  return pathlib.Path(data_dir).expanduser().absolute() / name


def located(source: str | None) -> str | None:
  """A source in full: a relative path names other files in another folder."""
  if source is None or '://' in source:
    return source
  return os.path.abspath(os.path.expanduser(source))


def build_if_missing(
  path: pathlib.Path,
  task: str,
  split: str,
  vocabulary: str,
  source: str | None,
  options: Options = NO_OPTIONS,
):
  """Runs `python -m valkyrie.data.build_store` unless the store is finished.

  A finished one must have the source that is there now. The builder's progress goes to standard
  error. Its ValkyrieError, with class and message, is raised here.
  It ends with this process, however this one ends: its standard input is a pipe that nobody writes
  to, and that the system closes.
  """
  recipe = [f'--task={task}', f'--split={split}', f'--vocabulary={vocabulary}', f'--output={path}']
  recipe += [f'--source={source}'] if source is not None else []
  recipe += [f'--option={name}={value}' for name, value in options.items()]
  if (path / STORE_FILE).exists():
    command = ['python', '-m', 'valkyrie.data.build_store', *recipe, '--rebuild']
    rebuild = f'run:\n  {shlex.join(command)}'
    information = token_store.read_information(path)
    if information.get('origin') is not None:
      from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

      provenance.check(path, information, rebuild)
    return
  command = [sys.executable, '-m', 'valkyrie.data.build_store', '--json', '--while-open', *recipe]
  # The child process searches packages, such as a user's own, where this process does.
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  }
  reader, writer = os.pipe()
  try:
    done = subprocess.run(
      command, stdin=reader, stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
  finally:
    os.close(reader)
    os.close(writer)
  if done.returncode == 0:
    return
  try:
    report = json.loads(done.stdout.splitlines()[-1])
    error_class = getattr(errors, report['error'])
  except (IndexError, ValueError, KeyError, AttributeError):
    raise errors.DataError(
      f'Building the token store {path} ended with exit code {done.returncode}; its output is '
      'above. Finished shards are kept. Run again to continue, or build the store by itself:\n  '
      + ' '.join(command[:3] + command[5:])
    ) from None
  raise error_class(report['message'])
