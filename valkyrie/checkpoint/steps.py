"""The steps of a run: each appears and disappears as a whole. On a disk a renamed folder does that.

Only what this program made is deleted: a save has a mark in its folder until it is whole, and a
step has a manifest of its files. `storage.owned` deletes both.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import errno
import logging
import math
import os
import pathlib
import tempfile
from typing import Any

from valkyrie import foreign
from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.bucket_steps import BucketLock, BucketSteps
from valkyrie.checkpoint.manifest import FOLDER, SET_ASIDE, DiskFiles, is_step
from valkyrie.errors import (
  ConfigurationError,
  StorageError,
  first_of,
  storage_errors,
  with_home,
  write_errors,
)
from valkyrie.storage import owned
from valkyrie.storage.lease import DiskLock, lock_holder
from valkyrie.storage.run_directory import BucketDirectory, opened

# Steps to read, beside numbers.
LATEST = 'latest'
BEST = 'best'
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

    name = manifest.free(str(step), lambda name: os.path.lexists(target(name)))
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


def first_valid(
  steps: Steps,
  order: Iterable[int],
  once: bool = False,
) -> tuple[int | None, dict[int, str]]:
  """The first valid step in an order, None if it is empty; and {step: damage} of steps before it.

  Logs these. With `once`, files that this process has read so are read again only if they have
  changed since. Raises a StorageError if all steps are damaged.
  """
  damaged = {}
  for step in order:
    with storage_errors(
      f'Step {step} in {steps.place} cannot be read, so that nobody can tell whether it is valid',
      'Nothing was changed. Repair the disk and run the same command again, or move '
      f'{steps.path(step)} away to use the step before.',
    ):
      damage = manifest.damage(steps.files(step, once), step)
    if damage is None:
      for other, its_damage in damaged.items():
        log = '%s is damaged: %s. Step %s is used in its place'
        logging.warning(log, steps.path(other), its_damage, step)
      return step, damaged
    damaged[step] = damage
  if damaged:
    described = [f'  step {step}: {damage}' for step, damage in damaged.items()]
    lines = '\n'.join(described)
    raise StorageError(
      f'All steps in {steps.place} are damaged, so that the run cannot continue from any:\n'
      f'{lines}\nNothing was changed. Restore the directory from a copy, move it away to start '
      'from step 0, or name another --model_dir.'
    )
  return None, {}


def in_order_of_preference(steps: Steps, step: str) -> list[int]:
  """The steps to read for LATEST, BEST or a number; ConfigurationError if there is none."""
  saved = steps.find()
  if step == LATEST:
    return saved[::-1]
  if step == BEST:
    chosen = best_first(steps, saved)
    missing = 'step with a validation loss'
  else:
    chosen = [number for number in saved if str(number) == step]
    missing = f'step {step}'
  if not chosen:
    present = ', '.join(map(str, saved)) or 'no steps'
    raise ConfigurationError(
      f'{steps.place} has no {missing}. It has {present}. Name one of these, or latest.'
    )
  return chosen


def best_first(steps: Steps, saved: Iterable[int]) -> list[int]:
  """Those steps that have a finite validation loss, the lowest first."""
  losses = {}
  for step in saved:
    with contextlib.suppress(StorageError):  # a record that was damaged meanwhile
      record_of_step = record(steps, step)
      loss = record_of_step.get('validation_loss')
      if isinstance(loss, float) and math.isfinite(loss):
        losses[step] = loss

  def loss_and_step(step: int) -> tuple[float, int]:
    return losses[step], step

  return sorted(losses, key=loss_and_step)


def superseded(
  steps: Steps,
  saved: Sequence[int],
  keep: int,
  keep_period: int | None,
  keep_best: int,
) -> list[int]:
  """The steps that are not kept, of all `saved` ones in order; never the newest one.

  For the numbers to keep, see `manager.Checkpoints`.
  """
  best = best_first(steps, saved)
  kept = set(best[:keep_best])
  if keep_period:
    of_period = [step for step in saved if step % keep_period == 0]
    kept.update(of_period)
  newest_count = max(1, keep)
  kept.update(saved[-newest_count:])
  return [step for step in saved if step not in kept]


def record(steps: Steps, step: int) -> dict[str, Any]:
  """The record of a step; raises StorageError if it cannot be read."""
  message = f'The record of step {step} in {steps.place} cannot be read'
  with storage_errors(message, also=(ValueError,)):
    content = steps.files(step).read('record.json')
    return foreign.json_object(content)


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
  name = manifest.free(place.name, lambda name: os.path.lexists(folder / name))
  target = folder / name
  owned.rename(place, target)
  return target
