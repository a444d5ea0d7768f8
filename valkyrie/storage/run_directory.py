"""The directory of a run: a path, or a local copy of the small files of a run in a bucket."""

from collections.abc import Iterator
import contextlib
import json
import logging
import os
import pathlib
import tempfile
import threading
from typing import NamedTuple

from valkyrie.errors import reason_of, storage_errors, usable_path
from valkyrie.storage import foreign_names
from valkyrie.storage.bucket import Bucket, Changed, is_bucket

_SECONDS = 30.0  # between two uploads
# The other files are copied, since processes read them and append to them.
_NOT_COPIED = ('checkpoints/', 'set_aside/', 'profile/')
_EVENTS = 'events.out.tfevents'  # each process writes files of its own


class _Uploaded(NamedTuple):
  """The state of a file when it was last equal to its object."""

  number: int  # of the inode; a replaced file has another one
  size: int
  changed: int  # nanoseconds


class BucketDirectory(os.PathLike):
  """The directory of a run in a bucket.

  As a path, it is a local folder with copies of the small files of the run, which `uploaded` keeps
  up to date in the bucket; as a string, it is the address. The folder is deleted at exit.

  Attributes:
    bucket: the objects of the run.
  """

  def __init__(self, address: str):
    """Copies the files of a run; raises StorageError if it cannot."""
    self.bucket = Bucket(address)
    self._folder = tempfile.TemporaryDirectory(prefix='valkyrie-', ignore_cleanup_errors=True)
    self._local = pathlib.Path(self._folder.name, address.rstrip('/').rpartition('/')[2])
    self._local.mkdir()
    self._equal: dict[str, _Uploaded] = {}
    self._one = threading.Lock()  # upload at a time
    self.copy()

  def __fspath__(self) -> str:
    return str(self._local)

  def __str__(self) -> str:
    return self.bucket.address

  def copy(self) -> None:
    """Copies the files of the run again; a process that becomes its trainer calls it.

    Raises:
      StorageError: the bucket cannot be read, or an object's name leads out of the folder.
    """
    with storage_errors(f'{self} cannot be read'):
      names, folders = self.bucket.browse()
      for folder in folders:
        if folder not in _NOT_COPIED:
          names += self.bucket.objects(folder)
      advice = 'Nothing was copied. Delete this object, or use another copy of the run.'
      for name in [foreign_names.checked(name, self, advice) for name in names]:
        file = self._local / name
        if _EVENTS not in file.name and file.suffix != '.lock':
          with contextlib.suppress(FileNotFoundError):  # a process has deleted it meanwhile
            self.bucket.download(name, file)
            self._equal[name] = _state(file)

  @contextlib.contextmanager
  def uploaded(self) -> Iterator[None]:
    """Uploads changed files, every 30 seconds and at the end.

    Raises:
      StorageError: at the end, if some could not be uploaded.
    """
    over = threading.Event()

    def upload_often() -> None:
      while not over.wait(_SECONDS):
        try:
          self.upload()
        except OSError as error:
          logging.warning('%s cannot be written (%s); it is tried again', self, reason_of(error))

    thread = threading.Thread(target=upload_often, name='upload', daemon=True)
    thread.start()
    try:
      yield
    except BaseException as error:
      over.set()
      thread.join()
      try:
        self.upload()
      except OSError as second:
        error.add_note(f'The last metrics and logs of {self} are lost: {reason_of(second)}')
      raise
    over.set()
    thread.join()
    with storage_errors(f'The last metrics and logs of {self} are lost'):
      self.upload()

  def upload(self) -> None:
    """Uploads the files that have changed; raises OSError."""
    with self._one:
      for file in sorted(self._local.rglob('*')):
        if file.is_file():
          self._upload(file.relative_to(self._local).as_posix(), file)

  def _upload(self, name: str, file: pathlib.Path) -> None:
    before, now = self._equal.get(name), _state(file)
    if before == now:
      return
    with open(file, 'rb') as content:
      grown = before is not None and before.number == now.number and before.size <= now.size
      if _grows(file) and (grown or before is None):
        # Another process, such as an evaluation of this run, may add to it, too.
        content.seek(before.size if before else 0)
        self.bucket.append(name, content.read(now.size - (before.size if before else 0)))
      elif file.name == 'metrics.jsonl':  # a torn line was removed
        self._write_steps(name, content.read())
      else:
        self.bucket.write(name, content.read())
    self._equal[name] = now

  def _write_steps(self, name: str, content: bytes) -> None:
    """Replaces lines of steps, and keeps lines of other steps that another process has added."""
    while True:
      try:
        found, generation = self.bucket.read(name)
      except FileNotFoundError:  # somebody has deleted it
        found, generation = b'', 0
      complete = found[: found.rfind(b'\n') + 1]  # `content` no longer contains a torn line
      lines = last_of_each_step(complete + content)
      with contextlib.suppress(Changed):
        self.bucket.write(name, b''.join(lines.values()), replaces=generation)
        return


def opened(model_dir: str | os.PathLike) -> 'str | BucketDirectory':
  """The directory that --model_dir names: a path, or a `BucketDirectory` for an address.

  Raises:
    ConfigurationError: no run can be there, see `errors.usable_path` and `Bucket`; or the packages
      for the address are missing.
    StorageError: the bucket cannot be read.
  """
  if isinstance(model_dir, BucketDirectory):
    return model_dir
  path = os.fspath(model_dir)
  return BucketDirectory(path) if is_bucket(path) else usable_path('--model_dir', path)


def uploaded(model_dir: str | os.PathLike) -> contextlib.AbstractContextManager[None]:
  """A context in which the files of a run are uploaded; does nothing for a path."""
  if isinstance(model_dir, BucketDirectory):
    return model_dir.uploaded()
  return contextlib.nullcontext()


def last_of_each_step(content: bytes) -> dict[int | bytes, bytes]:
  """{step: its last line} of JSON lines; a line without a step is its own key, and stays."""
  return {_step(line): line for line in content.splitlines(keepends=True)}


def _step(line: bytes) -> int | bytes:
  try:
    return int(json.loads(line)['step'])
  except (ValueError, TypeError, KeyError):
    return line


def _grows(file: pathlib.Path) -> bool:
  return file.suffix == '.jsonl' or file.name == 'log.txt' or _EVENTS in file.name


def _state(file: pathlib.Path) -> _Uploaded:
  found = file.stat()
  return _Uploaded(found.st_ino, found.st_size, found.st_mtime_ns)
