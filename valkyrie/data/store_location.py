"""Location of a run's token store, and its build on first use, in a process of its own."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import hashlib
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import threading
import types
from typing import Any

from valkyrie import errors
from valkyrie.config import paths, redact
from valkyrie.data.token_store import STORE_FILE, TokenStore, read_information
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.distributed import heartbeat

Options = Mapping[str, str]
NO_OPTIONS: Options = types.MappingProxyType({})
_COMMAND = ('python', '-m', 'valkyrie.data.build_store')


def store_name(
  task: str,
  split: str,
  vocabulary: Vocabulary,
  source: str | None,
  options: Options = NO_OPTIONS,
  unique: bool = False,
) -> str:
  """The name of a store's directory: <task>-<split>-<vocabulary>-<origin of the documents>.

  The documents of a task without a `source` may depend on the Python version (python_stdlib), so
  the version is their origin; otherwise the origin is a hash of the source and the options.
  """
  origin = f'python{platform.python_version()}'
  if source is not None:
    named = f'{source} {json.dumps(options, sort_keys=True)}' if options else source
    origin = hashlib.sha256(named.encode()).hexdigest()[:8]
  kind, _, digest = vocabulary.fingerprint.partition('-')
  words = [task, split, kind, digest[:8], origin, 'unique' if unique else '']
  return '-'.join(re.sub(r'[^\w.]+', '_', word) for word in words if word)


def store_path(
  task: str,
  split: str,
  vocabulary: Vocabulary,
  source: str | None,
  data_dir: str | None,
  options: Options = NO_OPTIONS,
  unique: bool = False,
) -> pathlib.Path:
  """The store's directory below `data_dir`; ConfigurationError if that is an address."""
  if data_dir is not None and paths.is_address(data_dir):
    raise errors.ConfigurationError(
      f'A store cannot be built at {redact.in_value(data_dir)}. Build it with --output=FOLDER, and '
      'upload that.'
    )
  root = paths.cache() if data_dir is None else pathlib.Path(data_dir)
  name = store_name(task, split, vocabulary, source, options, unique)
  return root.expanduser().absolute() / name


def located(source: str | None) -> str | None:
  """The absolute path of a source: a relative one names other files in another folder."""
  if source is None or paths.is_address(source):
    return source
  return os.path.abspath(os.path.expanduser(source))


def open_store(
  task: str,
  split: str,
  vocabulary: str,
  codec: Vocabulary,
  source: str | None = None,
  data_dir: str | None = None,
  options: Options = NO_OPTIONS,
  unique: bool = False,
) -> TokenStore:
  """Opens the store of these documents, and builds it first if it is missing.

  Args:
    task, split, source, data_dir, unique: see `data.feed.TaskFeed`.
    vocabulary, codec: the specification of the vocabulary, and its codec from `vocabularies.load`.
    options: options of the task's source.

  Raises:
    ConfigurationError, DataError: as in the builder and `TokenStore.open`; or the files of the
      source have changed since the store was built.
  """
  source = located(source)
  named = source, *options.values()
  recipe = [f'--task={task}', f'--split={split}', f'--vocabulary={vocabulary}']
  recipe += [f'--source={source}'] if source is not None else []
  recipe += [f'--option={name}={value}' for name, value in options.items()]
  recipe += ['--unique'] if unique else []
  if data_dir is not None and paths.is_address(data_dir):
    from valkyrie.data import remote_store  # noqa: PLC0415  (pyarrow, only for buckets)

    name = store_name(task, split, codec, source, options, unique)
    make = _uploading([*recipe, f'--output={name}'], data_dir, name)
    path = remote_store.copied(data_dir, name, f'To build it, {make}')
  else:
    path = store_path(task, split, codec, source, data_dir, options, unique)
    recipe.append(f'--output={path}')
    if not (path / STORE_FILE).exists():
      builder.order(recipe, f'Building the token store {path}')
      _check_other_splits(path, named)
      return TokenStore.open(path, codec)
    make = f'run:\n  {_command([*recipe, "--rebuild"])}'
  store = TokenStore.open(path, codec)
  if store.information.get('origin') is not None or ':' in task:
    from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

    provenance.check(path, store.information, make, named)
  return store


def mixture(name: str) -> dict[str, float]:
  """{task, as `TaskFeed.task` names it: rate} of a seqio Mixture 'package.module:NAME'.

  Raises:
    ConfigurationError: there is no such mixture.
  """
  return builder.order([f'--mixture={name}'], f'Reading the seqio mixture {name}')


def _check_other_splits(path: pathlib.Path, named: Iterable[str | None]) -> None:
  """Raises a DataError if another split beside a new store was built from other files."""
  from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

  task, _, *origin = path.name.split('-')
  for other in sorted(path.parent.glob('-'.join([task, '*', *origin]))):
    if other != path and (other / STORE_FILE).exists():
      information = read_information(other)
      if information.get('origin') is not None:
        provenance.check(other, information, 'delete that folder and run again.', named)


def _uploading(recipe: Sequence[str], data_dir: str, name: str) -> str:
  """How to build a store and upload it to an address."""
  place = redact.in_value(data_dir.partition('?')[0].rstrip('/'))
  copy = f'gcloud storage cp --recursive {name} {place}/'
  if place.startswith('s3://'):
    copy = f'aws s3 cp --recursive {name} {place}/{name}'
  return f'run this, and upload the folder:\n  {_command(recipe)}\n  {copy}'


class _Builder:
  """A process that builds token stores, and keeps TensorFlow out of this one.

  The first order starts it. It answers one order after the other, so that what a task loads is
  loaded once. It ends with this process, however this one ends: its standard input is a pipe, which
  the system closes. It sends the heartbeats of this process, and logs its progress to standard
  error.
  """

  def __init__(self):
    self._process: subprocess.Popen[str] | None = None
    self._lock, self._users = threading.RLock(), 0

  def __enter__(self) -> None:
    with self._lock:
      self._users += 1

  def __exit__(self, *_: object) -> None:
    with self._lock:
      self._users -= 1
      if not self._users and self._process is not None:
        self._process.kill()
        self._process.communicate()
        self._process = None

  def order(self, arguments: Sequence[str], task: str) -> Any:
    """Runs `python -m valkyrie.data.build_store` with these arguments.

    Returns:
      store.json, or the rates of a mixture.

    Raises:
      ValkyrieError: the error of the command, with its class and message.
      DataError: the process has died; the message begins with `task`, such as 'Building ...'.
    """
    with self, self._lock:
      process = self._process = self._process or _started()
      assert process.stdin is not None and process.stdout is not None
      with contextlib.suppress(BrokenPipeError):
        print(json.dumps(list(arguments)), file=process.stdin, flush=True)
      if not (answer := process.stdout.readline()):
        self._process = None
        raise errors.DataError(
          f'{task} ended with exit code {process.wait()}; its output is above. Finished shards are '
          f'kept. Run again to continue, or run this by itself:\n  {_command(arguments)}'
        )
    answered = json.loads(answer)
    if 'error' in answered:
      raise getattr(errors, answered['error'])(answered['message'])
    return answered['done']


builder = _Builder()  # inside `with builder:`, its process stays for the next order


def _command(arguments: Sequence[str]) -> str:
  return shlex.join([*_COMMAND, *arguments])


def _started() -> subprocess.Popen[str]:
  # The process searches packages, such as a user's own, where this one does.
  path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
  return subprocess.Popen(
    [sys.executable, *_COMMAND[1:], '--orders'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path},
    pass_fds=heartbeat.inherited(),
  )
