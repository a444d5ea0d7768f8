"""The JSON API of Google Cloud Storage: a request becomes an answer.

The routes follow https://cloud.google.com/storage/docs/json_api and
https://cloud.google.com/storage/docs/resumable-uploads.
"""

from collections.abc import Callable, Mapping
import dataclasses
import email.utils
import http
import json
import re
import threading
from typing import Any
import urllib.parse
import uuid

from faults.fake_buckets import ApiError, Buckets, Object
from faults.fake_http import Answer, Request, window

_UPLOAD_UNIT = 256 * 1024  # bytes: chunks that are not the last are kept in multiples of it
_REASONS = {
  401: 'authError', 403: 'forbidden', 404: 'notFound', 409: 'conflict', 412: 'conditionNotMet',
  416: 'requestedRangeNotSatisfiable', 429: 'rateLimitExceeded', 500: 'backendError',
  503: 'backendError',
}  # fmt: skip


@dataclasses.dataclass
class _Upload:
  """A resumable upload: its target, the fields and preconditions of its start, and the bytes."""

  bucket: str
  name: str
  fields: Mapping[str, Any]
  query: Mapping[str, str]
  data: bytes = b''
  made: Object | None = None
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


def _as_json(value: Any, status: int = 200) -> Answer:
  """An answer with a JSON body."""
  return Answer(status, {'Content-Type': 'application/json'}, json.dumps(value).encode())


def error(status: int, message: str) -> Answer:
  """An answer with the JSON body of an error."""
  if status == 304:
    return Answer(status, {})
  reason = _REASONS.get(status, 'invalid')
  one = {'message': message, 'domain': 'global', 'reason': reason}
  return _as_json({'error': {'code': status, 'message': message, 'errors': [one]}}, status)


