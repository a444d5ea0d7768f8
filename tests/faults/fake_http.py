"""Requests to a server of objects, and its answers."""

from collections.abc import Mapping
import re
from typing import NamedTuple
import urllib.parse

from faults.fake_buckets import ApiError


class Request(NamedTuple):
  """A request: `path` as it was sent, `query` decoded, names of `headers` in lower case."""

  method: str
  path: str
  query: Mapping[str, str]
  headers: Mapping[str, str]
  body: bytes

  @classmethod
  def of(cls, method: str, target: str, headers: Mapping[str, str], body: bytes) -> 'Request':
    """A request whose target is path and query."""
    path, _, query = target.partition('?')
    return cls(method, path, dict(urllib.parse.parse_qsl(query)), headers, body)


class Answer(NamedTuple):
  """A status with headers and a body."""

  status: int
  headers: Mapping[str, str]
  body: bytes = b''


def window(data: bytes, request: Request, headers: Mapping[str, str]) -> Answer:
  """The data or the part in the request's Range; raises ApiError 416."""
  found = re.fullmatch(r'bytes=(\d*)-(\d*)', request.headers.get('range', ''))
  if found is None or found[0] == 'bytes=-':
    return Answer(200, headers, data)
  size = len(data)
  begin = int(found[1]) if found[1] else max(0, size - int(found[2]))
  end = min(int(found[2]) + 1, size) if found[1] and found[2] else size
  if begin >= end:
    raise ApiError(416, f'The range {found[0]} is not of {size} bytes.')
  place = {'Content-Range': f'bytes {begin}-{end - 1}/{size}'}
  return Answer(206, {**headers, **place}, data[begin:end])
