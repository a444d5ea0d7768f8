"""Where a run's token store lives, and building it on first use in a process of its own.

The process apart keeps TensorFlow (seconds and hundreds of megabytes) out of training.
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
  """The store's directory: <data_dir>/<task>-<split>-<vocabulary>-<where its documents are from>.

  A task without a `source` draws on what this Python brings along (python_stdlib: its library), so
  its store is named after the Python version; a source is the same for every Python.
  """
  if data_dir is None:
    cache = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    data_dir = f'{cache}/valkyrie'
  origin = (
    f'python{platform.python_version()}'
    if source is None
    else hashlib.sha256(source.encode()).hexdigest()[:8]
  )
  kind, _, digest = vocabulary.fingerprint.partition('-')
  words = [task, split, kind, digest[:8], origin]
  name = '-'.join(re.sub(r'[^\w.]+', '_', word) for word in words if word)
  return pathlib.Path(data_dir).expanduser().absolute() / name


def build_if_missing(
  path: pathlib.Path, task: str, split: str, vocabulary: str, source: str | None
):
  """Runs `python -m valkyrie.data.build_store` unless the store is finished.

  Its progress goes to this process's standard error.

  Raises:
    ValkyrieError: what ended the build, with its message and exit code.
  """
  if (path / STORE_FILE).exists():
    return
  command = [sys.executable, '-m', 'valkyrie.data.build_store', '--json']
  command += [f'--task={task}', f'--split={split}', f'--vocabulary={vocabulary}']
  command += [f'--output={path}'] + ([f'--source={source}'] if source is not None else [])
  # The child finds the packages, a user's own too, where this process found them.
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  }
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
  if done.returncode == 0:
    return
  lines = done.stdout.splitlines()
  try:
    report = json.loads(lines[-1])
    error_class = getattr(errors, report['error'])
  except (IndexError, ValueError, KeyError, AttributeError):
    raise errors.DataError(
      f'Building the token store {path} ended with exit code {done.returncode}; its last words '
      'are above. What it finished is kept: run again to go on, or run by itself:\n  '
      + ' '.join(command[:3] + command[4:])
    ) from None
  raise error_class(report['message'])
