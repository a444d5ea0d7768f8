"""Location of a run's token store, and its build on first use, in a process of its own."""

from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import threading
from typing import Any

from valkyrie import errors
from valkyrie.config import paths, redact
from valkyrie.data.token_store import STORE_FILE, Selection, TokenStore, read_information
from valkyrie.distributed import heartbeat

_COMMAND = ('python', '-m', 'valkyrie.data.build_store')


def store_path(selection: Selection, data_dir: str | None) -> pathlib.Path:
  """The store's directory below `data_dir`; ConfigurationError if that is an address."""
  if data_dir is not None and paths.is_address(data_dir):
    raise errors.ConfigurationError(
      f'A store cannot be built at {redact.in_value(data_dir)}. Build it with --output=FOLDER, and '
      'upload that.'
    )
  root = paths.cache() if data_dir is None else pathlib.Path(data_dir)
  return root.expanduser().absolute() / selection.name


def open_store(selection: Selection, data_dir: str | None = None) -> TokenStore:
  """Opens the store of these documents, and builds it first if it is missing.

  Raises:
    ConfigurationError, DataError: as in the builder and `TokenStore.open`; or the files of the
      source have changed since the store was built.
  """
  recipe = [
    f'--task={selection.task}',
    f'--split={selection.split}',
    f'--vocabulary={selection.vocabulary.file or "bytes"}',
    *([] if selection.source is None else [f'--source={selection.source}']),
    *(f'--option={name}={value}' for name, value in selection.options.items()),
    *(['--unique'] if selection.unique else []),
  ]
  if data_dir is not None and paths.is_address(data_dir):
    from valkyrie.data import remote_store  # noqa: PLC0415  (pyarrow, only for buckets)

    make = _uploading([*recipe, f'--output={selection.name}'], data_dir, selection.name)
    path = remote_store.copied(data_dir, selection.name, f'To build it, {make}')
  else:
    path = store_path(selection, data_dir)
    recipe.append(f'--output={path}')
    if not (path / STORE_FILE).exists():
      builder.order([*recipe, '--renew'], f'Building the token store {path}')
      _check_other_splits(path, selection)
      return TokenStore.open(path, selection.vocabulary)
    make = f'run:\n  {_command([*recipe, "--rebuild"])}'
  store = TokenStore.open(path, selection.vocabulary)
  if store.information.get('origin') is not None or ':' in selection.task:
    from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

    provenance.check(path, store.information, make, selection.places)
  return store


def _check_other_splits(path: pathlib.Path, selection: Selection) -> None:
  """Raises a DataError if another split beside a new store was built from other files."""
  from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

  task, _, *origin = path.name.split('-')
  for other in sorted(path.parent.glob('-'.join([task, '*', *origin]))):
    if other != path and (other / STORE_FILE).exists():
      information = read_information(other)
      if information.get('origin') is not None:
        again = 'delete that folder and run again.'
        provenance.check(other, information, again, selection.places)


def _uploading(recipe: Sequence[str], data_dir: str, name: str) -> str:
  """How to build a store and upload it to an address."""
  place = redact.in_value(data_dir.partition('?')[0].rstrip('/'))
  copy = f'gcloud storage cp --recursive {name} {place}/'
  if place.startswith('s3://'):
    copy = f'aws s3 cp --recursive {name} {place}/{name}'
  return f'run this, and upload the folder:\n  {_command(recipe)}\n  {copy}'


class _Builder:
  """A process that builds token stores, and keeps TensorFlow out of this one.

  The first order starts it, and what a task loads is loaded once. It ends with this process,
  however this one ends: its standard input is a pipe, which the system closes. It sends the
  heartbeats of this process, and logs its progress to standard error.
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
    """Runs `valkyrie.data.build_store` with arguments -> store.json, or the rates of a mixture.

    Raises:
      ValkyrieError: the error of the command, with its class and message.
      DataError: the process has died; the message begins with `task`, such as 'Building ...'.
    """
    with self, self._lock:
      if self._process is None:
        # It searches packages, such as a user's own, where this process does.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
          [sys.executable, *_COMMAND[1:], '--orders'],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          text=True,
          env=os.environ | {'PYTHONPATH': path},
          pass_fds=heartbeat.inherited(),
        )
      process = self._process
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
