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
import hashlib
import json
import os
import re
from typing import Any, NamedTuple
import uuid

from valkyrie import packages
from valkyrie.errors import ConfigurationError, storage_errors
from valkyrie.storage import foreign_names
from valkyrie.storage.lease import Changed

SCHEME = 'gs://'
_NOT_LITERAL = re.compile(r'[\[*?#]|/gs:/')
_FOLDERS = ('/', '_$folder$')  # the ends of names by which consoles, mounts and Hadoop mark folders
_AT_ONCE = 8  # requests


def is_bucket(path: str | os.PathLike) -> bool:
  """Whether a path is an address that this module can open."""
  return os.fspath(path).startswith(SCHEME)


def client(address: str, **options: Any) -> Any:
  """As `gcs.connected`; raises ConfigurationError, naming `address`, if a package is missing."""
  try:
    from valkyrie.storage import gcs  # noqa: PLC0415  (half a second, only for buckets)
  except ImportError as error:
    raise ConfigurationError(
      f'{address} needs {error.name}, which this Python does not have. Install it: '
      + packages.install('gcsfs')
    ) from error
  return gcs.connected(address, **options)


@contextlib.contextmanager
def bucket_errors(message: str, right: str) -> Iterator[None]:
  """Raises StorageError('MESSAGE: reason. ADVICE') for an OSError inside.

  The advice is to give this machine the `right` if it is denied, or else to look at the network.
  """
  try:
    yield
  except OSError as error:
    advice = 'Check the address and the network, and run again.'
    if isinstance(error, PermissionError):
      advice = f'Give this machine the right to {right}.'
    with storage_errors(message, advice):
      raise


class Object(NamedTuple):
  """An object of a listing; md5 is in hexadecimal, and None for one that was composed."""

  size: int
  md5: str | None
  generation: int


