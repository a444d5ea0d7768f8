"""A server of Google Cloud Storage on this machine, with faults.

  with FakeGcs() as server:
    environment = {**os.environ, **server.environment}  # of a process that shall use it
    fault = server.fail(503, when=on('POST', 'checkpoints/.*'), times=3)

It answers as the service does to the clients of `fake_gcs_api`. A fault meets the requests that its
predicate names; of several faults the oldest counts.
"""

import json
import re

from faults.fake_gcs_api import Api, error
from faults.fake_http import Answer, Request
from faults.fake_server import FakeServer

_ACCOUNT = '/computeMetadata/v1/instance/service-accounts/'


class FakeGcs(FakeServer):
  """The server, which listens while its context is open.

  environment: variables that lead tensorstore, gcsfs and google-cloud-storage to it.
  token_seconds: lifetime of the next tokens by the server's word; see `expire_tokens`.
  """

  def __init__(self, *buckets: str, seed: int = 0):
    super().__init__(*buckets, seed=seed)
    self.token_seconds = 3600
    self._tokens = 1
    self._accepted: int | None = None
    self._api = Api(self.buckets, self.url)

  @property
  def environment(self) -> dict[str, str]:
    """For a process whose storage shall be this server, which issues the tokens, too.

    google-cloud-storage and `storage.gcs` send no token to a STORAGE_EMULATOR_HOST, others do.
    """
    address = self.url.removeprefix('http://')
    return {
      'TENSORSTORE_GCS_HTTP_URL': self.url,
      'STORAGE_EMULATOR_HOST': self.url,
      'GCE_METADATA_ROOT': address,
      'GCE_METADATA_HOST': address,
      'GCE_METADATA_IP': address,
      'GOOGLE_CLOUD_PROJECT': 'project',
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # asks another service for the kind of bucket
    }

  def require_tokens(self):
    """From now on each request needs a token that the server issued."""
    self._accepted = 1

  def expire_tokens(self):
    """From now on each request needs a token that the server issues later."""
    with self._lock:
      self._tokens += 1
      self._accepted = self._tokens

  def answer(self, request: Request) -> Answer:
    """The answer to a whole request."""
    if _is_metadata(request):
      return self._metadata(request)
    token = re.search(r'token-(\d+)$', request.headers.get('authorization', ''))
    if self._accepted is not None and (token is None or int(token[1]) < self._accepted):
      return error(401, 'Invalid Credentials')
    return self._api.answer(request)

  def error(self, status: int, message: str) -> Answer:
    """The answer that says an error."""
    return error(status, message)

  def target(self, request: Request) -> str | None:
    """None for the metadata server, which meets no faults."""
    return None if _is_metadata(request) else self._api.named(request)

  def _metadata(self, request: Request) -> Answer:
    """The metadata server of a virtual machine, whose account is always authorized."""
    flavor = {'Metadata-Flavor': 'Google', 'Content-Type': 'application/json'}
    body = b''
    if request.path.endswith('/token'):
      token = {'access_token': f'token-{self._tokens}', 'token_type': 'Bearer'}
      body = json.dumps({**token, 'expires_in': self.token_seconds}).encode()
    elif request.path.startswith(_ACCOUNT):
      scopes = ['https://www.googleapis.com/auth/cloud-platform']
      account = {'email': 'account@project', 'scopes': scopes, 'aliases': ['default']}
      body = json.dumps(account).encode()
    elif request.path.endswith('/project-id'):
      flavor['Content-Type'], body = 'application/text', b'project'
    elif request.path.endswith('/universe-domain') or request.path.endswith('/universe_domain'):
      flavor['Content-Type'], body = 'application/text', b'googleapis.com'
    return Answer(200, flavor, body)


def _is_metadata(request: Request) -> bool:
  return request.path == '/' or request.path.startswith('/computeMetadata/')
