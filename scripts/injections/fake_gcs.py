"""A server of Google Cloud Storage on this machine, with faults.

  with FakeGcs() as server:
    environment = {**os.environ, **server.environment}  # of a process that shall use it
    fault = server.fail(503, when=on('POST', 'checkpoints/.*'), times=3)

It answers as the service does to the clients of `fake_gcs_api`. A fault meets the requests that its
predicate names; of several faults the oldest counts.
"""

import contextlib
import http.server
import json
import random
import re
import socket
import threading
import time

from injections.fake_buckets import Buckets, Object
from injections.fake_faults import Call, Fault, When, every
from injections.fake_gcs_api import Answer, Api, Request, error

_HEAD = 64 * 1024  # bytes of a body that are read before a fault is chosen
_ACCOUNT = '/computeMetadata/v1/instance/service-accounts/'


class FakeGcs:
  """The server, which listens while its context is open.

  url: its address.
  environment: variables that lead tensorstore, google-cloud-storage, gcsfs and pyarrow to it.
  calls: the requests so far, batched ones as one.
  token_seconds: lifetime of the next tokens by the server's word; see `expire_tokens`.
  """

  def __init__(self, *buckets: str, seed: int = 0):
    """Makes the empty buckets, by default 'bucket'; `seed` decides by chance of faults."""
    self._buckets = Buckets(buckets or ('bucket',))
    self._chance = random.Random(seed)
    self._lock = threading.Lock()
    self._faults: list[Fault] = []
    self.token_seconds = 3600
    self._tokens = 1
    self._accepted: int | None = None
    self.calls: list[Call] = []

  def __enter__(self) -> 'FakeGcs':
    handler = type('Handler', (_Handler,), {'fake': self})
    self._server = _Server(('127.0.0.1', 0), handler)
    self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
    self._api = Api(self._buckets, self.url)
    threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
    return self

  def __exit__(self, *_):
    for fault in self._faults:
      fault.end()
    self._server.shutdown()
    self._server.close_connections()
    self._server.server_close()

  @property
  def environment(self) -> dict[str, str]:
    """For a process whose storage shall be this server, which issues the tokens, too.

    google-cloud-storage and gcsfs send no token to a STORAGE_EMULATOR_HOST, tensorstore sends one.
    """
    address = self.url.removeprefix('http://')
    return {
      'TENSORSTORE_GCS_HTTP_URL': self.url,
      'STORAGE_EMULATOR_HOST': self.url,
      'CLOUD_STORAGE_EMULATOR_ENDPOINT': self.url,
      'GCE_METADATA_ROOT': address,
      'GCE_METADATA_HOST': address,
      'GCE_METADATA_IP': address,
      'GOOGLE_CLOUD_PROJECT': 'project',
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # asks another service for the kind of bucket
    }

  def objects(self, bucket: str = 'bucket') -> dict[str, Object]:
    """{name: object} of a bucket, sorted by name."""
    return self._buckets.objects(bucket)

  def put(self, name: str, data: bytes, bucket: str = 'bucket') -> Object:
    """Writes an object without a request."""
    return self._buckets.insert(bucket, name, data, {}, {})

  def delete(self, name: str, bucket: str = 'bucket'):
    """Deletes an object without a request."""
    self._buckets.delete(bucket, name, {})

  def fail(
    self, status: int, when: When = every, times: int | None = None, probability: float = 1.0
  ) -> Fault:
    """Requests are answered with an error, and have no effect."""
    return self._inject('fail', when, times, probability, status)

  def delay(self, seconds: float, when: When = every, times: int | None = None) -> Fault:
    """Requests take effect after a time."""
    return self._inject('delay', when, times, 1.0, seconds)

  def hold(self, when: When = every, times: int | None = None) -> Fault:
    """Requests take effect after the fault's `end`."""
    return self._inject('hold', when, times, 1.0, None)

  def tear(self, when: When = every, times: int | None = 1, probability: float = 1.0) -> Fault:
    """Connections close after half of the body: of the request, without effect, or the answer."""
    return self._inject('tear', when, times, probability, None)

  def lose(self, when: When = every, times: int | None = 1, probability: float = 1.0) -> Fault:
    """Requests take effect, and connections close before the answer."""
    return self._inject('lose', when, times, probability, None)

  def require_tokens(self):
    """From now on each request needs a token that the server issued."""
    self._accepted = 1

  def expire_tokens(self):
    """From now on each request needs a token that the server issues later."""
    with self._lock:
      self._tokens += 1
      self._accepted = self._tokens

  def _inject(self, kind: str, when: When, times: int | None, probability: float, value) -> Fault:
    fault = Fault(kind, when, times, probability, value)
    with self._lock:
      self._faults.append(fault)
    return fault

  def arrived(self, request: Request) -> Fault | None:
    """Records a request, whose body may be incomplete, and chooses its fault."""
    if _is_metadata(request):
      return None
    call = Call(request.method, request.path, request.query, self._api.named(request))
    with self._lock:
      self.calls.append(call)
      return next((fault for fault in self._faults if fault.meets(call, self._chance)), None)

  def answer(self, request: Request) -> Answer:
    """The answer to a whole request."""
    if _is_metadata(request):
      return self._metadata(request)
    token = re.search(r'token-(\d+)$', request.headers.get('authorization', ''))
    if self._accepted is not None and (token is None or int(token[1]) < self._accepted):
      return error(401, 'Invalid Credentials')
    return self._api.answer(request)

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


