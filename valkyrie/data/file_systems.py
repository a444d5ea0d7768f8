"""File systems: of this machine, and of buckets, which pyarrow reads."""

from collections.abc import Iterator
import contextlib
import re
from typing import Any
import urllib.parse

import pyarrow as pa
import pyarrow.fs

from valkyrie import foreign
from valkyrie.config import paths, redact
from valkyrie.data import file_names
from valkyrie.errors import ConfigurationError, DataError, StorageError, raise_outage
from valkyrie.storage import bucket

_PUBLIC = 'anonymous@'  # before the name of a bucket
_CLOUD_STORAGE = ('gs', 'gcs')
_OF_BUCKETS = (*_CLOUD_STORAGE, 's3', 'abfs', 'abfss')  # file:// and hdfs:// may have no host
_KEPT = "/%:@*~!$&'()+,;="  # signs that the path of a URI may have as they are
_DENIED = re.compile('ACCESS_DENIED|INVALID_ACCESS|SIGNATURE')
_ADVICE = {
  'gs': 'Give this machine a service account that may read the bucket, or run: gcloud auth '
  'application-default login. A public bucket has the address gs://anonymous@BUCKET.',
  's3': 'Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for an account that may '
  'read the bucket.',
}


class _CloudStorage(pyarrow.fs.FSSpecHandler):
  """gcsfs for pyarrow. The base class would take denied access for a missing file."""

  def get_file_info_selector(self, selector: Any) -> list[Any]:
    details = self.fs.find(selector.base_dir, detail=True)
    infos = []
    for path, info in details.items():
      infos.append(self._create_file_info(path, info))
    return infos

  def open_input_file(self, path: str) -> Any:
    return pa.PythonFile(self.fs.open(path), mode='r')

  open_input_stream = open_input_file


def filesystem_of(location: str) -> tuple[Any, str]:
  """The file system of a location, and its path there.

  The path of a URI may have spaces, brackets and letters of any language; `%20` is a space, too.

  Raises:
    ArrowInvalid, OSError: errors of pyarrow.
    ConfigurationError: the address names no bucket; and StorageError, errors of `bucket.client`.
  """
  if not paths.is_address(location):
    return pyarrow.fs.LocalFileSystem(), file_names.absolute(location)
  scheme, _, rest = location.partition('://')
  path, _, query = rest.partition('?')
  _check_bucket(location, scheme, path)
  if scheme in _CLOUD_STORAGE:
    parameters = dict(urllib.parse.parse_qsl(query))
    patience = {}
    if parameters.get('retry_limit_seconds'):
      patience['timeout'] = float(parameters['retry_limit_seconds'])
    is_public = path.startswith(_PUBLIC)
    client = bucket.client(f'gs://{path}', anonymous=is_public, **patience)
    files = pyarrow.fs.PyFileSystem(_CloudStorage(client))
    name = urllib.parse.unquote(path.removeprefix(_PUBLIC))
    return files, name.rstrip('/')
  quoted = urllib.parse.quote(path, safe=_KEPT)
  uri = f'{scheme}://{quoted}'
  if query:
    uri += f'?{query}'
  return pyarrow.fs.FileSystem.from_uri(uri)


def _check_bucket(location: str, scheme: str, path: str) -> None:
  """Raises a ConfigurationError for an address that names no bucket where its scheme needs one."""
  authority, _, _ = path.partition('/')
  _, _, name = authority.rpartition('@')
  if scheme in _OF_BUCKETS and not name.strip():
    place = foreign.shown(redact.in_value(location))
    raise ConfigurationError(
      f'The address {place} names no bucket after {scheme}://. Use {scheme}://BUCKET/FOLDER.'
    )


@contextlib.contextmanager
def access(location: str, failure: str) -> Iterator[None]:
  """Converts errors of pyarrow inside: 'FAILURE (reason). ADVICE'.

  A missing file or bucket, and a path that this machine refuses, is a DataError; denied access to
  an address, and a disk or a service that does not answer, are a StorageError.
  """
  try:
    yield
  except (pa.ArrowException, OSError, ValueError) as error:
    is_here = not paths.is_address(location)
    if is_here:
      raise_outage(failure, error)
    reason = foreign.reason(error)
    if is_here and isinstance(error, FileNotFoundError):
      reason = 'there is no such file or folder'
    names_nothing = isinstance(error, ValueError | FileNotFoundError)
    is_missing = names_nothing or 'NO_SUCH_' in str(error)
    if is_here or is_missing:
      message = f'{failure} ({reason}). Check its path and its permissions.'
      raise DataError(message) from error
    advice = 'Check the address and the network, and run again.'
    is_denied = isinstance(error, PermissionError) or _DENIED.search(str(error))
    if is_denied:
      scheme, _, _ = location.partition('://')
      advice = _ADVICE.get(scheme.replace('gcs', 'gs'), advice)
    raise StorageError(f'{failure} ({reason}). {advice}') from error
