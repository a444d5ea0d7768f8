"""The steps of a run: each appears and disappears as a whole. On a disk a renamed folder does that.

Only what this program made is deleted: a save has a mark in its folder until it is whole, and a
step has a manifest of its files. `storage.owned` deletes both.
"""

from collections.abc import Iterable, Mapping
import contextlib
import errno
import logging
import os
import pathlib
import tempfile

from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.bucket_steps import BucketLock, BucketSteps
from valkyrie.checkpoint.manifest import FOLDER, SET_ASIDE, DiskFiles, is_step
from valkyrie.errors import (
  StorageError,
  first_of,
  storage_errors,
  with_home,
  write_errors,
)
from valkyrie.storage import owned
from valkyrie.storage.free_names import free_name
from valkyrie.storage.lease import DiskLock, lock_holder
from valkyrie.storage.run_directory import BucketDirectory, opened

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHOWN = 3  # names of files of others


class DiskSteps:
  """The steps of a run, whose directory need not exist; OSError if the file system refuses."""

  def __init__(self, model_dir: str | os.PathLike):
    path = with_home(os.fspath(model_dir))
    self._root = pathlib.Path(os.path.abspath(path))
    self.place = self._root / FOLDER  # also for messages
    self._begun: set[pathlib.Path] = set()  # folders of steps that this process did not finish

  def find(self) -> list[int]:
    """The steps in order, valid or damaged; raises StorageError if one is a symbolic link."""
    if not self.place.is_dir():
      return []
    steps = []
    for place in self.place.iterdir():
      if is_step(place.name):
        if place.is_symlink():
          raise StorageError(
            f'{place} is a symbolic link, but a step must be a directory. Move the step itself '
            'there, or remove the link.'
          )
        steps.append(int(place.name))
    return sorted(steps)

  def files(self, step: int, once: bool = False) -> DiskFiles:
    return DiskFiles(self.path(step), once=once)

  def path(self, step: int) -> pathlib.Path:
    """The folder of a step, for Orbax."""
    return self.place / str(step)

  def holder(self) -> str:
    """Names the present or last trainer; '' before the first."""
    return lock_holder(self._root)

  def check_writable(self) -> bool:
    """Creates the directory of the run and writes there; raises StorageError if it cannot.

    Returns whether there is room: a run with several steps can make some (`make_room`).
    """
    with write_errors(
      f'--model_dir={self._root} is not a directory that can be written',
      'name another --model_dir',
      'Nothing was changed.',
    ):
      self._root.mkdir(parents=True, exist_ok=True)
      try:
        with tempfile.TemporaryFile(dir=self._root) as trial:
          trial.write(bytes(4096))
          trial.flush()
          os.fsync(trial.fileno())
      except OSError as error:
        if error.errno not in _FULL or len(self.find()) < 2:
          raise
        return False
      sync(self._root)  # which some file systems refuse
    return True

  def lock(self, process: int | None = None) -> DiskLock:
    """Takes the lock of the run, or of the number of a process; raises as `DiskLock`."""
    return DiskLock(self._root, process)

  def unfinished(self, step: int) -> pathlib.Path:
    """The folder of a step while it is being written, for Orbax."""
    return self.place / f'{step}.unfinished-{self._token()}'

  def _token(self) -> str:
    """The random digits of the trainer, by which all of its processes name folders."""
    _, _, digits = self.holder().rpartition(' ')
    return digits.strip()

  def open(self) -> None:
    """Creates the checkpoint folder. This method and all below require the lock."""
    self.place.mkdir(exist_ok=True)
    owned.remove_litter(self.place)

  def begin(self, step: int) -> None:
    """Creates the folder of an unfinished step, with nothing but a mark."""
    place = self.unfinished(step)
    self.discard(step)  # what a save that has failed wrote after its deletion
    self._put_away(place, step)  # what `discard` could not delete
    place.mkdir()
    owned.mark(place)
    self._begun.add(place)

  def finish(self, step: int, record: bytes) -> None:
    """Flushes the run's JSON lines, adds record and manifest to a step, and makes it valid."""
    place = self.unfinished(step)
    (place / 'record.json').write_bytes(record)
    lines_of_run = self._root.glob('*.jsonl')
    lines_of_folders = self._root.glob('*/*.jsonl')
    for lines in (*lines_of_run, *lines_of_folders):
      with contextlib.suppress(FileNotFoundError, PermissionError):  # of another user
        if lines.is_file():
          sync(lines)
    write_manifest(place, step)
    self._begun.discard(place)
    owned.remove_mark(place)
    if self.is_saved(step):
      self._put_away(self.path(step), step)  # a save has failed after its rename
    elif os.path.lexists(self.path(step)):
      self.set_aside({step: 'somebody else has made it'})
    owned.move(place, self.path(step))
    sync(self.place)

  def is_saved(self, step: int) -> bool:
    """Whether a folder is a step that a run has saved, valid or damaged, by its whole manifest."""
    return bool(manifest.recorded(self.files(step), step))

  def discard(self, step: int) -> None:
    """Deletes an unfinished step, as far as it can."""
    with contextlib.suppress(OSError):
      self._delete(self.unfinished(step), step)

  def delete(self, steps: Iterable[int]) -> list[str]:
    """Deletes steps, and what interrupted saves and deletions have left; returns what failed."""
    problems = []
    for step in steps:
      try:
        self._put_away(self.path(step), step)  # a partly deleted folder has no step's name
      except OSError as error:
        problems.append(f'{self.path(step)} cannot be deleted ({error.strerror})')
    for place in self.place.iterdir():
      step = manifest.litter_of(place.name)
      if step is not None:
        try:
          others = self._delete(place, step)
        except OSError as error:
          problems.append(f'{place} cannot be deleted ({error.strerror})')
          continue
        if others:
          shown = ', '.join(first_of(others, _SHOWN))
          problems.append(f'{place} has {shown}, which this program has not made')
    return problems

  def _put_away(self, place: pathlib.Path, step: int) -> None:
    """Renames a folder of this program, if it is there, for `delete`."""
    if not os.path.lexists(place):
      return
    token = self._token()

    def target(name: str) -> pathlib.Path:
      return place.with_name(f'{name}.deleted-{token}')

    name = free_name(str(step), lambda name: os.path.lexists(target(name)))
    owned.move(place, target(name))

  def _delete(self, place: pathlib.Path, step: int) -> list[str]:
    """Deletes the files of a step that this program has made; returns the others."""
    self._mark_again(place)
    # The mark has the folder's first name: a folder that was put away has only its manifest.
    if owned.delete_marked(place):
      return []
    names = manifest.recorded(DiskFiles(place), step)
    if not names and DiskFiles(place).names() == [owned.MARK]:
      names = [owned.MARK]  # half a mark, left by a full disk or a kill
    owned.delete_recorded(place, names)
    owned.delete_empty(place)
    if not place.is_dir():
      return []
    return DiskFiles(place).names()

  def _mark_again(self, place: pathlib.Path) -> None:
    """Marks a folder that this process has made and deleted, if it is there again.

    After a save that has failed, a thread of Orbax may write on, and make the folder for it.
    """
    is_folder = place.is_dir() and not place.is_symlink()
    if place in self._begun and is_folder and not os.path.lexists(place / owned.MARK):
      owned.mark(place)

  def others(self) -> list[str]:
    """The names beside the steps that no save and no deletion of this version has made."""
    others = []
    for place in self.place.iterdir():
      is_litter = manifest.litter_of(place.name) is not None
      is_known = is_step(place.name) or place.name == SET_ASIDE
      if not is_known and not is_litter:
        others.append(place.name)
    return sorted(others)

  def set_aside(self, damaged: Mapping[int, str]) -> None:
    """Moves damaged steps, {step: damage}, beside earlier ones of the same number; logs where."""
    for step, damage in damaged.items():
      with storage_errors(
        f'{self.path(step)} is damaged ({damage}), and cannot be moved to {SET_ASIDE}',
        'Move it away, and run the same command again.',
      ):
        place = self._moved_aside(step)
      logging.warning('Moved %s to %s', self.path(step), place)

  def _moved_aside(self, step: int) -> pathlib.Path:
    """Moves a step; beside the others if `checkpoints` is a link to another disk."""
    try:
      return _moved_into(self._root / SET_ASIDE, self.path(step))
    except OSError as error:
      if error.errno != errno.EXDEV:
        raise
    with contextlib.suppress(OSError):
      owned.delete_recorded(self._root / SET_ASIDE, [])  # if it is empty
    return _moved_into(self.place / SET_ASIDE, self.path(step))


