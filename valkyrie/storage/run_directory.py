"""The directory of a run: a path, or a local copy of the small files of a run in a bucket."""

from collections.abc import Iterator
import contextlib
import logging
import os
import pathlib
import tempfile
import threading

from valkyrie.errors import end_after, reason_of, storage_errors, usable_path, write_errors
from valkyrie.storage import foreign_names, temporary_names
from valkyrie.storage.bucket import Bucket, bucket_errors, is_bucket

_SECONDS = 30.0  # between two uploads
# The other files are copied, since processes read them and append to them.
_NOT_COPIED = {'checkpoints/', 'set_aside/', 'profile/'}
_EVENTS = 'events.out.tfevents'  # begins the files of TensorBoard; each process has different ones


class BucketDirectory(os.PathLike):
  """The directory of a run in a bucket.

  As a path, it is a local folder with copies of the small files of the run, which `uploaded` keeps
  up to date in the bucket; as a string, it is the address. The folder is deleted at exit.
  """

  def __init__(self, address: str):
    """Copies the files of a run; raises as `copy`, and StorageError without a temporary folder."""
    self.bucket = Bucket(address)
    otherwise = 'set TMPDIR to a folder that can be written'
    with write_errors(f'The local copy of {address} has no place', otherwise):
      self._folder = tempfile.TemporaryDirectory(prefix='valkyrie-', ignore_cleanup_errors=True)
      _, _, name = address.rstrip('/').rpartition('/')
      self._local = pathlib.Path(self._folder.name, name)
      self._local.mkdir()
    # {name: size and time of a file when it was last equal to its object, up to a part of a line}
    self._equal: dict[str, tuple[int, int]] = {}
    self._uploading = threading.Lock()
    self.copy()

  def __fspath__(self) -> str:
    return str(self._local)

  def __str__(self) -> str:
    return self.bucket.address

  def copy(self) -> None:
    """Copies the files of the run again; a process that becomes its trainer calls it.

    Raises StorageError if the bucket cannot be read, or an object's name leads out of the folder.
    """
    right = 'list and read objects there (roles/storage.objectViewer)'
    with bucket_errors(f'{self} cannot be read', right):
      names, folders = self.bucket.browse()
      for folder in {*folders} - _NOT_COPIED:
        names |= self.bucket.objects(folder)
      advice = 'Nothing was copied. Delete this object, or use another copy of the run.'
      checked = [foreign_names.checked(name, self, advice) for name in names]
      for name in checked:
        file = self._local / name
        is_copied = _EVENTS not in file.name and file.suffix != '.lock'
        if is_copied:
          with contextlib.suppress(FileNotFoundError):  # a process has deleted it meanwhile
            content, _ = self.bucket.read(name)
            if content:  # an empty object may be the mark of a folder
              file.parent.mkdir(parents=True, exist_ok=True)
              file.write_bytes(content)
              modified = file.stat().st_mtime_ns
              self._equal[name] = (len(content), modified)

  def upload(self) -> None:
    """Uploads the files that have changed; raises OSError."""
    with self._uploading:
      for file in sorted(self._local.rglob('*')):
        path = file.relative_to(self._local)
        is_temporary = any(map(temporary_names.is_one, path.parts))
        if file.is_file() and not is_temporary:
          self._upload(path.as_posix(), file)

  def _upload(self, name: str, file: pathlib.Path) -> None:
    uploaded_size, uploaded_time = self._equal.get(name, (0, 0))
    status = file.stat()
    now = (status.st_size, status.st_mtime_ns)
    if (uploaded_size, uploaded_time) == now:
      return
    has_lines = file.suffix == '.jsonl' or file.name == 'log.txt'
    grows = has_lines or _EVENTS in file.name
    has_grown = grows and uploaded_size <= status.st_size
    begin = 0
    if has_grown:
      begin = uploaded_size
    with open(file, 'rb') as stream:
      stream.seek(begin)
      content = stream.read(status.st_size - begin)
    if file.suffix == '.jsonl':  # the object never ends within a line
      end = content.rfind(b'\n') + 1
      content = content[:end]
    if not has_grown:
      self.bucket.write(name, content)
    elif content:  # another process, such as an evaluation of this run, may add to it, too
      self.bucket.append(name, content)
    self._equal[name] = (begin + len(content), status.st_mtime_ns)


def opened(model_dir: str | os.PathLike) -> 'str | BucketDirectory':
  """The directory that --model_dir names: a path, or a `BucketDirectory` for an address.

  Raises as `errors.usable_path`, or `Bucket` and `BucketDirectory.copy`.
  """
  if isinstance(model_dir, BucketDirectory):
    return model_dir
  path = os.fspath(model_dir)
  if is_bucket(path):
    return BucketDirectory(path)
  return usable_path('--model_dir', path)


@contextlib.contextmanager
def uploaded(model_dir: str | os.PathLike) -> Iterator[None]:
  """A context in which changed files of a run in a bucket are uploaded every 30 seconds.

  They are uploaded at its end, too; StorageError if that fails. Does nothing for a path.
  """
  if not isinstance(model_dir, BucketDirectory):
    yield
    return
  has_ended = threading.Event()

  def upload_often() -> None:
    while not has_ended.wait(_SECONDS):
      try:
        model_dir.upload()
      except OSError as error:
        logging.warning('%s cannot be written (%s); it is tried again', model_dir, reason_of(error))

  def end() -> None:
    has_ended.set()
    thread.join()
    advice = 'Saved steps are not lost: run the same command again to continue from the newest.'
    with storage_errors(f'The last metrics and logs of {model_dir} are lost', advice):
      model_dir.upload()

  thread = threading.Thread(target=upload_often, name='upload', daemon=True)
  thread.start()
  try:
    yield
  except BaseException as error:
    end_after(end, error)
    raise
  end()