class Bucket:
  """The objects below an address; their names are relative to it. Errors: see `gcs.Client`."""

  def __init__(self, address: str):
    """Connects to 'gs://BUCKET/FOLDERS'; raises as `client`, or ConfigurationError for another."""
    path = address.removeprefix(SCHEME)
    self._bucket, _, folder = path.partition('/')
    folder = folder.strip('/')
    is_literal = folder.isprintable() and not _NOT_LITERAL.search(f'/{folder}/')
    is_folder = self._bucket and foreign_names.is_below(folder)
    if not (address.startswith(SCHEME) and is_folder and is_literal):
      raise ConfigurationError(
        f'{address!a} is not the address of a folder for a run. Use {SCHEME}BUCKET/FOLDER. '
        'Libraries for buckets misread the characters [ * ? # and backslash, unprintable ones, and '
        'folders named "", ".", ".." or "gs:": leave them out.'
      )
    self.address = f'{SCHEME}{self._bucket}/{folder}'
    self._prefix = f'{folder}/'
    self._client = client(address)

  def __str__(self) -> str:
    return self.address

  def objects(self, below: str = '') -> dict[str, Object]:
    """The objects whose names begin with `below`, in the order of their names."""
    objects, _ = self.browse(below, None)
    return objects

  def browse(
    self,
    below: str = '',
    delimiter: str | None = '/',
  ) -> tuple[dict[str, Object], list[str]]:
    """The objects whose names begin with `below`, as far as the next delimiter, and the folders."""
    objects: dict[str, Object] = {}
    folders: list[str] = []
    query: dict[str, Any] = {'prefix': self._prefix + below, 'delimiter': delimiter}
    while True:
      page = self._client.call('GET', 'b/{}/o', self._bucket, json_out=True, **query)
      for item in page.get('items', ()):
        name = item['name']
        if not name.endswith(_FOLDERS):
          objects[name.removeprefix(self._prefix)] = _object(item)
      for name in page.get('prefixes', ()):
        folders.append(name.removeprefix(self._prefix))
      if 'nextPageToken' not in page:
        return objects, folders
      query['pageToken'] = page['nextPageToken']

  def read(self, name: str) -> tuple[bytes, int]:
    """The content of an object, and its generation."""
    headers, content = self._call('GET', name, alt='media')
    listed_hashes = headers.getall('X-Goog-Hash', ())
    hashes = ','.join(listed_hashes)
    md5 = re.search(r'md5=([^, ]+)', hashes)
    if md5 and md5[1] != _md5(content):
      raise OSError(errno.EIO, 'it has another MD5 than was sent', f'{self.address}/{name}')
    return content, int(headers['X-Goog-Generation'])

  def write(self, name: str, content: bytes, replaces: int | None = None) -> int:
    """Writes an object, and returns its generation.

    `replaces` is the generation that must be there, 0 for none; None replaces any. Raises Changed
    if another one is there, with another content.
    """
    boundary = uuid.uuid4().hex
    fields = json.dumps({'md5Hash': _md5(content)})  # the service compares it
    parts = [
      _part(boundary, 'application/json', fields.encode()),
      _part(boundary, 'application/octet-stream', content),
      f'--{boundary}--'.encode(),
    ]
    place = self._client.base.removesuffix('storage/v1/') + 'upload/storage/v1/b/{}/o'
    try:
      made = self._client.call(
        'POST',
        place,
        self._bucket,
        uploadType='multipart',
        name=self._prefix + name,
        ifGenerationMatch=replaces,
        headers={'Content-Type': f'multipart/related; boundary={boundary}'},
        data=b'\r\n'.join(parts),
        json_out=True,
      )
      return int(made['generation'])
    except Changed:  # perhaps by this very write, if the answer to it got lost
      present, generation = self.read(name)
      if present != content:
        raise
      return generation

  def append(self, name: str, content: bytes) -> None:
    """Appends to an object, or creates it; several writers can do so at once."""
    part = f'{name}.{uuid.uuid4().hex}'
    generation = self.write(part, content)
    uploaded = Object(len(content), None, generation)
    is_appended = False
    try:
      while not is_appended:
        listing = self.objects(name)
        earlier = listing.get(name, Object(0, None, 0))
        parts = [{'name': self._prefix + part}]
        if earlier.generation:
          parts.insert(0, {'name': self._prefix + name})
        body = {'sourceObjects': parts, 'destination': {'contentType': 'application/octet-stream'}}
        try:
          self._call('POST', name, '/compose', json=body, ifGenerationMatch=earlier.generation)
          is_appended = True
        except Changed:  # by another writer, or by this one, to whom the answer got lost
          present, _ = self.read(name)
          end = earlier.size + len(content)
          is_appended = present[earlier.size : end] == content
    finally:
      self.delete({part: uploaded})

  def copy(self, objects: Mapping[str, Object], source: str, target: str) -> None:
    """Copies objects below `source` to below `target`; Changed if one there has another content."""

    def copy_one(name: str) -> None:
      copied = target + name.removeprefix(source)
      answer = {'done': False}
      try:
        while not answer['done']:  # a large object takes several requests
          answer = self._call(
            'POST',
            name,
            '/rewriteTo/b/{}/o/{}',
            self._bucket,
            self._prefix + copied,
            rewriteToken=answer.get('rewriteToken'),
            ifGenerationMatch=0,
            headers={'Content-Type': 'application/json'},  # although the body is empty
            json_out=True,
          )
      except Changed:  # unless the answer to this copy got lost
        present = self.objects(copied)[copied]
        if objects[name].md5 != present.md5:
          raise

    self._at_once(copy_one, objects)

  def delete(self, objects: Mapping[str, Object]) -> None:
    """Deletes objects of a listing, unless they are gone or were replaced since."""

    def delete_one(name: str) -> None:
      with contextlib.suppress(FileNotFoundError, Changed):
        self._call('DELETE', name, ifGenerationMatch=objects[name].generation)

    self._at_once(delete_one, objects)

  def _at_once(self, act: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix='bucket') as threads:
      list(threads.map(act, names))  # raises their errors

  def _call(
    self,
    method: str,
    name: str,
    action: str = '',
    *more: str,
    **options: Any,
  ) -> Any:
    """Sends a request about an object; `more` fills the places in `action`."""
    names = self._bucket, self._prefix + name, *more
    return self._client.call(method, 'b/{}/o/{}' + action, *names, **options)


def _object(item: Mapping[str, Any]) -> Object:
  """The object that an item of a listing describes."""
  md5 = None
  if 'md5Hash' in item:
    digest = base64.b64decode(item['md5Hash'])
    md5 = digest.hex()
  size = int(item['size'])
  generation = int(item['generation'])
  return Object(size, md5, generation)


def _part(boundary: str, kind: str, content: bytes) -> bytes:
  """A part of a request with several parts."""
  head = f'--{boundary}\r\nContent-Type: {kind}\r\n\r\n'
  return head.encode() + content


def _md5(content: bytes) -> str:
  digest = hashlib.md5(content).digest()
  return base64.b64encode(digest).decode()
