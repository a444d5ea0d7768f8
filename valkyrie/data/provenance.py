"""The files that a store was built from, compared with the files that exist now.

Content decides. A file with the same size but another time is hashed, if its hash was recorded:
local files were hashed, files in buckets were not. A build compares the times of content and inode,
a start only the time of content, since a copy on another machine does not keep the other one.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import hashlib
import itertools
import json
import logging
import pathlib
from typing import Any

from valkyrie import foreign
from valkyrie.config import paths, redact
from valkyrie.data import document_source, store_fields, store_writer, token_store
from valkyrie.data.records import STREAMED
from valkyrie.data.source_files import SourceFile, SourceFiles, access
from valkyrie.data.splits import TRAIN, VALIDATION
from valkyrie.data.token_store import Selection
from valkyrie.distributed import heartbeat
from valkyrie.errors import DataError, StorageError, converted
from valkyrie.storage import file_lock, whole_file

_MAX_NAMED = 5
_PIECE = 2**24  # bytes of a file that are hashed at once


class Origin:
  """The files of a store that is being built, as they were when its first shard was begun.

  The first builder records their hashes, and the others compare their files with that record.
  """

  def __init__(
    self, files: SourceFiles, store: pathlib.Path, *, renew: bool = False, generation: str = ''
  ):
    """Reads the record in the store's directory, and writes it first if no shard depends on one.

    With `renew`, it is also written if the files have changed: shards of the old ones are then in
    the way of no build. For `generation`, see `StoreWriter`.

    Raises a DataError if the files differ from the record, or one cannot be read.
    """
    self._files, self._store = files, store
    self._compared: list[SourceFile] = []
    file = store_writer.source_file(store, generation)
    turn = file_lock.held(store_writer.lock_of(file), f'list the source of {store}', heartbeat.beat)
    with store_writer.write_errors(store), turn:
      known = _read(file) if file.exists() else None
      is_free = renew or not any(store.glob(f'shard-*{generation}'))
      if known is None or (is_free and _changes(known, files)):
        found = ([files.name(f), f.size, f.modified, _hash(f), f.changed] for f in files.files)
        whole_file.write(file, ''.join(f'{json.dumps(entry)}\n' for entry in found))
      self._entries = _read(file)
    self.check()

  @property
  def digest(self) -> str:
    """The hash of the names and contents; in a bucket, of sizes and times instead of contents."""
    return token_store.content_hash(
      [[name, known or [size, time]] for name, size, time, known, _ in self._entries]
    )

  def record(self) -> dict[str, Any]:
    """How the files were found, and [name, size, time of content, hash] of each, for store.json.

    A password is removed from the location, which can then not be compared.
    """
    location = self._files.location
    here = isinstance(location, str)
    return {
      'location': redact.in_value(location) if here else [*map(redact.in_value, location)],
      'formats': list(self._files.formats),
      'split': self._files.split,
      'splits': sorted(self._files.splits),
      'files': [entry[:-1] for entry in self._entries],
    }

  def check(self) -> None:
    """Raises a DataError if the files have changed since the record was written."""
    files = SourceFiles(self._files.location, self._files.formats, self._files.split)
    if files.files == self._compared:
      return
    if found := _changes(self._entries, files):
      raise DataError(
        f'The token store {self._store} is being built from other files than '
        f'{files} has now ({found}). Restore these files and run the same command again, or run it '
        'with --renew, which builds its shards again from the present ones.'
      )
    self._compared = files.files


def check(
  path: pathlib.Path, information: Mapping[str, Any], rebuild: str, named: Iterable[str | None]
) -> None:
  """Raises a DataError if the source of a store has changed.

  If the source is gone, the store stays valid, and a warning is logged that it was not compared;
  so too for a task of another package that names no files.

  Args:
    information: the content of store.json.
    rebuild: how to build the store again, for the message.
    named: the source and the options of the run. Only addresses among them are contacted: another
      one in store.json may belong to a stranger, who would see this machine's credentials.
  """
  recorded = information.get('origin')
  if recorded is None:
    source = information['source']
    if ':' in information['task'] and document_source.SAMPLE not in source:
      now = document_source.module_hash(information['task'])
      is_edited = source.get(document_source.MODULE, now) != now
      logging.warning(
        'The token store %s was not compared with its source: the task names no files (see '
        'DocumentSource.files)%s. If the task or its data have changed, %s',
        path,
        ', and its module was edited after the store was built' if is_edited else '',
        rebuild,
      )
    return
  try:
    location = recorded['location']
    known = {redact.in_value(name) for name in named if name}
    for each in [location] if isinstance(location, str) else location:
      if paths.is_address(each) and each not in known:
        raise DataError(f'the run does not name the address {each!r:.200}')
    files = SourceFiles(location, recorded['formats'], recorded.get('split'))
  except (DataError, StorageError) as error:
    logging.warning('The token store %s was not compared with its source: %s', path, error)
    return
  found = _changes(recorded['files'], files)
  if VALIDATION in {*files.splits} ^ {*recorded.get('splits', files.splits)}:
    found = found or 'files of the split validation came or went, which say what is held out'
  if not found and 'split' not in recorded and ':' not in information['task']:
    _check_names(path, recorded, information['source'].get('location'), rebuild)
  if found:
    raise DataError(
      f'The token store {path} was made from other files than {files} has now '
      f'({found}). To make it again from these, {rebuild}'
    )


def _check_names(
  path: pathlib.Path, recorded: Mapping[str, Any], source: str | None, rebuild: str
) -> None:
  """Raises a DataError if a store of an earlier version has files that are of other splits now.

  `source` is the location of the training text; files of held-out text are elsewhere.
  """
  location = recorded['location']
  split = TRAIN if location == source else VALIDATION
  named = {entry[0] for entry in recorded['files']}
  with contextlib.suppress(DataError):  # none is for training
    files = SourceFiles(location, recorded['formats'], split)
    named -= {files.name(file) for file in files.files}
  if named:
    raise DataError(
      f'The token store {path} is of an earlier version, which read files of other splits into it: '
      f'{_some(sorted(named))}. What was trained on it may know them, so scores on them are worth '
      f'nothing. To make the store again without them, {rebuild}'
    )


def check_apart(sources: Mapping[str, Selection]) -> None:
  """Warns of files that two sources of a mixture read, also by another name.

  Raises a DataError if the text of one source has a file that another one holds out.
  """
  listed: dict[tuple[str, bool], SourceFiles] = {}  # by source, and whether they are held out
  for name, selection in sources.items():
    by_name = 'splits' not in selection.options
    given = selection.options.get('held_out')
    held_out = selection.source if given is None and by_name else given
    for location, split in ((selection.source, TRAIN), (held_out, VALIDATION)):
      if location and not location.startswith(STREAMED):
        with contextlib.suppress(DataError, StorageError):  # a share is no location
          files = SourceFiles(location, split=split if by_name else None)
          if given is not None or split == TRAIN or VALIDATION in files.splits:
            listed[name, split == VALIDATION] = files
  for (one, files), (other, others) in itertools.combinations(listed.items(), 2):
    both = one[0] != other[0] and not (one[1] and other[1]) and files.shared_with(others)
    if both:
      found = f'The sources {one[0]} and {other[0]} of the mixture share {len(both)} files'
      found = f'{found}, such as {redact.in_value(both[0])}'
      if one[1] != other[1]:
        raise DataError(f'{found}, which one source holds out. Name the others by a pattern.')
      logging.warning(
        '%s: these files get the share of both sources. To read them once, name the files of '
        'each source by a pattern.',
        found,
      )


def _read(file: pathlib.Path) -> list[list[Any]]:
  """The record of a build: [name, size, time of content, hash, time of the inode] of each file."""
  advice = 'Delete that file, and run the same command of build_store with --renew.'
  with converted((OSError, ValueError), DataError, f'{file} cannot be read', advice):
    entries = [foreign.json_value(line) for line in foreign.content(file).splitlines()]
    for entry in entries:
      store_fields.check_entry(entry, inode=True)
    return entries


def _changes(recorded: Sequence[Sequence[Any]], files: SourceFiles) -> str:
  """The differences between recorded files, with or without the inodes' times, and present ones."""
  now = {files.name(file): file for file in files.files}
  before = {name: entry for name, *entry in recorded}
  changes = {
    'new': now.keys() - before.keys(),
    'gone': before.keys() - now.keys(),
    'changed': {n for n in now.keys() & before.keys() if _differs(now[n], *before[n])},
  }
  return '; '.join(
    f'{len(names)} {word}: {_some(sorted(names))}' for word, names in changes.items() if names
  )


def _differs(now: SourceFile, size: int, modified: int, known: str | None, *changed: int) -> bool:
  if size != now.size:
    return True
  if (modified, *changed) == (now.modified, now.changed)[: 1 + len(changed)]:
    return False
  return known is None or known != _hash(now)


def _hash(file: SourceFile) -> str | None:
  """BLAKE2b of a local file's bytes on disk; None in a bucket."""
  if not file.changed:
    return None
  digest = hashlib.blake2b(digest_size=16)
  with access(file.path, f'{file} cannot be read'), foreign.opened(file.path) as stream:
    while piece := stream.read(_PIECE):
      digest.update(piece)
      heartbeat.beat()  # of the run that waits for the store
  return digest.hexdigest()


def _some(names: Sequence[str]) -> str:
  more = f' and {len(names) - _MAX_NAMED} more' if len(names) > _MAX_NAMED else ''
  return foreign.shown(', '.join(names[:_MAX_NAMED])) + more
