"""The steps of a run: each appears and disappears as a whole. On a disk a renamed folder does that.

checkpoints/100.deleted/      a step that is being deleted
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
import contextlib
import hashlib
import logging
import math
import os
import pathlib
import shutil
import tempfile
from typing import Any

from valkyrie import foreign
from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.bucket_steps import BucketLock, BucketSteps
from valkyrie.checkpoint.manifest import FOLDER, SET_ASIDE, is_litter, is_step
from valkyrie.errors import ConfigurationError, StorageError, storage_errors
from valkyrie.storage.lease import DiskLock, lock_holder
from valkyrie.storage.run_directory import BucketDirectory, opened

LATEST, BEST = 'latest', 'best'  # steps to read, beside numbers
_READERS = 4  # threads: hashing releases Python's lock


class DiskFiles:
  """The files of a step in a folder, as `manifest.Files`."""

  def __init__(self, place: pathlib.Path, sync: bool = False):
    self._place, self._sync = place, sync  # each file to disk after its digest

  def read(self, name: str) -> bytes:
    return foreign.content(self._place / name)

  def has(self, name: str) -> bool:
    # A symbolic link would leave the step.
    file = self._place / name
    return file.is_file() and file.resolve() == self._place.resolve() / name

  def names(self) -> list[str]:
    # A link to a folder is listed: its files would be read, and are not in the manifest.
    found = (path for path in self._place.rglob('*') if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(self._place).as_posix() for path in found)

  def digests(self, names: Iterable[str], algorithm: str) -> Iterator[str]:
    def of_file(name):
      with open(self._place / name, 'rb') as file:
        digest = hashlib.file_digest(file, algorithm).hexdigest()
        if self._sync:
          os.fsync(file.fileno())
      return digest

    with ThreadPoolExecutor(_READERS) as readers:
      yield from readers.map(of_file, names)

  def size(self) -> int:
    """Bytes."""
    return sum(file.stat().st_size for file in self._place.rglob('*'))


class DiskSteps:
  """The steps of a run, whose directory need not exist; OSError if the file system refuses."""

  def __init__(self, model_dir: str | os.PathLike):
    self._root = pathlib.Path(os.path.abspath(os.path.expanduser(model_dir)))
    self.place = self._root / FOLDER  # also for messages

  def find(self) -> list[int]:
    """The steps in order, valid or damaged; raises StorageError if one is a symbolic link."""
    steps = []
    for place in self.place.iterdir() if self.place.is_dir() else ():
      if is_step(place.name):
        if place.is_symlink():
          raise StorageError(
            f'{place} is a symbolic link, but a step must be a directory. Move the step itself '
            'there, or remove the link.'
          )
        steps.append(int(place.name))
    return sorted(steps)

  def files(self, step: int) -> DiskFiles:
    return DiskFiles(self.path(step))

  def path(self, step: int) -> pathlib.Path:
    """The folder of a step, for Orbax."""
    return self.place / str(step)

  def holder(self) -> str:
    """Names the present or last trainer; '' before the first."""
    return lock_holder(self._root)

  def check_writable(self) -> None:
    """Creates the directory of the run and writes there; raises StorageError if it cannot."""
    with storage_errors(
      f'--model_dir={self._root} is not a directory that can be written',
      'Nothing was changed. Name another --model_dir, or make room there.',
    ):
      try:
        self._root.mkdir(parents=True, exist_ok=True)
      except (FileExistsError, NotADirectoryError) as error:
        raise OSError('there is a file of that name, or above it') from error
      with tempfile.TemporaryFile(dir=self._root) as trial:
        trial.write(bytes(4096))
        trial.flush()
        os.fsync(trial.fileno())
      sync(self._root)  # which some file systems refuse

  def lock(self, process: int | None = None) -> DiskLock:
    """Takes the lock of the run, or of the number of a process; raises as `DiskLock`."""
    return DiskLock(self._root, process)

  def unfinished(self, step: int) -> pathlib.Path:
    """The folder of a step while it is being written, for Orbax."""
    return self.place / f'{step}.unfinished'

  def open(self) -> None:
    """Creates the checkpoint folder. This method and all below require the lock."""
    self.place.mkdir(exist_ok=True)

  def begin(self, step: int) -> None:
    """Creates the folder of an unfinished step, empty."""
    place = self.unfinished(step)
    _free_name(place)  # of what `discard` could not delete
    place.mkdir()

  def finish(self, step: int, record: bytes) -> None:
    """Flushes the run's JSON lines, adds record and manifest to a step, and makes it valid."""
    place = self.unfinished(step)
    (place / 'record.json').write_bytes(record)
    for lines in (*self._root.glob('*.jsonl'), *self._root.glob('*/*.jsonl')):
      with contextlib.suppress(FileNotFoundError, PermissionError):  # of another user
        if lines.is_file():
          sync(lines)
    write_manifest(place, step)
    _free_name(self.path(step))  # of a save that failed after its rename
    place.rename(self.path(step))
    sync(self.place)

  def discard(self, step: int) -> None:
    """Deletes an unfinished step, as far as it can."""
    shutil.rmtree(self.unfinished(step), ignore_errors=True)

  def delete(self, steps: Iterable[int]) -> list[str]:
    """Deletes steps, and what interrupted saves and deletions have left; returns what failed."""
    problems = []
    for step in steps:
      try:
        _free_name(self.path(step))  # a partly deleted folder has no step's name
      except OSError as error:
        problems.append(f'{self.path(step)} cannot be deleted ({error.strerror})')
    for place in self.place.iterdir():
      if is_litter(place.name):
        try:
          shutil.rmtree(place)
        except OSError as error:
          problems.append(f'{place} cannot be deleted ({error.strerror})')
    return problems

  def set_aside(self, damaged: Mapping[int, str]) -> None:
    """Moves damaged steps, beside earlier ones of the same number, and logs {step: damage}."""
    target = self._root / SET_ASIDE
    for step, damage in damaged.items():
      target.mkdir(exist_ok=True)
      place = target / manifest.free(str(step), lambda name: (target / name).exists())
      self.path(step).rename(place)
      logging.warning('%s is damaged: %s. Moved to %s', self.path(step), damage, place)


