"""Buckets in memory: generations, preconditions, listing and composition as Cloud Storage has them.

The rules follow https://cloud.google.com/storage/docs/json_api/v1/objects and of
https://cloud.google.com/storage/docs/request-preconditions.
"""

import base64
from collections.abc import Iterable, Mapping
import dataclasses
import datetime
import functools
import hashlib
import threading
import time
from typing import Any

try:
  import google_crc32c
except ImportError:  # its clients then have no checksum of composed objects
  google_crc32c = None

_SETTABLE = (
  'cacheControl', 'contentDisposition', 'contentEncoding', 'contentLanguage', 'contentType',
  'customTime', 'metadata',
)  # fmt: skip
_MAX_COMPONENTS = 32  # sources of one composition


class ApiError(Exception):
  """An answer that is no success, with its HTTP status and message."""

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


@dataclasses.dataclass(frozen=True)
class Object:
  """One generation of an object.

  fields: the settable fields of its resource, by their names in the JSON API.
  created, updated: seconds since 1970.
  components: number of the objects that it was composed of; 0 if it was uploaded.
  """

  bucket: str
  name: str
  data: bytes
  generation: int
  metageneration: int
  fields: Mapping[str, Any]
  created: float
  updated: float
  components: int = 0

  @functools.cached_property
  def hashes(self) -> dict[str, str]:
    """The checksums by their names in the JSON API; a composed object has no MD5."""
    found = {}
    if google_crc32c is not None:
      crc32c = google_crc32c.value(self.data).to_bytes(4, 'big')
      found['crc32c'] = base64.b64encode(crc32c).decode()
    if not self.components:
      found['md5Hash'] = base64.b64encode(hashlib.md5(self.data).digest()).decode()
    return found

  def resource(self) -> dict[str, Any]:
    """The object's resource in the JSON API, without its links."""
    return {
      'kind': 'storage#object',
      'id': f'{self.bucket}/{self.name}/{self.generation}',
      'name': self.name,
      'bucket': self.bucket,
      'generation': str(self.generation),
      'metageneration': str(self.metageneration),
      'contentType': 'application/octet-stream',
      'storageClass': 'STANDARD',
      'size': str(len(self.data)),
      'etag': f'{self.generation}/{self.metageneration}',
      'timeCreated': _rfc3339(self.created),
      'updated': _rfc3339(self.updated),
      'timeStorageClassUpdated': _rfc3339(self.created),
      **({'componentCount': self.components} if self.components else {}),
      **self.hashes,
      **self.fields,
    }


