"""The file systems of locations: this machine's, and those of buckets by pyarrow."""

import os
import re
from typing import Any
import urllib.parse

import pyarrow.fs

from valkyrie.config import paths
from valkyrie.errors import DataError, StorageError

# Seconds of retries of one request to Cloud Storage. By default pyarrow takes 900, and says
# nothing. Its requests to S3 give up after some seconds.
PATIENCE = 60
_PATIENCE_NAME = 'retry_limit_seconds'
_CLOUD_STORAGE = ('gs', 'gcs')
_DENIED = re.compile(
  'PERMISSION_DENIED|UNAUTHENTICATED|OAuth2|ACCESS_DENIED|INVALID_ACCESS|SIGNATURE'
)
_MISSING = re.compile('NOT_FOUND|NO_SUCH_|No such file|does not exist')
_ADVICE = {
  'gs': 'Give this machine a service account that may read the bucket, or run: gcloud auth '
  'application-default login. A public bucket has the address gs://anonymous@BUCKET.',
  's3': 'Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for an account that may '
  'read the bucket.',
}


def filesystem_of(location: str) -> tuple[Any, str]:
  """The file system of a location, and its path there.

  The path of a URI may have spaces, brackets and letters of any language; `%20` is a space, too.

  Raises:
    ArrowInvalid, OSError: of pyarrow.
  """
  if not paths.is_address(location):
    return pyarrow.fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location))
  scheme, _, rest = location.partition('://')
  path, _, query = rest.partition('?')
  if scheme in _CLOUD_STORAGE and _PATIENCE_NAME not in query:
    query += f'{"&" if query else ""}{_PATIENCE_NAME}={PATIENCE}'
  quoted = urllib.parse.quote(path, safe="/%:@*~!$&'()+,;=")
  return pyarrow.fs.FileSystem.from_uri(f'{scheme}://{quoted}{"?" if query else ""}{query}')


def refused(location: str, task: str, error: Exception) -> DataError | StorageError:
  """The error of this program for one of pyarrow: 'TASK (reason). ADVICE'.

  A missing file or bucket and all on this machine are a matter of the data; denied access and a
  service that does not answer are one of the storage.
  """
  words = _words(error)
  if not paths.is_address(location) or isinstance(error, ValueError) or _MISSING.search(words):
    return DataError(f'{task} ({words}). Check its path and its permissions.')
  scheme = location.partition('://')[0].replace('gcs', 'gs')
  if _DENIED.search(f'{words} {error}') and scheme in _ADVICE:
    return StorageError(f'{task} ({words}). {_ADVICE[scheme]}')
  return StorageError(f'{task} ({words}). Check the address and the network, and run again.')


def _words(error: Exception) -> str:
  """The message of an error, without what Google's client adds to that of the service."""
  found = re.search('with a last message of (.*?)(?: error_info=|$)', str(error), re.DOTALL)
  status = re.search(r'google::cloud::Status\((\w+)', str(error))
  return f'{status[1]}: {found[1]}' if found and status else str(error)