Steps = DiskSteps | BucketSteps  # with the same methods, which `DiskSteps` describes
Lock = DiskLock | BucketLock


def steps_of(model_dir: str | os.PathLike) -> Steps:
  """The steps of a run, not read yet; for the argument and errors see `opened`."""
  directory = opened(model_dir)
  if isinstance(directory, BucketDirectory):
    return BucketSteps(directory)
  return DiskSteps(directory)


def write_manifest(place: pathlib.Path, step: int) -> None:
  """Hashes the files of a step, writes their manifest, and flushes everything to disk."""
  files = DiskFiles(place, sync=True)
  names = [name for name in files.names() if name != owned.MARK]
  digests_of_names = files.digests(names, manifest.SHA256)
  digests = dict(zip(names, digests_of_names, strict=True))
  file = place / manifest.name(manifest.SHA256)
  file.write_bytes(manifest.content(step, digests))
  sync(file)
  sync(place)
  for path in place.rglob('*'):
    if path.is_dir():
      sync(path)


def sync(path: pathlib.Path) -> None:
  """Flushes a file, or the list of a directory's files, to disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _moved_into(folder: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
  """Moves a step into a folder, under a name that is free there; returns its new path."""
  folder.mkdir(exist_ok=True)
  name = free_name(place.name, lambda name: os.path.lexists(folder / name))
  target = folder / name
  owned.rename(place, target)
  return target
