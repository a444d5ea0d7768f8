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
from typing import Any, NamedTuple

from valkyrie import foreign
from valkyrie.config import paths, redact
from valkyrie.data import document_source, file_names, store_fields, store_writer, token_store
from valkyrie.data.file_systems import access
from valkyrie.data.records import STREAMED
from valkyrie.data.selection import Selection
from valkyrie.data.source_file import SourceFile
from valkyrie.data.source_files import SourceFiles
from valkyrie.data.splits import TRAIN, VALIDATION
from valkyrie.distributed import heartbeat
from valkyrie.errors import DataError, StorageError, converted
from valkyrie.storage import file_lock, whole_file

_PIECE = 2**24  # bytes of a file that are hashed at once


class Origin:
  """The files of a store that is being built, as they were when its first shard was begun.

  The first builder records their hashes, and the others compare their files with that record.
  """

  def __init__(
    self,
    files: SourceFiles,
    store: pathlib.Path,
    *,
    renew: bool = False,
    generation: str = '',
  ):
    """Reads the record in the store's directory, and writes it first if no shard depends on one.

    With `renew`, it is also written if the files have changed: such a build replaces the shards of
    the old ones. For `generation`, see `StoreWriter`.

    Raises a DataError if the files differ from the record, or one cannot be read.
    """
    self._files = files
    self._store = store
    self._compared: list[SourceFile] = []
    file = store_writer.source_file(store, generation)
    lock = store_writer.lock_of(file)
    turn = file_lock.held(lock, f'list the source of {store}', heartbeat.beat)
    with store_writer.write_errors(store), turn:
      if self._is_outdated(file, renew, generation):
        lines = []
        for listed in files.files:
          entry = json.dumps(_entry(files, listed))
          lines.append(f'{entry}\n')
        whole_file.write(file, ''.join(lines))
      self._entries = _read(file)
    self.check()

  def _is_outdated(self, file: pathlib.Path, renew: bool, generation: str) -> bool:
    """Whether the record is to be written: it is not there, or is wrong and no shard needs it."""
    if not file.exists():
      return True
    entries = _read(file)
    shards = self._store.glob(f'shard-*{generation}')
    has_shards = any(shards)
    if has_shards and not renew:
      return False
    return bool(_changes(entries, self._files))

  @property
  def digest(self) -> str:
    """The hash of the names and contents; in a bucket, of sizes and times instead of contents."""
    contents = []
    for name, size, time, digest, _ in self._entries:
      contents.append([name, digest or [size, time]])
    return token_store.content_hash(contents)

  def record(self) -> dict[str, Any]:
    """How the files were found, and [name, size, time of content, hash] of each, for store.json.

    A password is removed from the location, which can then not be compared.
    """
    location = self._files.location
    if isinstance(location, str):
      recorded = redact.in_value(location)
    else:
      recorded = [redact.in_value(path) for path in location]
    return {
      'location': recorded,
      'formats': list(self._files.formats),
      'split': self._files.split,
      'splits': sorted(self._files.splits),
      'files': [entry[:-1] for entry in self._entries],
    }

  def check(self) -> None:
    """Raises a DataError if the files have changed since the record was written."""
    given = self._files
    files = SourceFiles(given.location, given.formats, given.split)
    if files.files == self._compared:
      return
    changes = _changes(self._entries, files)
    if changes:
      raise DataError(
        f'The token store {self._store} is being built from other files than {files} has now '
        f'({changes}). Restore these files and run the same command again, or run it '
        'with --renew, which builds its shards again from the present ones.'
      )
    self._compared = files.files