class Api:
  """The answers to requests about `buckets`; `url` is the address that links begin with."""

  def __init__(self, buckets: Buckets, url: str):
    self._buckets = buckets
    self._url = url
    self._uploads: dict[str, _Upload] = {}
    bucket, name = r'(?P<bucket>[^/]+)', r'(?P<name>.+)'
    base = r'/storage/v1/b'
    target = r'b/(?P<target_bucket>[^/]+)/o/(?P<target>.+)'
    routes: list[tuple[str, str, Callable[..., Answer]]] = [
      ('POST', base, self._create_bucket),
      ('GET', f'{base}/{bucket}', self._bucket),
      ('GET', f'{base}/{bucket}/o', self._list),
      ('POST', f'{base}/{bucket}/o/(?P<name>[^/]+)/(?:copyTo|rewriteTo)/{target}', self._copy),
      ('POST', f'{base}/{bucket}/o/(?P<name>[^/]+)/moveTo/o/(?P<target>.+)', self._move),
      ('POST', f'{base}/{bucket}/o/(?P<name>[^/]+)/compose', self._compose),
      ('GET', f'(?:/download)?{base}/{bucket}/o/{name}', self._get),
      ('DELETE', f'{base}/{bucket}/o/{name}', self._delete),
      ('PATCH|PUT', f'{base}/{bucket}/o/{name}', self._patch),
      ('POST|PUT|DELETE', f'(?:/resumable)?/upload{base}/{bucket}/o', self._upload),
      ('POST', r'/batch(?:/storage/v1)?', self._batch),
    ]  # fmt: skip
    self._routes = [(re.compile(methods), re.compile(path), to) for methods, path, to in routes]

  def answer(self, request: Request) -> Answer:
    """The answer to a request, an error included."""
    for methods, path, to in self._routes:
      found = path.fullmatch(request.path)
      if found is None or not methods.fullmatch(request.method):
        continue
      parts = {key: urllib.parse.unquote(value) for key, value in found.groupdict().items()}
      try:
        return to(request, **parts)
      except ApiError as failure:
        return error(failure.status, str(failure))
      except ValueError as failure:
        return error(400, f'{request.method} {request.path}: {failure}')
    return error(404, f'There is no {request.method} {request.path}.')

  def named(self, request: Request) -> str:
    """'BUCKET/NAME' of the request's object, or 'BUCKET/PREFIX'; its body may be incomplete."""
    query = request.query
    if upload := self._uploads.get(query.get('upload_id', '')):
      return f'{upload.bucket}/{upload.name}'
    path = re.sub('^(?:/upload|/download|/resumable)*/storage/v1/b/', '', request.path)
    bucket, _, name = path.lstrip('/').partition('/')
    if path != request.path:
      name = re.split('/(?:copyTo|rewriteTo|moveTo|compose)', name.removeprefix('o')[1:])[0]
    in_body = re.search(rb'"name":\s*("(?:[^"\\]|\\.)*")', request.body)
    if '/upload/' in request.path and (in_body or 'name' in query):
      name = query['name'] if 'name' in query else json.loads(in_body[1])
      return f'{urllib.parse.unquote(bucket)}/{name}'
    return f'{urllib.parse.unquote(bucket)}/{urllib.parse.unquote(name) or query.get("prefix", "")}'

  def _resource(self, found: Object) -> dict[str, Any]:
    path = f'b/{found.bucket}/o/{urllib.parse.quote(found.name, safe="")}'
    media = f'{self._url}/download/storage/v1/{path}?generation={found.generation}&alt=media'
    return {**found.resource(), 'selfLink': f'{self._url}/storage/v1/{path}', 'mediaLink': media}

  def _create_bucket(self, request: Request) -> Answer:
    self._buckets.create(name := json.loads(request.body)['name'])
    return self._bucket(request, name)

  def _bucket(self, request: Request, bucket: str) -> Answer:
    self._buckets.objects(bucket)
    kept = {'location': 'US', 'locationType': 'multi-region', 'storageClass': 'STANDARD'}
    return _as_json({'kind': 'storage#bucket', 'id': bucket, 'name': bucket, **kept,
                    'metageneration': '1', 'etag': 'CAE='})  # fmt: skip

  def _list(self, request: Request, bucket: str) -> Answer:
    found, prefixes, token = self._buckets.list(bucket, request.query)
    page: dict[str, Any] = {'kind': 'storage#objects'}
    if found:
      page['items'] = [self._resource(one) for one in found]
    if prefixes:
      page['prefixes'] = prefixes
    if token:
      page['nextPageToken'] = token
    return _as_json(page)

  def _get(self, request: Request, bucket: str, name: str) -> Answer:
    if request.query.get('alt') == 'media':
      return self._media(request, bucket, name)
    return _as_json(self._resource(self._buckets.get(bucket, name, request.query)))

  def _media(self, request: Request, bucket: str, name: str) -> Answer:
    found = self._buckets.get(bucket, name, request.query)
    labels = {'md5Hash': 'md5', 'crc32c': 'crc32c'}
    hashes = ','.join(f'{labels[key]}={value}' for key, value in found.hashes.items())
    headers = {
      'Content-Type': found.fields.get('contentType', 'application/octet-stream'),
      'ETag': f'"{found.generation}/{found.metageneration}"',
      'Last-Modified': email.utils.formatdate(found.updated, usegmt=True),
      'X-Goog-Hash': hashes,
      'X-Goog-Generation': str(found.generation),
      'X-Goog-Metageneration': str(found.metageneration),
      'X-Goog-Stored-Content-Encoding': found.fields.get('contentEncoding', 'identity'),
      'X-Goog-Stored-Content-Length': str(len(found.data)),
      'Accept-Ranges': 'bytes',
    }
    return window(found.data, request, headers)

  def _delete(self, request: Request, bucket: str, name: str) -> Answer:
    self._buckets.delete(bucket, name, request.query)
    return Answer(204, {})

  def _patch(self, request: Request, bucket: str, name: str) -> Answer:
    fields = json.loads(request.body or b'{}')
    return _as_json(self._resource(self._buckets.patch(bucket, name, fields, request.query)))

  def _copy(
    self, request: Request, bucket: str, name: str, target_bucket: str, target: str
  ) -> Answer:
    fields = json.loads(request.body or b'{}')
    made = self._buckets.copy((bucket, name), (target_bucket, target), fields, request.query)
    if '/copyTo/' in request.path:
      return _as_json(self._resource(made))
    size = str(len(made.data))
    return _as_json({'kind': 'storage#rewriteResponse', 'done': True, 'objectSize': size,
                    'totalBytesRewritten': size, 'resource': self._resource(made)})  # fmt: skip

  def _move(self, request: Request, bucket: str, name: str, target: str) -> Answer:
    made = self._buckets.copy((bucket, name), (bucket, target), {}, request.query, move=True)
    return _as_json(self._resource(made))

  def _compose(self, request: Request, bucket: str, name: str) -> Answer:
    made = self._buckets.compose(bucket, name, json.loads(request.body), request.query)
    return _as_json(self._resource(made))

  def _upload(self, request: Request, bucket: str) -> Answer:
    if 'upload_id' in request.query:
      return self._continue_upload(request)
    kind, query, data = request.query.get('uploadType'), request.query, request.body
    fields: dict[str, Any] = {'contentType': request.headers.get('content-type')}
    if kind == 'multipart':
      (_, resource), (headers, data) = _parts(request.headers['content-type'], data)
      fields = {'contentType': headers.get('content-type'), **json.loads(resource)}
    elif kind == 'resumable':
      offered = request.headers.get('x-upload-content-type')
      fields = {'contentType': offered, **json.loads(data or b'{}')}
    for checksum in filter(None, request.headers.get('x-goog-hash', '').split(',')):
      label, _, value = checksum.strip().partition('=')
      fields[{'md5': 'md5Hash'}.get(label, label)] = value
    fields = {name: value for name, value in fields.items() if value is not None}
    name = query.get('name') or fields.get('name')
    if not name:
      raise ApiError(400, 'The upload names no object.')
    if kind != 'resumable':
      return _as_json(self._resource(self._buckets.insert(bucket, name, data, fields, query)))
    self._buckets.check(bucket, name, query)
    self._uploads[token := uuid.uuid4().hex] = _Upload(bucket, name, fields, query)
    place = f'{self._url}{request.path}?uploadType=resumable&upload_id={token}'
    return Answer(200, {'Location': place, 'X-GUploader-UploadID': token})

  def _continue_upload(self, request: Request) -> Answer:
    upload = self._uploads.get(request.query['upload_id'])
    if upload is None:
      raise ApiError(404, f'There is no upload {request.query["upload_id"]}.')
    if request.method == 'DELETE':
      del self._uploads[request.query['upload_id']]
      return Answer(499, {})
    with upload.lock:
      if upload.made is None:
        self._append(upload, request)
      if upload.made is not None:
        return _as_json(self._resource(upload.made))
      stored = len(upload.data)
      return Answer(308, {'Range': f'bytes=0-{stored - 1}'} if stored else {})

  def _append(self, upload: _Upload, request: Request):
    """Stores the chunk of a request, and makes the object after the last."""
    size, kept = len(request.body), len(upload.data)
    window = request.headers.get('content-range') or f'bytes 0-{size - 1}/{size}'
    found = re.fullmatch(r'bytes (?:(\d+)-(-?\d+)|\*)/(\d+|\*)', window)
    if found is None:
      raise ApiError(400, f'The Content-Range {window} cannot be read.')
    if found[1] is not None:
      begin = int(found[1])
      if begin > kept:
        raise ApiError(400, f'The chunk begins at {begin}, but {kept} bytes are stored.')
      upload.data += request.body[kept - begin :]
      if found[3] != str(len(upload.data)):
        upload.data = upload.data[: len(upload.data) // _UPLOAD_UNIT * _UPLOAD_UNIT]
    if found[3] == str(len(upload.data)):
      upload.made = self._buckets.insert(
        upload.bucket, upload.name, upload.data, upload.fields, upload.query
      )

  def _batch(self, request: Request) -> Answer:
    boundary, lines = f'batch_{uuid.uuid4().hex}', []
    for headers, content in _parts(request.headers['content-type'], request.body):
      head, *body = re.split(rb'\r?\n\r?\n', content.lstrip(), maxsplit=1)
      first, *rest = head.decode().splitlines()
      method, target, *_ = first.split()
      target = re.sub('^https?://[^/]*', '', target)
      answer = self.answer(Request.of(method, target, _headers(rest), b''.join(body)))
      lines += [
        f'--{boundary}',
        'Content-Type: application/http',
        f'Content-ID: <response-{headers.get("content-id", "").strip("<>")}>',
        '',
        f'HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}',
        *(f'{name}: {value}' for name, value in answer.headers.items()),
        f'Content-Length: {len(answer.body)}',
        '',
        answer.body.decode(),
      ]
    body = '\r\n'.join([*lines, f'--{boundary}--', '']).encode()
    return Answer(200, {'Content-Type': f'multipart/mixed; boundary={boundary}'}, body)


def _parts(content_type: str, body: bytes) -> list[tuple[dict[str, str], bytes]]:
  """The (headers, content) of the parts of a multipart body."""
  found = re.search(r'boundary="?([^";]+)"?', content_type)
  if found is None:
    raise ApiError(400, f'The Content-Type {content_type} has no boundary.')
  parts = []
  for piece in re.split(rb'(?:^|\r?\n)--' + re.escape(found[1]).encode(), body)[1:-1]:
    head, content = re.split(rb'\r?\n\r?\n', piece, maxsplit=1)
    lines = head.decode().strip().splitlines()
    parts.append((_headers(lines), content))
  return parts


def _headers(lines: list[str]) -> dict[str, str]:
  pairs = (line.partition(':') for line in lines)
  return {name.strip().lower(): value.strip() for name, _, value in pairs}
