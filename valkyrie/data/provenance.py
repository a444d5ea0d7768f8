"""The files that a store was made from, compared with those that are there now.

Content decides. A file of the same size but another time of change is hashed, if its hash is known:
those of local files are, and those in buckets are not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import hashlib
import logging
import os
import pathlib
from typing import Any

from valkyrie.config import paths, redact
from valkyrie.data.source_files import SourceFile, SourceFiles
from valkyrie.distributed import heartbeat
from valkyrie.errors import DataError, StorageError

_MAX_NAMED = 5
_PIECE = 2**24  # bytes of a file that are hashed at once


def record(files: SourceFiles) -> dict[str, Any]:
  """How the files were found, and [name, size, time of change, hash] of each, for store.json.

  A location with a password loses it, and can then not be compared.
  """
  return {
    'location': redact.in_value(files.location),
    'formats': list(files.formats),
    'files': [[files.name(f), f.size, f.modified, _hash(files, f)] for f in files.files],
  }


def check(
  path: pathlib.Path, information: Mapping[str, Any], rebuild: str, named: Iterable[str | None]
) -> None:
  """Raises a DataError if the source of a store has changed.

  A store without its source is as good as ever, and a warning says that it was not compared. So it
  does of a task in another package, if that names no files.

  Args:
    path: of the store.
    information: the content of its store.json.
    rebuild: how to make it again, for the message.
    named: the source and the options of the run. Only an address among them is asked: another one
      in store.json may be that of a stranger, who would see this machine's credentials.
  """
  recorded = information.get('origin')
  if recorded is None:
    if ':' in information['task']:
      logging.warning(
        'The token store %s was not compared with its source: the task names no files (see '
        'DocumentSource.files). If the task or its data have changed, %s',
        path,
        rebuild,
      )
    return
  try:
    location = recorded['location']
    if paths.is_address(location) and location not in {redact.in_value(n) for n in named if n}:
      raise DataError(f'the run does not name the address {location!r:.200}')
    files = SourceFiles(location, recorded['formats'])
  except (DataError, StorageError) as error:
    logging.warning('The token store %s was not compared with its source: %s', path, error)
    return
  now = {files.name(file): file for file in files.files}
  before = {name: (size, modified, known) for name, size, modified, known in recorded['files']}
  changes = {
    'new': sorted(now.keys() - before.keys()),
    'gone': sorted(before.keys() - now.keys()),
    'changed': sorted(
      name
      for name in now.keys() & before.keys()
      if _differs(*before[name], now[name], lambda name=name: _hash(files, now[name]))
    ),
  }
  if any(changes.values()):
    found = '; '.join(
      f'{len(names)} {word}: {_some(names)}' for word, names in changes.items() if names
    )
    raise DataError(
      f'The token store {path} was made from other files than {recorded["location"]} has now '
      f'({found}). To make it again from these, {rebuild}'
    )


def _differs(
  size: int, modified: int, known: str | None, now: SourceFile, hashed: Callable[[], str | None]
) -> bool:
  if size != now.size:
    return True
  if modified == now.modified:
    return False
  return known is None or known != hashed()


def _hash(files: SourceFiles, file: SourceFile) -> str | None:
  """BLAKE2b of a local file's bytes as they lie on disk; None in a bucket.

  It sends heartbeats of the run that waits for the store.
  """
  if paths.is_address(files.location) or not os.path.isfile(file.path):
    return None
  digest = hashlib.blake2b(digest_size=16)
  with open(file.path, 'rb') as stream:
    while piece := stream.read(_PIECE):
      digest.update(piece)
      heartbeat.beat()
  return digest.hexdigest()


def _some(names: Sequence[str]) -> str:
  more = f' and {len(names) - _MAX_NAMED} more' if len(names) > _MAX_NAMED else ''
  return ', '.join(names[:_MAX_NAMED]) + more