def check(
  path: pathlib.Path,
  information: Mapping[str, Any],
  rebuild: str,
  named: Iterable[str | None],
) -> None:
  """Raises a DataError if the source of a store has changed.

  If the source is gone, the store stays valid, and a warning is logged that it was not compared.
  The same happens for a task of another package that does not name its files.

  Args:
    information: the content of store.json.
    rebuild: how to build the store again, for the message.
    named: the source and the options of the run. Only addresses among them are contacted: another
      one in store.json may belong to a stranger, who would see this machine's credentials.
  """
  recorded = information.get('origin')
  if recorded is None:
    _warn_of_task(path, information, rebuild)
    return
  try:
    location = recorded['location']
    _check_addresses(location, named)
    files = SourceFiles(location, recorded['formats'], recorded.get('split'))
  except (DataError, StorageError) as error:
    logging.warning('The token store %s was not compared with its source: %s', path, error)
    return
  changes = _changes(recorded['files'], files)
  recorded_splits = recorded.get('splits', files.splits)
  had_validation = VALIDATION in recorded_splits
  has_validation = VALIDATION in files.splits
  if not changes and had_validation != has_validation:
    changes = 'files of the split validation, which is held out, were added or removed'
  if changes:
    raise DataError(
      f'The token store {path} was made from other files than {files} has now '
      f'({changes}). To make it again from these, {rebuild}'
    )
  is_of_other_package = ':' in information['task']
  if 'split' not in recorded and not is_of_other_package:
    source = information['source']
    _check_names(path, recorded, source.get('location'), rebuild)
  if _was_edited(information):
    logging.warning(
      'The module of the task of the token store %s was edited after the store was built. If the '
      'texts or their splits have changed, %s',
      path,
      rebuild,
    )


def _was_edited(information: Mapping[str, Any]) -> bool:
  """Whether a task of another package has another module than when its store was built."""
  recorded = information['source'].get(document_source.MODULE)
  if recorded is None:
    return False
  return recorded != document_source.module_hash(information['task'])


def _warn_of_task(path: pathlib.Path, information: Mapping[str, Any], rebuild: str) -> None:
  """Warns of a store whose task is of another package and does not name its files."""
  source = information['source']
  is_of_other_package = ':' in information['task']
  if not is_of_other_package or document_source.SAMPLE in source:
    return
  edit = ''
  if _was_edited(information):
    edit = ', and its module was edited after the store was built'
  logging.warning(
    'The token store %s was not compared with its source: the task names no files (see '
    'DocumentSource.files)%s. If the task or its data have changed, %s',
    path,
    edit,
    rebuild,
  )


def _check_addresses(location: str | Sequence[str], named: Iterable[str | None]) -> None:
  """Raises a DataError if a recorded location has an address that the run does not name."""
  addresses = {redact.in_value(name) for name in named if name}
  places = location
  if isinstance(location, str):
    places = [location]
  for place in places:
    is_named = place in addresses
    if paths.is_address(place) and not is_named:
      raise DataError(f'the run does not name the address {place!r:.200}')


def _check_names(
  path: pathlib.Path,
  recorded: Mapping[str, Any],
  source: str | None,
  rebuild: str,
) -> None:
  """Raises a DataError if a store of an earlier version has files that are of other splits now.

  `source` is the location of the training text; files of held-out text are elsewhere.
  """
  location = recorded['location']
  split = VALIDATION
  if location == source:
    split = TRAIN
  named = {entry[0] for entry in recorded['files']}
  with contextlib.suppress(DataError):  # none is for training
    files = SourceFiles(location, recorded['formats'], split)
    named -= {files.name(file) for file in files.files}
  if named:
    raise DataError(
      f'The token store {path} is of an earlier version, which read files of other splits into it: '
      f'{file_names.some(sorted(named))}. What was trained on it may know them, so scores on them '
      f'are worth nothing. To make the store again without them, {rebuild}'
    )


def check_apart(sources: Mapping[str, Selection]) -> None:
  """Warns of files that two sources of a mixture read, also by another name.

  Raises a DataError if the text of one source has a file that another one holds out.
  """
  listings: list[_Listing] = []
  for name, selection in sources.items():
    split = TRAIN
    if 'splits' in selection.options:
      split = None
    training = _listed(selection.source, split)
    validation = _validation(selection)
    if training is not None:
      listings.append(_Listing(name, is_held_out=False, files=training))
    if validation is not None:
      listings.append(_Listing(name, is_held_out=True, files=validation))
  for one, other in itertools.combinations(listings, 2):
    _check_pair(one, other)


