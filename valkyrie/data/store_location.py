"""Location of a run's token store, and its build on first use in a separate process.

The separate process keeps TensorFlow (seconds and hundreds of megabytes) out of training.
"""

import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

from valkyrie import errors
from valkyrie.data.token_store import STORE_FILE
from valkyrie.data.vocabularies import Vocabulary


def store_path(
  task: str, split: str, vocabulary: Vocabulary, source: str | None, data_dir: str | None
) -> pathlib.Path:
  """The store's directory: <data_dir>/<task>-<split>-<vocabulary>-<origin of the documents>.

  The documents of a task without a `source` may depend on the Python version (python_stdlib), so
  the version is their origin; otherwise the origin is a hash of the source.
  """
  if data_dir is None:
    cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    data_dir = f'{cache}/valkyrie'
  origin = f'python{platform.python_version()}'
  if source is not None:
    origin = hashlib.sha256(source.encode()).hexdigest()[:8]
  kind, _, digest = vocabulary.fingerprint.partition('-')
  words = [task, split, kind, digest[:8], origin]
  name = '-'.join(re.sub(r'[^\w.]+', '_', word) for word in words if word)
  return pathlib.Path(data_dir).expanduser().absolute() / name


def build_if_missing(
  path: pathlib.Path, task: str, split: str, vocabulary: str, source: str | None
):
  """Runs `python -m valkyrie.data.build_store` unless the store is finished.

  Its progress goes to standard error. Its ValkyrieError, with class and message, is raised here.
  It ends with this process, however this one ends: its standard input is a pipe that nobody writes
  to, and that the system closes.
  """
  if (path / STORE_FILE).exists():
    return
  command = [sys.executable, '-m', 'valkyrie.data.build_store', '--json', '--while-open']
  command += [f'--task={task}', f'--split={split}', f'--vocabulary={vocabulary}']
  command += [f'--output={path}'] + ([f'--source={source}'] if source is not None else [])
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
