"""gcsfs, through which all requests to buckets of Google Cloud Storage go, except for arrays.

Only `bucket.client` imports this module, since it takes half a second and the extra [gcs].
"""

import asyncio
import errno
import logging
import os
from typing import Any

import aiohttp
from etils.epath import gpath
import fsspec
from fsspec.asyn import sync_wrapper
from gcsfs.core import GCSFileSystem
from google.auth.exceptions import GoogleAuthError

from valkyrie.errors import storage_errors
from valkyrie.storage.lease import Changed

# A connection that is silent for so many seconds is considered lost.
_SILENCE = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=30)


class Client(GCSFileSystem):
  """gcsfs without a cache of listings, whose errors are OSErrors, such as `Changed`.

  It repeats a request after 408, 429, 5xx and lost connections, five times in half a minute, or
  as long as its option `timeout` allows.
  """

  def __init__(self, **options: Any):
    # An emulator has no accounts, and a refresh of a token would block the thread of all requests.
    if os.environ.get('STORAGE_EMULATOR_HOST'):
      options['token'] = 'anon'
    defaults: dict[str, Any] = {'use_listings_cache': False, 'requests_timeout': _SILENCE}
    super().__init__(**defaults | options)

  async def _call(self, method: str, path: str, *args: str, **options: Any) -> Any:
    """Sends a request about the bucket and the object in `args`; see the class for errors."""
    names = list(args)
    if 'name' in options:
      names.append(options['name'])
    place = path
    if names:
      place = f'gs://{"/".join(names)}'
    try:
      call = super()._call(method, path, *args, **options)
      return await asyncio.wait_for(call, self.timeout)
    except FileNotFoundError as error:
      raise FileNotFoundError(errno.ENOENT, 'there is no such object', place) from error
    except Exception as error:
      code = getattr(error, 'code', None)
      if isinstance(error, FileExistsError) or code in (409, 412):
        raise Changed(errno.EEXIST, 'somebody else has written it', place) from error
      one_line = ' '.join(str(error).split())
      words = one_line or type(error).__name__
      # gcsfs has no class for 403: it raises OSError('Forbidden: ...').
      is_denied = code == 401 or words.startswith('Forbidden')
      if is_denied or isinstance(error, GoogleAuthError):
        raise PermissionError(errno.EACCES, f'access is denied ({words})', place) from error
      raise OSError(errno.EIO, words, place) from error

  call = sync_wrapper(_call)


def connected(address: str, anonymous: bool = False, timeout: float | None = None) -> Client:
  """A client with the default credentials of the machine; epath, too, uses its class from now on.

  A request and its repetitions take at most `timeout` seconds; `anonymous` sends no credentials.
  Raises a StorageError, with the `address`, if the machine has none.
  """
  # Otherwise epath would use TensorFlow, which takes seconds to import. It caches its choice, even
  # from an earlier path on disk.
  os.environ.setdefault('EPATH_USE_TF', 'false')
  gpath._is_tf_installed.cache_clear()
  for scheme in ('gs', 'gcs'):
    fsspec.register_implementation(scheme, Client, clobber=True)
  logging.getLogger('gcsfs').setLevel(logging.CRITICAL)  # it logs a stack for errors that it raises
  advice = 'Give this machine a service account, or run: gcloud auth application-default login'
  with storage_errors(f'{address} cannot be opened', advice, also=(GoogleAuthError,)):
    token = 'google_default'
    if anonymous:
      token = 'anon'
    return Client(token=token, timeout=timeout)