class _Server(http.server.ThreadingHTTPServer):
  daemon_threads = True
  block_on_close = False
  request_queue_size = 128

  def __init__(self, *arguments):
    self._open = set()
    super().__init__(*arguments)

  def process_request(self, request, client_address):
    self._open.add(request)
    super().process_request(request, client_address)

  def shutdown_request(self, request):
    self._open.discard(request)
    super().shutdown_request(request)

  def close_connections(self):
    """Ends the connections that clients keep for later requests."""
    for request in list(self._open):
      with contextlib.suppress(OSError):  # the client was first
        request.shutdown(socket.SHUT_RDWR)

  def handle_error(self, request, client_address):
    """A client that went away is no event."""


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True
  wbufsize = -1  # one packet for a small answer
  fake: FakeGcs

  def log_message(self, format, *arguments):
    """Keeps the tests' output free of requests."""

  def _handle(self):
    headers = {name.lower(): value for name, value in self.headers.items()}
    left = int(headers.get('content-length', 0))
    body = self._chunks() if 'chunked' in headers.get('transfer-encoding', '') else b''
    first = min(left, max(left // 2, _HEAD))
    body += self.rfile.read(first)
    request = Request.of(self.command, self.path, headers, body)
    fault = self.fake.arrived(request)
    kind, value = (fault.kind, fault.value) if fault else ('', None)
    if kind == 'tear' and self.command != 'GET':
      self.close_connection = True
      return
    if kind == 'delay':
      time.sleep(value)
    if fault and kind == 'hold':
      fault.hold()
    rest = self.rfile.read(left - first)
    if len(rest) < left - first:  # the client went away within the body
      self.close_connection = True
      return
    request = request._replace(body=body + rest)
    if kind == 'fail':
      answer = error(value, 'The service is not available.')
    else:
      answer = self.fake.answer(request)
    if kind == 'lose':
      self.close_connection = True
      return
    self._send(answer, torn=kind == 'tear')

  do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

  def _chunks(self) -> bytes:
    parts = []
    while size := int(self.rfile.readline().split(b';')[0], 16):
      parts.append(self.rfile.read(size))
      self.rfile.readline()
    self.rfile.readline()
    return b''.join(parts)

  def _send(self, answer: Answer, torn: bool):
    self.send_response(answer.status)
    for name, value in answer.headers.items():
      self.send_header(name, value)
    if answer.status not in (204, 304):
      self.send_header('Content-Length', str(len(answer.body)))
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(answer.body[: len(answer.body) // 2] if torn else answer.body)
    self.close_connection = self.close_connection or torn
    self.wfile.flush()