Steps = DiskSteps | BucketSteps  # with the same methods, which `DiskSteps` describes
Lock = DiskLock | BucketLock


def steps_of(model_dir: str | os.PathLike) -> Steps:
  """The steps of a run, not read yet; for the argument and errors see `opened`."""
  directory = opened(model_dir)
  return BucketSteps(directory) if isinstance(directory, BucketDirectory) else DiskSteps(directory)


def first_valid(steps: Steps, order: Iterable[int]) -> tuple[int | None, dict[int, str]]:
  """The first valid step in an order, None if it is empty; and {step: damage} of steps before it.

  Raises a StorageError if all steps are damaged.
  """
  damaged = {}
  for step in order:
    damage = manifest.damage(steps.files(step), step)
    if damage is None:
      return step, damaged
    damaged[step] = damage
  if damaged:
    lines = '\n'.join(f'  step {step}: {damage}' for step, damage in damaged.items())
    raise StorageError(
      f'All steps in {steps.place} are damaged, so that the run cannot continue from any:\n'
      f'{lines}\nNothing was changed. Restore the directory from a copy, move it away to start '
      'from step 0, or name another --model_dir.'
    )
  return None, {}


def in_order_of_preference(steps: Steps, step: str) -> list[int]:
  """The steps to read for LATEST, BEST or a number; ConfigurationError if there is none."""
  found = steps.find()
  if step == LATEST:
    return found[::-1]
  if step == BEST:
    chosen = best_first(steps, found)
  else:
    chosen = [saved for saved in found if str(saved) == step]
  if not chosen:
    missing = 'step with a validation loss' if step == BEST else f'step {step}'
    raise ConfigurationError(
      f'{steps.place} has no {missing}. It has {", ".join(map(str, found)) or "no steps"}.'
    )
  return chosen


def best_first(steps: Steps, saved: Iterable[int]) -> list[int]:
  """Those steps that have a finite validation loss, the lowest first."""
  losses = {}
  for step in saved:
    with contextlib.suppress(StorageError):  # a record that was damaged meanwhile
      loss = record(steps, step).get('validation_loss')
      if isinstance(loss, float) and math.isfinite(loss):
        losses[step] = loss
  return sorted(losses, key=lambda step: (losses[step], step))


def record(steps: Steps, step: int) -> dict[str, Any]:
  """The record of a step; raises StorageError if it cannot be read."""
  message = f'The record of step {step} in {steps.place} cannot be read'
  with storage_errors(message, also=(ValueError,)):
    return foreign.json_object(steps.files(step).read('record.json'))


def write_manifest(place: pathlib.Path, step: int) -> None:
  """Hashes the files of a step, writes their manifest, and flushes everything to disk."""
  files = DiskFiles(place, sync=True)
  names = files.names()
  digests = dict(zip(names, files.digests(names, manifest.SHA256), strict=True))
  file = place / manifest.name(manifest.SHA256)
  file.write_bytes(manifest.content(step, digests))
  for path in (file, place, *(path for path in place.rglob('*') if path.is_dir())):
    sync(path)


def sync(path: pathlib.Path) -> None:
  """Flushes a file, or the list of a directory's files, to disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _free_name(place: pathlib.Path) -> None:
  """Renames a folder, if it is there, for `delete`; one that could not be deleted may stand by."""
  number = place.name.partition('.')[0]
  name = manifest.free(number, lambda name: place.with_name(f'{name}.deleted').exists())
  if place.exists():
    place.rename(place.with_name(f'{name}.deleted'))
