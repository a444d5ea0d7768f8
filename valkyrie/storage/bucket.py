"""Objects of a bucket of Google Cloud Storage, below one address.

    https://cloud.google.com/storage/docs/json_api/v1/objects

An object appears as a whole, and is replaced instead of changed; each replacement has a larger
generation. A write can depend on the generation that it replaces, which makes it atomic.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
import contextlib
import errno
import importlib.util
import os
import pathlib
import re
from typing import Any, NamedTuple
import uuid

from valkyrie.errors import ConfigurationError, StorageError
from valkyrie.storage import foreign_names

SCHEME = 'gs://'
_NOT_LITERAL = re.compile(r'[\[*?#]|/gs:/')
_PATIENCE = 60.0  # seconds of retries of one request, with growing pauses
_REQUEST_SECONDS = 30.0  # after which a silent connection is considered lost
_AT_ONCE = 8  # requests, for which the client keeps 10 connections


class Changed(OSError):
  """Somebody else has written an object or a file since it was read."""


class Object(NamedTuple):
  """An object of a listing; md5 is in hexadecimal, and None for one that was composed."""

  size: int
  md5: str | None
  generation: int


class Bucket:
  """The objects below an address; their names are relative to it.

  Temporary errors (429, 5xx, lost connections) are retried. Others are raised as an OSError:
  FileNotFoundError, PermissionError or `Changed` where the service reports that.
  """

  def __init__(self, address: str):
    """Connects to 'gs://BUCKET/FOLDERS' with the default credentials of the machine.

    Raises:
      ConfigurationError: the address is invalid, or a package of the client is missing.
      StorageError: the machine has no credentials.
    """
    name, _, folder = address.removeprefix(SCHEME).partition('/')
    folder = folder.strip('/')
    literal = folder.isprintable() and not _NOT_LITERAL.search(f'/{folder}/')
    if not (address.startswith(SCHEME) and name and foreign_names.is_below(folder) and literal):
      raise ConfigurationError(
        f'{address!a} is not the address of a folder for a run. Use {SCHEME}BUCKET/FOLDER without '
        'the characters [ * ? # and backslash, unprintable ones, and folders named "", ".", ".." '
        'and "gs:": libraries for buckets read them otherwise.'
      )
    missing = [p for p in ('google.cloud.storage', 'gcsfs') if not _is_installed(p)]
    if missing:
      raise ConfigurationError(
        f'{address} needs {", ".join(missing)}, which this Python does not have. '
        "Install them with: pip install 'valkyrie[gcs]'"
      )
    _use_gcsfs()
    from google.auth import exceptions  # noqa: PLC0415  (a second, only for buckets)
    from google.cloud import storage  # noqa: PLC0415
    from google.cloud.storage.retry import DEFAULT_RETRY  # noqa: PLC0415

    self.address = f'{SCHEME}{name}/{folder}'
    self._prefix = f'{folder}/'
    self._options: dict[str, Any] = {
      'retry': DEFAULT_RETRY.with_timeout(_PATIENCE),
      'timeout': _REQUEST_SECONDS,
    }
    try:
      self._bucket = storage.Client(project=None).bucket(name)
    except exceptions.GoogleAuthError as error:
      raise StorageError(
        f'{address} cannot be opened: {error}. Give this machine a service account, or run: '
        'gcloud auth application-default login'
      ) from error

  def __str__(self) -> str:
    return self.address

  def objects(self, below: str = '') -> dict[str, Object]:
    """The objects whose names begin with `below`, in the order of their names."""
    with self._errors(below):
      found = self._bucket.list_blobs(prefix=self._prefix + below, **self._options)
      return {self._name(blob): _object(blob) for blob in found if not _is_mark(blob)}

  def browse(self, folder: str = '') -> tuple[list[str], list[str]]:
    """The files and the folders in a folder, '' or ending with a slash, as folders do."""
    with self._errors(folder):
      found = self._bucket.list_blobs(prefix=self._prefix + folder, delimiter='/', **self._options)
      files = [self._name(blob) for blob in found if not _is_mark(blob)]
      return files, [name.removeprefix(self._prefix) for name in sorted(found.prefixes)]

  def read(self, name: str) -> tuple[bytes, int]:
    """The content of an object, and its generation."""
    blob = self._blob(name)
    with self._errors(name):
      content = blob.download_as_bytes(**self._options)
      return content, int(blob.generation)

  def write(self, name: str, content: bytes, replaces: int | None = None) -> int:
    """Writes an object, and returns its generation.

    Args:
      name: of the object.
      content: of the object.
      replaces: the generation that must be there, 0 for none; None replaces any.

    Raises:
      Changed: another one is there, with another content.
    """
    blob = self._blob(name)
    try:
      with self._errors(name):
        blob.upload_from_string(
          content, 'application/octet-stream', if_generation_match=replaces, **self._options
        )
      return int(blob.generation)
    except Changed:  # by this very write, if the answer to it got lost
      found, generation = self.read(name)
      if found != content:
        raise
      return generation

  def append(self, name: str, content: bytes) -> None:
    """Appends to an object, or creates it; several writers can do so at once."""
    part = f'{name}.{uuid.uuid4().hex}'
    uploaded = Object(len(content), None, self.write(part, content))
    try:
      while not self._is_appended(name, part, content):
        pass
    finally:
      self.delete({part: uploaded})

  def _is_appended(self, name: str, part: str, content: bytes) -> bool:
    """Tries once to append the object `part`; False if the object has changed meanwhile."""
    try:
      before = self.describe(name)
    except FileNotFoundError:
      before = Object(0, None, 0)
    sources = [self._blob(n) for n in ([name, part] if before.generation else [part])]
    try:
      with self._errors(name):
        self._blob(name).compose(sources, if_generation_match=before.generation, **self._options)
    except Changed:  # by another writer, or by this one, to whom the answer got lost
      with self._errors(name):
        found = self._blob(name).download_as_bytes(**self._options)
      return found[before.size : before.size + len(content)] == content
    return True

  def describe(self, name: str) -> Object:
    """Size, MD5 and generation of an object."""
    blob = self._blob(name)
    with self._errors(name):
      blob.reload(**self._options)
    return _object(blob)

  def download(self, name: str, path: pathlib.Path) -> None:
    """Writes the content of an object to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with self._errors(name):
      self._blob(name).download_to_filename(path, **self._options)

  def copy(self, names: Iterable[str], rename: Callable[[str], str]) -> None:
    """Copies objects inside the bucket to unused names.

    Raises:
      Changed: an object of such a name has another content.
    """

    def copy_one(name: str) -> None:
      source, target = self._blob(name), self._blob(rename(name))
      try:
        with self._errors(rename(name)):
          token = None
          while True:  # of a large object, or to another place
            token, *_ = target.rewrite(source, token, if_generation_match=0, **self._options)
            if token is None:
              return
      except Changed:  # unless the answer to this copy got lost
        if self.describe(name).md5 != self.describe(rename(name)).md5:
          raise

    self._at_once(copy_one, names)

  def delete(self, objects: Mapping[str, Object]) -> None:
    """Deletes objects of a listing, unless they are gone or were replaced since."""

    def delete_one(name: str) -> None:
      with contextlib.suppress(FileNotFoundError, Changed), self._errors(name):
        self._blob(name).delete(if_generation_match=objects[name].generation, **self._options)

    self._at_once(delete_one, objects)

  def _at_once(self, act: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix='bucket') as threads:
      for _ in threads.map(act, names):
        pass

  def _blob(self, name: str) -> Any:
    return self._bucket.blob(self._prefix + name)

  def _name(self, blob: Any) -> str:
    return blob.name.removeprefix(self._prefix)

  @contextlib.contextmanager
  def _errors(self, name: str) -> Iterator[None]:
    """Raises an OSError with the address of an object for an error of the client inside."""
    from google.api_core import exceptions as api  # noqa: PLC0415
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse  # noqa: PLC0415
    from requests import RequestException  # noqa: PLC0415

    address = f'{self.address}/{name}'
    try:
      yield
    except api.NotFound as error:
      raise FileNotFoundError(errno.ENOENT, 'there is no such object', address) from error
    except (api.PreconditionFailed, api.Conflict) as error:
      raise Changed(errno.EEXIST, 'somebody else has written it', address) from error
    except (api.Forbidden, api.Unauthorized, GoogleAuthError) as error:
      raise PermissionError(errno.EACCES, f'access is denied ({_words(error)})', address) from error
    except (
      api.GoogleAPIError, InvalidResponse, DataCorruption, RequestException, OSError,
    ) as error:  # fmt: skip
      raise OSError(errno.EIO, _words(error), address) from error


def is_bucket(path: str | os.PathLike) -> bool:
  """Whether a path is an address that this module can open."""
  return os.fspath(path).startswith(SCHEME)


def _use_gcsfs() -> None:
  """Makes epath use gcsfs, which Orbax lists and creates folders with, instead of TensorFlow.

  TensorFlow takes seconds to import. epath caches its choice, even from an earlier path on disk.
  """
  from etils.epath import gpath  # noqa: PLC0415  (only for buckets)

  os.environ.setdefault('EPATH_USE_TF', 'false')
  gpath._is_tf_installed.cache_clear()


def _is_mark(blob: Any) -> bool:
  """Whether an object stands for an empty folder; consoles and mounts create such objects."""
  return blob.name.endswith('/')


def _object(blob: Any) -> Object:
  md5 = blob.md5_hash and base64.b64decode(blob.md5_hash).hex()
  return Object(blob.size, md5, int(blob.generation))


def _is_installed(package: str) -> bool:
  try:
    return importlib.util.find_spec(package) is not None
  except ModuleNotFoundError:  # of a parent
    return False


def _words(error: BaseException) -> str:
  """The message of an error of the client, in one line."""
  return ' '.join(str(getattr(error, 'message', None) or error).split())
