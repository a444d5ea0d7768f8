"""Location of a run's token store: built on first use, or copied from a bucket.

A run reads slices of a store at random, so it copies a store in a bucket to its cache. The
name of the copy contains the hash of store.json, so a replaced store is copied again. A file gets
its name when it is complete, and store.json comes last, so a killed copy continues where it was.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
import posixpath
import shlex
import shutil
import subprocess
import sys
from typing import Any

import tqdm

from valkyrie import errors, foreign, packages
from valkyrie.config import paths, redact
from valkyrie.data import chat_template, token_store
from valkyrie.data.selection import Selection
from valkyrie.data.token_store import STORE_FILE, TokenStore, read_information
from valkyrie.distributed import heartbeat
from valkyrie.errors import DataError, StorageError, is_there, with_home
from valkyrie.storage import file_lock, owned, whole_file

_BUILD_STORE = 'valkyrie.data.build_store'
_BLOCK = 2**23  # bytes that are read at once
_UPLOAD = 'Upload the whole store again, store.json last.'


def store_path(selection: Selection, data_dir: str | None) -> pathlib.Path:
  """The store's directory below `data_dir`; ConfigurationError if that is an address."""
  if data_dir is not None and paths.is_address(data_dir):
    raise errors.ConfigurationError(
      f'A store cannot be built at {redact.in_value(data_dir)}. Build it with --output=FOLDER, and '
      'upload that.'
    )
  root = data_dir
  if root is None:
    root = str(paths.cache())
  folder = pathlib.Path(with_home(root)).absolute()
  return folder / selection.name


def open_store(selection: Selection, data_dir: str | None = None) -> TokenStore:
  """Opens the store of these documents, and builds it first if it is missing.

  Raises:
    ConfigurationError, DataError: as in the builder and `TokenStore.open`; or the files of the
      source have changed since the store was built; or the store in a bucket is not finished.
    StorageError: the bucket or the disk refuses a copy, or the disk is too small.
  """
  recipe = _recipe(selection)
  if data_dir is not None and paths.is_address(data_dir):
    make = _uploading([*recipe, f'--output={selection.name}'], data_dir, selection.name)
    remote = _RemoteStore(data_dir, selection.name)
    path = _copied(remote, f'To build it, {make}')
  else:
    path = store_path(selection, data_dir)
    recipe.append(f'--output={path}')
    if not is_there(path / STORE_FILE):
      build([*recipe, '--renew'], f'Building the token store {path}')
      _check_other_splits(path, selection)
      return TokenStore.open(path, selection.vocabulary)
    command = _command([*recipe, '--rebuild'])
    make = f'run:\n  {command}'
  try:
    store = TokenStore.open(path, selection.vocabulary)
  except DataError as error:
    if data_dir is not None and paths.is_address(data_dir):
      raise
    raise DataError(f'{error} For this run, {make}') from error
  source = store.information['source']
  if 'chat_template' in source:
    expected = chat_template.described(selection.vocabulary)
    recorded = {name: source.get(name) for name in expected}
    if recorded != expected:
      raise errors.ConfigurationError(
        f'The token store {path} was built with another chat template, or by a version that read '
        f'no tools. To build it again, {make}'
      )
  if 'sample' in source:
    from valkyrie.data import document_source  # noqa: PLC0415  (pyarrow, only for these tasks)

    document_source.check_generated(path, source, selection, make)
  has_files = store.information.get('origin') is not None
  if has_files or ':' in selection.task:
    from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

    provenance.check(path, store.information, make, selection.places)
  return store


def _recipe(selection: Selection) -> list[str]:
  """The arguments of build_store for a selection, without the place."""
  arguments = [
    f'--task={selection.task}',
    f'--split={selection.split}',
    f'--vocabulary={selection.vocabulary.file or "bytes"}',
  ]
  if selection.source is not None:
    arguments.append(f'--source={selection.source}')
  for name, value in selection.options.items():
    arguments.append(f'--option={name}={value}')
  if selection.unique:
    arguments.append('--unique')
  return arguments


def _check_other_splits(path: pathlib.Path, selection: Selection) -> None:
  """Raises a DataError if another split beside a new store was built from other files."""
  from valkyrie.data import provenance  # noqa: PLC0415  (pyarrow, only for files)

  words = path.name.split('-')
  words[1] = '*'  # any split
  pattern = '-'.join(words)
  for other in sorted(path.parent.glob(pattern)):
    if other == path or not (other / STORE_FILE).exists():
      continue
    information = read_information(other)
    if information.get('origin') is not None:
      other_selection = dataclasses.replace(selection, split=information['split'])
      recipe = _recipe(other_selection)
      command = _command([*recipe, f'--output={other}', '--rebuild'])
      provenance.check(other, information, f'run:\n  {command}', selection.places)


def _uploading(recipe: Sequence[str], data_dir: str, name: str) -> str:
  """How to build a store and upload it to an address."""
  place = _shown(data_dir)
  copy = f'gcloud storage cp --recursive {name} {place}/'
  if place.startswith('s3://'):
    copy = f'aws s3 cp --recursive {name} {place}/{name}'
  return f'run this, and upload the folder:\n  {_command(recipe)}\n  {copy}'


