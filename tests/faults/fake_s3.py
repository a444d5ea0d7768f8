"""A server that is read by S3's API on this machine, with faults; it does not check signatures.

The routes follow https://docs.aws.amazon.com/AmazonS3/latest/API: GetObject, HeadObject,
HeadBucket and ListObjectsV2.
"""

import email.utils
import urllib.parse
import xml.etree.ElementTree as xml

from faults.fake_buckets import ApiError, Object
from faults.fake_http import Answer, Request, window
from faults.fake_server import FakeServer

_CODES = {403: 'AccessDenied', 404: 'NoSuchKey', 416: 'InvalidRange', 500: 'InternalError',
          503: 'SlowDown'}  # fmt: skip
_NAMESPACE = 'http://s3.amazonaws.com/doc/2006-03-01/'


class FakeS3(FakeServer):
  """The server, which listens while its context is open.

  environment: variables that lead the clients of S3 to it.
  """

  @property
  def environment(self) -> dict[str, str]:
    """For a process whose storage shall be this server."""
    return {
      'AWS_ENDPOINT_URL': self.url,
      'AWS_ACCESS_KEY_ID': 'key',
      'AWS_SECRET_ACCESS_KEY': 'secret',
      'AWS_REGION': 'us-east-1',
      'AWS_EC2_METADATA_DISABLED': 'true',
    }

  def answer(self, request: Request) -> Answer:
    """The answer to a whole request."""
    bucket, _, name = urllib.parse.unquote(request.path[1:]).partition('/')
    try:
      if request.method not in ('GET', 'HEAD'):
        return self.error(405, f'There is no {request.method}.')
      if name:
        return self._object(request, self.buckets.get(bucket, name, {}))
      if request.method == 'HEAD':
        self.buckets.objects(bucket)
        return Answer(200, {'x-amz-bucket-region': 'us-east-1'})
      return self._list(bucket, request)
    except ApiError as failure:
      return self.error(failure.status, str(failure))

  def error(self, status: int, message: str) -> Answer:
    """The answer that says an error."""
    is_bucket = message.startswith('The specified bucket')
    code = 'NoSuchBucket' if is_bucket else _CODES.get(status, 'Invalid')
    return _xml('Error', [('Code', code), ('Message', message)], status)

  def target(self, request: Request) -> str:
    """'BUCKET/NAME', or 'BUCKET/PREFIX'."""
    bucket, _, name = urllib.parse.unquote(request.path[1:]).partition('/')
    return f'{bucket}/{name or request.query.get("prefix", "")}'

  def _object(self, request: Request, found: Object) -> Answer:
    headers = {
      'ETag': _etag(found),
      'Last-Modified': email.utils.formatdate(found.updated, usegmt=True),
      'Accept-Ranges': 'bytes',
      'Content-Type': 'binary/octet-stream',
    }
    return window(found.data, request, headers)

  def _list(self, bucket: str, request: Request) -> Answer:
    names = {'maxResults': 'max-keys', 'pageToken': 'continuation-token', 'prefix': 'prefix',
             'delimiter': 'delimiter'}  # fmt: skip
    query = {ours: request.query[its] for ours, its in names.items() if its in request.query}
    found, prefixes, token = self.buckets.list(bucket, query)
    rows = [
      ('Name', bucket),
      ('IsTruncated', 'true' if token else 'false'),
      *([('NextContinuationToken', token)] if token else []),
      ('KeyCount', str(len(found) + len(prefixes))),
    ]
    for one in found:
      time = f'{one.resource()["updated"][:19]}.000Z'
      fields = [('Key', one.name), ('LastModified', time), ('Size', str(len(one.data)))]
      rows.append(('Contents', [*fields, ('ETag', _etag(one)), ('StorageClass', 'STANDARD')]))
    rows += [('CommonPrefixes', [('Prefix', prefix)]) for prefix in prefixes]
    return _xml('ListBucketResult', rows)


def _etag(found: Object) -> str:
  return f'"{found.generation:x}"'


def _xml(name: str, rows: list, status: int = 200) -> Answer:
  """An answer with an element of (name, text or rows)."""

  def fill(parent: xml.Element, children: list):
    for tag, value in children:
      child = xml.SubElement(parent, tag)
      if isinstance(value, str):
        child.text = value
      else:
        fill(child, value)

  root = xml.Element(name, {} if name == 'Error' else {'xmlns': _NAMESPACE})
  fill(root, rows)
  return Answer(status, {'Content-Type': 'application/xml'}, xml.tostring(root))