class _Listing(NamedTuple):
  """The files of a source of a mixture that are trained on, or held out."""

  source: str
  is_held_out: bool
  files: SourceFiles


def _validation(selection: Selection) -> SourceFiles | None:
  """The files that a source holds out; None if it holds out none, or a share of the documents."""
  by_name = 'splits' not in selection.options
  held_out = selection.options.get('held_out')
  if held_out is not None:
    split = None
    if by_name:
      split = VALIDATION
    return _listed(held_out, split)
  if not by_name:
    return None
  files = _listed(selection.source, VALIDATION)
  if files is None or VALIDATION not in files.splits:
    return None
  return files


def _listed(location: str | None, split: str | None) -> SourceFiles | None:
  """The files at a location; None if there are none, or if it is a share of the documents."""
  if not location or location.startswith(STREAMED):
    return None
  with contextlib.suppress(DataError):
    try:
      return SourceFiles(location, split=split)
    except StorageError as error:
      logging.warning('Not checked whether another source of the mixture has its files: %s', error)
  return None


def _check_pair(one: _Listing, other: _Listing) -> None:
  """Raises a DataError, or warns, if two listings of a mixture share files."""
  both_are_held_out = one.is_held_out and other.is_held_out
  if one.source == other.source or both_are_held_out:
    return
  shared = one.files.shared_with(other.files)
  if not shared:
    return
  finding = (
    f'The sources {one.source} and {other.source} of the mixture share {len(shared)} files, such '
    f'as {redact.in_value(shared[0])}'
  )
  if one.is_held_out != other.is_held_out:
    raise DataError(f'{finding}, which one source holds out. Name the others by a pattern.')
  logging.warning(
    '%s: these files get the share of both sources. To read them once, name the files of '
    'each source by a pattern.',
    finding,
  )


def _read(file: pathlib.Path) -> list[list[Any]]:
  """The record of a build: [name, size, time of content, hash, time of the inode] of each file."""
  advice = 'Delete that file, and run the same command of build_store with --renew.'
  with converted((OSError, ValueError), DataError, f'{file} cannot be read', advice):
    lines = foreign.content(file).splitlines()
    entries = [foreign.json_value(line) for line in lines]
    for entry in entries:
      store_fields.check_entry(entry, inode=True)
    return entries


def _changes(recorded: Sequence[Sequence[Any]], files: SourceFiles) -> str:
  """The differences between recorded files, with or without the inodes' times, and present ones."""
  present = {files.name(file): file for file in files.files}
  entries = {name: entry for name, *entry in recorded}
  changed = set()
  for name in present.keys() & entries.keys():
    if _differs(present[name], *entries[name]):
      changed.add(name)
  changes = {
    'new': present.keys() - entries.keys(),
    'gone': entries.keys() - present.keys(),
    'changed': changed,
  }
  texts = []
  for word, names in changes.items():
    if names:
      named = file_names.some(sorted(names))
      texts.append(f'{len(names)} {word}: {named}')
  return '; '.join(texts)


def _differs(
  file: SourceFile,
  size: int,
  modified: int,
  digest: str | None,
  changed: int | None = None,
) -> bool:
  """Whether a file differs from its record, which may lack the time of the inode."""
  if file.size != size:
    return True
  is_same_inode = changed is None or file.changed == changed
  if file.modified == modified and is_same_inode:
    return False
  return digest is None or digest != _hash(file)


def _entry(files: SourceFiles, file: SourceFile) -> list[Any]:
  """The record of a file, see `_read`."""
  return [files.name(file), file.size, file.modified, _hash(file), file.changed]


def _hash(file: SourceFile) -> str | None:
  """BLAKE2b of a local file's bytes on disk; None in a bucket."""
  if not file.changed:
    return None
  digest = hashlib.blake2b(digest_size=16)
  failing = access(file.path, f'{file} cannot be read')
  with failing, foreign.opened(file.path) as stream:
    for piece in iter(lambda: stream.read(_PIECE), b''):
      digest.update(piece)
      heartbeat.beat()  # a run may wait for the store
  return digest.hexdigest()