class _RemoteStore:
  """The files of the store `name` in a folder of stores at an address."""

  def __init__(self, data_dir: str, name: str):
    from valkyrie.data import file_systems  # noqa: PLC0415  (pyarrow, only for buckets)

    self.name = name
    self._address = f'{_shown(data_dir)}/{name}'
    self._access = file_systems.access
    with self._access(data_dir, f'{self} cannot be read'):
      self._filesystem, folder = file_systems.filesystem_of(data_dir)
    self._path = posixpath.join(folder, name)

  def __str__(self) -> str:
    return self._address

  def blocks(self, file: str, missing: str, most: int = foreign.LARGEST_FILE) -> Iterator[bytes]:
    """The content of a file of at most so many bytes.

    Raises DataError, with the message `missing` if there is no such file, or StorageError.
    """
    read = 0
    with self._access(str(self), f'{self}/{file} cannot be read'):
      try:
        with self._filesystem.open_input_stream(f'{self._path}/{file}') as stream:
          for block in iter(lambda: stream.read(_BLOCK), b''):
            read += len(block)
            if read > most:
              raise DataError(f'{self}/{file} has more than the expected {most:,} bytes. {_UPLOAD}')
            yield block
      except FileNotFoundError as error:
        raise DataError(missing) from error


def _copied(remote: _RemoteStore, build: str) -> pathlib.Path:
  """Copies a store to this machine, unless the copy exists; returns its directory.

  `build` says how to build the store, for the message if there is none.
  """
  unfinished = f'{remote} is not a finished token store: no {STORE_FILE}. {build}'
  blocks = remote.blocks(STORE_FILE, unfinished)
  content = b''.join(blocks)
  information = token_store.information_of(content, f'{remote}/{STORE_FILE}')
  digest = hashlib.sha256(content).hexdigest()
  local = paths.cache() / f'{remote.name}-{digest[:8]}'
  if (local / STORE_FILE).exists():
    return local
  with (
    errors.write_errors(
      f'{remote} cannot be copied to {local}',
      'name a folder on another disk in VALKYRIE_CACHE',
      'Complete files are kept.',
    ),
    file_lock.held(local / '.lock', f'copy {remote} to {local}', heartbeat.beat),
  ):
    if not (local / STORE_FILE).exists():  # another process may have made the copy meanwhile
      files = token_store.recorded_files(information)
      _copy(remote, files, local)
      whole_file.write(local / STORE_FILE, content)
  return local


def _copy(remote: _RemoteStore, files: Mapping[str, dict[str, Any]], local: pathlib.Path) -> None:
  """Copies the files that are missing in `local`."""
  missing = {}
  for name, recorded in files.items():
    if not (local / name).exists():
      missing[name] = recorded
  sizes = [recorded['bytes'] for recorded in missing.values()]
  size = sum(sizes)
  free = shutil.disk_usage(local).free
  if size > free:
    raise StorageError(
      f'{remote} does not fit on the disk of {local}: it needs {size / 1e9:,.3g} GB, but '
      f'{free / 1e9:,.3g} GB are free. Free space there, or name a folder on a larger disk in '
      'VALKYRIE_CACHE.'
    )
  print(f'copying {remote} to {local}', file=sys.stderr, flush=True)
  interval = 10
  if sys.stderr.isatty():
    interval = 0.2
  with tqdm.tqdm(total=size, unit='B', unit_scale=True, mininterval=interval) as bar:
    for name, recorded in missing.items():
      _copy_file(remote, name, recorded, local / name, bar)


def _copy_file(
  remote: _RemoteStore,
  name: str,
  recorded: Mapping[str, Any],
  file: pathlib.Path,
  bar: tqdm.tqdm,
) -> None:
  """Copies a file with this entry in store.json; raises a DataError if it has another hash."""
  digest = hashlib.sha256()
  lacks = f'{remote} lacks {name}, which its {STORE_FILE} records. {_UPLOAD}'
  file.parent.mkdir(exist_ok=True)
  with owned.new_file(file) as stream:
    for block in remote.blocks(name, lacks, recorded['bytes']):
      stream.write(block)
      digest.update(block)
      bar.update(len(block))
      heartbeat.beat()
    copied_hash = digest.hexdigest()
    if copied_hash != recorded['sha256']:
      raise DataError(
        f'{remote}/{name} has the SHA-256 {copied_hash}, but {recorded["sha256"]} is '
        f'recorded in its {STORE_FILE}. {_UPLOAD}'
      )


def _shown(address: str) -> str:
  """An address without its query and secrets."""
  place, _, _ = address.partition('?')
  return redact.in_value(place.rstrip('/'))


def build(arguments: Sequence[str], task: str) -> Any:
  """Runs `valkyrie.data.build_store` with arguments -> store.json, or the rates of a mixture.

  It runs in a separate process, which keeps TensorFlow out of this one. The new process ends with
  this one, however this one ends: its standard input is a pipe, which the system closes. It sends
  the heartbeats of this process, and logs its progress to standard error.

  Raises:
    ValkyrieError: the error of the command, with its class and message.
    DataError: the process has died; the message begins with `task`, such as 'Building ...'.
  """
  # It searches packages, such as a user's own, where this process does.
  folders = [entry or os.getcwd() for entry in sys.path]
  path = os.pathsep.join(folders)
  with subprocess.Popen(
    [*packages.start(_BUILD_STORE), '--for_a_run', *arguments],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path},
    pass_fds=heartbeat.inherited(),
  ) as process:
    assert process.stdout is not None
    answer = process.stdout.read()
  if process.returncode:
    raise DataError(
      f'{task} ended with exit code {process.returncode}; its output is above. Finished shards are '
      f'kept. Run again to continue, or run this by itself:\n  {_command(arguments)}'
    )
  answered = json.loads(answer)
  if 'error' in answered:
    error_class = getattr(errors, answered['error'])
    raise error_class(answered['message'])
  return answered['done']


def _command(arguments: Sequence[str]) -> str:
  """The command to build a store, without secrets."""
  shown = [redact.in_value(argument) for argument in arguments]
  return shlex.join(['python', '-m', _BUILD_STORE, *shown])