class Buckets:
  """Buckets whose reads and writes are consistent, from any thread.

  A precondition is a query parameter such as {'ifGenerationMatch': '0'}; other keys are ignored.
  """

  def __init__(self, names: Iterable[str]):
    self._lock = threading.RLock()
    self._buckets: dict[str, dict[str, Object]] = {name: {} for name in names}
    self._generation = 0

  def create(self, bucket: str):
    """Makes an empty bucket; raises ApiError 409 if it exists."""
    with self._lock:
      if bucket in self._buckets:
        raise ApiError(409, f'The bucket {bucket} exists.')
      self._buckets[bucket] = {}

  def objects(self, bucket: str) -> dict[str, Object]:
    """{name: object} of a bucket, sorted; raises ApiError 404."""
    with self._lock:
      return dict(sorted(self._of(bucket).items()))

  def get(self, bucket: str, name: str, query: Mapping[str, str]) -> Object:
    """Reads an object; raises ApiError 404, 412, or 304 where nothing changed."""
    with self._lock:
      found = self._existing(bucket, name, query.get('generation'))
      _check(found, query, unchanged=304)
      return found

  def insert(
    self,
    bucket: str,
    name: str,
    data: bytes,
    fields: Mapping[str, Any],
    query: Mapping[str, str],
    components: int = 0,
  ) -> Object:
    """Writes an object; raises ApiError 412, or 400 if the checksum in `fields` is another."""
    with self._lock:
      self.check(bucket, name, query)
      self._generation = max(self._generation + 1, time.time_ns() // 1000)
      now = time.time()
      kept = {field: fields[field] for field in _SETTABLE if field in fields}
      made = Object(bucket, name, data, self._generation, 1, kept, now, now, components)
      for checksum, value in made.hashes.items():
        if fields.get(checksum, value) != value:
          raise ApiError(
            400, f'The {checksum} {fields[checksum]} is not that of the data, {value}.'
          )
      self._buckets[bucket][name] = made
      return made

  def check(self, bucket: str, name: str, query: Mapping[str, str]):
    """Raises ApiError 412 if the preconditions of a write are not fulfilled."""
    with self._lock:
      _check(self._of(bucket).get(name), query, unchanged=412)

  def delete(self, bucket: str, name: str, query: Mapping[str, str]):
    """Deletes an object; raises ApiError 404 or 412."""
    with self._lock:
      _check(self._existing(bucket, name, query.get('generation')), query, unchanged=412)
      del self._buckets[bucket][name]

  def patch(
    self, bucket: str, name: str, fields: Mapping[str, Any], query: Mapping[str, str]
  ) -> Object:
    """Changes the fields of an object, and removes those that are None; raises ApiError."""
    with self._lock:
      found = self._existing(bucket, name, query.get('generation'))
      _check(found, query, unchanged=412)
      merged = {**found.fields, **{key: fields[key] for key in _SETTABLE if key in fields}}
      if isinstance(fields.get('metadata'), dict):
        both = {**found.fields.get('metadata', {}), **fields['metadata']}
        merged['metadata'] = {key: value for key, value in both.items() if value is not None}
      kept = {key: value for key, value in merged.items() if value is not None}
      count = found.metageneration + 1
      made = dataclasses.replace(found, fields=kept, metageneration=count, updated=time.time())
      self._buckets[bucket][name] = made
      return made

  def copy(
    self,
    source: tuple[str, str],
    target: tuple[str, str],
    fields: Mapping[str, Any],
    query: Mapping[str, str],
    *,
    move: bool = False,
  ) -> Object:
    """Copies or moves (bucket, name) to (bucket, name), under the preconditions of both."""
    prefix = 'ifSource'
    of_source = {f'if{k[len(prefix) :]}': v for k, v in query.items() if k.startswith(prefix)}
    if 'sourceGeneration' in query:
      of_source['generation'] = query['sourceGeneration']
    with self._lock:
      found = self._existing(*source, of_source.get('generation'))
      _check(found, of_source, unchanged=412)
      made = self.insert(*target, found.data, {**found.fields, **fields}, query, found.components)
      if move:
        self.delete(*source, {})
      return made

  def compose(self, bucket: str, name: str, request: Mapping, query: Mapping[str, str]) -> Object:
    """Writes the concatenation of the request's sourceObjects; raises ApiError."""
    sources = request.get('sourceObjects', [])
    if not 1 <= len(sources) <= _MAX_COMPONENTS:
      raise ApiError(400, f'A composition has {len(sources)} sources; use 1 to {_MAX_COMPONENTS}.')
    with self._lock:
      parts = []
      for source in sources:
        parts.append(self._existing(bucket, source['name'], source.get('generation')))
        _check(parts[-1], source.get('objectPreconditions', {}), unchanged=412)
      data = b''.join(part.data for part in parts)
      components = sum(max(part.components, 1) for part in parts)
      return self.insert(bucket, name, data, request.get('destination', {}), query, components)

  def list(
    self, bucket: str, query: Mapping[str, str]
  ) -> tuple[list[Object], list[str], str | None]:
    """Lists one page: objects, prefixes, and the token of the next page; raises ApiError 404."""
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '')
    after = base64.b64decode(query.get('pageToken', '')).decode()
    limit = min(int(query.get('maxResults', 1000)), 1000)
    prefixes, found = set(), {}
    for name, one in self.objects(bucket).items():
      if not name.startswith(prefix) or not _in_range(name, query):
        continue
      head, cut, rest = name[len(prefix) :].partition(delimiter) if delimiter else (name, '', '')
      if cut:
        prefixes.add(prefix + head + cut)
      if not cut or (not rest and query.get('includeTrailingDelimiter', '').lower() == 'true'):
        found[name] = one
    names = sorted(name for name in prefixes | found.keys() if name > after)
    page = names[:limit]
    return (
      [found[name] for name in page if name in found],
      [name for name in page if name in prefixes],
      base64.b64encode(page[-1].encode()).decode() if len(names) > limit else None,
    )

  def _of(self, bucket: str) -> dict[str, Object]:
    if bucket not in self._buckets:
      raise ApiError(404, 'The specified bucket does not exist.')
    return self._buckets[bucket]

  def _existing(self, bucket: str, name: str, generation: int | str | None) -> Object:
    found = self._of(bucket).get(name)
    if found is None or str(generation or found.generation) != str(found.generation):
      raise ApiError(404, f'No such object: {bucket}/{name}')
    return found


def _check(found: Object | None, query: Mapping[str, Any], unchanged: int):
  """Raises ApiError 412, or `unchanged` for a number that should differ and does not."""
  generation = 0 if found is None else found.generation
  metageneration = 0 if found is None else found.metageneration
  for name, value in (('Generation', generation), ('Metageneration', metageneration)):
    wanted, unwanted = query.get(f'if{name}Match'), query.get(f'if{name}NotMatch')
    if wanted is not None and int(wanted) != value:
      raise ApiError(412, f'if{name}Match={wanted}, but the {name.lower()} is {value}.')
    if unwanted is not None and int(unwanted) == value:
      raise ApiError(unchanged, f'if{name}NotMatch={unwanted}, and the {name.lower()} is that.')


def _in_range(name: str, query: Mapping[str, str]) -> bool:
  end = query.get('endOffset')
  return name >= query.get('startOffset', '') and (not end or name < end)


def _rfc3339(seconds: float) -> str:
  moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
  return moment.isoformat(timespec='milliseconds').replace('+00:00', 'Z')
