"""A server of objects on this machine, whose requests meet faults."""

import contextlib
import http.server
import random
import socket
import threading
import time

from faults.fake_buckets import Buckets, Object
from faults.fake_faults import Call, Fault, When, every
from faults.fake_http import Answer, Request

_HEAD = 64 * 1024  # bytes of a body that are read before a fault is chosen


class FakeServer:
  """A server that listens while its context is open; a subclass answers in its service's way.

  url: its address.
  calls: the requests so far, batched ones as one.
  """

  def __init__(self, *buckets: str, seed: int = 0):
    """Makes the empty buckets, by default 'bucket'; `seed` decides by chance of faults."""
    self.buckets = Buckets(buckets or ('bucket',))
    self.calls: list[Call] = []
    self._chance = random.Random(seed)
    self._lock = threading.Lock()
    self._faults: list[Fault] = []
    self._server = _Server(('127.0.0.1', 0), type('Handler', (_Handler,), {'fake': self}))
    self.url = f'http://127.0.0.1:{self._server.server_address[1]}'

  def answer(self, request: Request) -> Answer:
    """The answer to a whole request."""
    raise NotImplementedError

  def error(self, status: int, message: str) -> Answer:
    """The answer that says an error."""
    raise NotImplementedError

  def target(self, request: Request) -> str | None:
    """`Call.target` of a request, or None if it meets no faults; its body may be incomplete."""
    raise NotImplementedError

  def __enter__(self):
    threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
    return self

  def __exit__(self, *_):
    for fault in self._faults:
      fault.end()
    self._server.shutdown()
    self._server.close_connections()
    self._server.server_close()

  def objects(self, bucket: str = 'bucket') -> dict[str, Object]:
    """{name: object} of a bucket, sorted by name."""
    return self.buckets.objects(bucket)

  def put(self, name: str, data: bytes, bucket: str = 'bucket') -> Object:
    """Writes an object without a request."""
    return self.buckets.insert(bucket, name, data, {}, {})

  def delete(self, name: str, bucket: str = 'bucket'):
    """Deletes an object without a request."""
    self.buckets.delete(bucket, name, {})

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

  def _inject(self, kind: str, when: When, times: int | None, probability: float, value) -> Fault:
    fault = Fault(kind, when, times, probability, value)
    with self._lock:
      self._faults.append(fault)
    return fault

  def arrived(self, request: Request) -> Fault | None:
    """Records a request, whose body may be incomplete, and chooses its fault."""
    target = self.target(request)
    if target is None:
      return None
    call = Call(request.method, request.path, request.query, target)
    with self._lock:
      self.calls.append(call)
      return next((fault for fault in self._faults if fault.meets(call, self._chance)), None)


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
  fake: FakeServer

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
      answer = self.fake.error(value, 'The service is not available.')
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
