"""The module of a task, whose import registers the task."""

from collections.abc import Iterable
import hashlib
import importlib
import importlib.util
import os
import pathlib
import pkgutil
import sys
import types

from valkyrie.config.suggest import did_you_mean
from valkyrie.errors import ConfigurationError

OURS = 'valkyrie.tasks'


def of_task(task: str) -> tuple[str, str]:
  """(the module, the name there) of a task: NAME of ours, or 'package.module:NAME'.

  Raises:
    ConfigurationError: there is no such module.
  """
  module, colon, name = task.partition(':')
  if not colon:
    name = task
    module = f'{OURS}.{task.replace("/", ".").split(".")[0]}'
  try:
    found = importlib.util.find_spec(module) is not None
  except (ImportError, ValueError):
    found = False
  if not found:
    tasks = importlib.import_module(OURS)
    known = sorted(m.name for m in pkgutil.iter_modules(tasks.__path__))
    raise ConfigurationError(
      f'There is no module {module} to register the task {task!r}.{did_you_mean(task, known)} '
      f"Use one of {', '.join(known)}, or 'package.module:NAME' for a task of your own."
    )
  return module, name


def load(module: str) -> types.ModuleType:
  """Imports a module, and says so where it may take seconds.

  Its standard error is discarded: TensorFlow reports a missing GPU there at every log level.
  """
  if module in sys.modules:
    return sys.modules[module]
  if not module.startswith('valkyrie.'):
    print(f'loading {module}', file=sys.stderr, flush=True)
  sys.stderr.flush()
  kept = os.dup(2)
  try:
    with open(os.devnull, 'w') as null:
      os.dup2(null.fileno(), 2)
    return importlib.import_module(module)
  finally:
    os.dup2(kept, 2)
    os.close(kept)


def code_hash(modules: Iterable[str]) -> str:
  """SHA-256 of the code that makes tokens: of these loaded modules, and of all in this folder.

  Modules of the standard library are left out.
  """
  files = [
    getattr(sys.modules.get(name), '__file__', None)
    for name in sorted({*modules})
    if name.split('.')[0] not in sys.stdlib_module_names
  ]
  digest = hashlib.sha256()
  for file in [*filter(None, files), *sorted(pathlib.Path(__file__).parent.glob('*.py'))]:
    digest.update(hashlib.sha256(pathlib.Path(file).read_bytes()).digest())
  return digest.hexdigest()
