"""Copies of finished token stores in buckets, one on each machine.

The arrays of a store are mapped into memory, so a run copies a store in a bucket to its cache. The
name of the copy contains the hash of store.json, so a replaced store is copied anew. A file gets
its name when it is complete, and store.json comes last, so a killed copy continues where it was.
"""

from collections.abc import Iterator, Mapping
import hashlib
import pathlib
import posixpath
import shutil
import sys
from typing import Any

import pyarrow as pa
import tqdm

from valkyrie.config import paths, redact
from valkyrie.data import source_files, store_writer, token_store
from valkyrie.data.token_store import STORE_FILE
from valkyrie.distributed import heartbeat
from valkyrie.errors import DataError, StorageError, storage_errors

_BLOCK = 2**23  # bytes that are read at once
_PART = '.part'  # the file that is being copied
_UPLOAD = 'Upload the whole store again, store.json last.'


def copied(data_dir: str, name: str, build: str) -> pathlib.Path:
  """Copies a store to this machine, unless the copy exists; returns its directory.

  Args:
    data_dir: address of a folder of stores, such as gs://BUCKET/FOLDER.
    name: name of the store's directory there.
    build: how to build the store, for the message if there is none.

  Raises:
    DataError: there is no finished store, or a file is not the one that store.json records.
    StorageError: the bucket or the disk refuses, or the disk is too small.
  """
  remote = _RemoteStore(data_dir, name)
  unfinished = f'{remote} is not a finished token store: no {STORE_FILE}. {build}'
  content = b''.join(remote.blocks(STORE_FILE, unfinished))
  information = token_store.information_of(content, f'{remote}/{STORE_FILE}')
  local = paths.cache() / f'{name}-{hashlib.sha256(content).hexdigest()[:8]}'
  if (local / STORE_FILE).exists():
    return local
  with (
    storage_errors(f'{remote} cannot be copied to {local}', 'Complete files are kept.'),
    store_writer.locked(local / '.lock', local, lambda *_: heartbeat.beat()),
  ):
    if not (local / STORE_FILE).exists():  # another process may have made the copy meanwhile
      _copy(remote, token_store.recorded_files(information), local)
      with store_writer.flushed(local / _PART) as stream:
        stream.write(content)
      (local / _PART).rename(local / STORE_FILE)
  return local


class _RemoteStore:
  """The files of a store at an address."""

  def __init__(self, data_dir: str, name: str):
    self._address = f'{redact.in_value(data_dir.partition("?")[0].rstrip("/"))}/{name}'
    try:
      self._filesystem, folder = source_files.filesystem_of(data_dir)
    except (pa.ArrowException, OSError) as error:
      raise source_files.refused(data_dir, f'{self} cannot be read', error) from error
    self._path = posixpath.join(folder, name)

  def __str__(self) -> str:
    return self._address

  def blocks(self, file: str, missing: str) -> Iterator[bytes]:
    """The content of a file; raises DataError, with the message `missing`, or StorageError."""
    try:
      with self._filesystem.open_input_stream(f'{self._path}/{file}') as stream:
        while block := stream.read(_BLOCK):
          yield block
    except FileNotFoundError as error:
      raise DataError(missing) from error
    except (pa.ArrowException, OSError) as error:
      raise source_files.refused(str(self), f'{self}/{file} cannot be read', error) from error


def _copy(remote: _RemoteStore, files: Mapping[str, dict[str, Any]], local: pathlib.Path) -> None:
  """Copies the files that are missing in `local`."""
  part = local / _PART
  part.unlink(missing_ok=True)
  missing = {name: recorded for name, recorded in files.items() if not (local / name).exists()}
  size, free = sum(r['bytes'] for r in missing.values()), shutil.disk_usage(local).free
  if size > free:
    raise StorageError(
      f'{remote} does not fit on the disk of {local}: it needs {_gb(size)}, but {_gb(free)} are '
      'free. Free space there, or name a folder on a larger disk in VALKYRIE_CACHE.'
    )
  print(f'copying {remote} to {local}', file=sys.stderr, flush=True)
  interval = 0.2 if sys.stderr.isatty() else 10
  with tqdm.tqdm(total=size, unit='B', unit_scale=True, mininterval=interval) as bar:
    for name, recorded in missing.items():
      digest = hashlib.sha256()
      lacks = f'{remote} lacks {name}, which its {STORE_FILE} records. {_UPLOAD}'
      with store_writer.flushed(part) as stream:
        for block in remote.blocks(name, lacks):
          stream.write(block)
          digest.update(block)
          bar.update(len(block))
          heartbeat.beat()
      if digest.hexdigest() != recorded['sha256']:
        raise DataError(
          f'{remote}/{name} has the SHA-256 {digest.hexdigest()}, but {recorded["sha256"]} is '
          f'recorded in its {STORE_FILE}. {_UPLOAD}'
        )
      (local / name).parent.mkdir(exist_ok=True)
      part.rename(local / name)


def _gb(size: int) -> str:
  return f'{size / 1e9:,.3g} GB'
