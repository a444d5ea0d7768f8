"""The steps of a run in a bucket, which has neither folders nor renames.

    checkpoints/500.unfinished-0b9c.../     a running save of the trainer with that token

One object, `trainer.lock`, is the lock of the trainer and the list of the valid steps:

    {"token": "0b9c...", "process": 31, "host": "a", "beat": 12, "ended": false,
     "steps": [400, 500], "unfinished": [300]}

`storage.lease` writes the first four fields. Objects of the unfinished steps are being written or
deleted. A step is valid when `steps` names it, which is written last. A run without that object,
such as one that was copied from a disk, has the steps with a manifest.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import hashlib
import json
import logging
from typing import Any
import uuid

from etils import epath

from valkyrie import foreign
from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.manifest import FOLDER, SET_ASIDE, is_step
from valkyrie.errors import StorageError, reason_of, storage_errors
from valkyrie.storage import foreign_names
from valkyrie.storage.bucket import Bucket, Object
from valkyrie.storage.lease import Lease, lock_name
from valkyrie.storage.run_directory import BucketDirectory

_MANIFESTS = tuple(manifest.name(algorithm) for algorithm in (manifest.SHA256, manifest.MD5))


class BucketLock(Lease):
  """The lock of a run in a bucket, with the list of its steps; the arguments are `DiskLock`'s."""

  def __init__(self, bucket: Bucket, process: int | None = None):
    self._bucket, self._name = bucket, lock_name(process)
    super().__init__(f'{bucket}/{self._name}', bucket, process)

  def _read(self) -> tuple[dict[str, Any], int]:
    return read_lock(self._bucket, self._name)

  def _write(self, content: Mapping[str, Any], version: int) -> int:
    return self._bucket.write(self._name, json.dumps(content).encode(), replaces=version)


def read_lock(bucket: Bucket, name: str = lock_name(None)) -> tuple[dict[str, Any], int]:
  """The content of a lock, and its generation; a content without a token, and 0, without one.

  Raises a StorageError if steps or token, which become names of folders, are of another form.
  """
  found, generation = {}, 0
  with contextlib.suppress(FileNotFoundError, ValueError):  # a run that was copied from a disk
    text, generation = bucket.read(name)
    found = foreign.json_object(text)
  found = {'steps': None, 'unfinished': [], **found}
  steps = [found['steps'] or [], found['unfinished']]
  numbers = all(isinstance(some, list) and all(is_step(repr(s)) for s in some) for some in steps)
  if not (numbers and foreign_names.is_below(found.get('token', 'none'))):
    raise StorageError(
      f'{bucket}/{name} is not the lock of a trainer: it has {found!r:.200}. If nothing trains '
      'there, delete it: the steps with a manifest are then used.'
    )
  return found, generation


class BucketFiles:
  """The objects of a step in a folder, which ends with a slash, as `manifest.Files`."""

  def __init__(self, bucket: Bucket, folder: str):
    self._bucket, self._folder = bucket, folder
    self.objects = bucket.objects(folder)

  def read(self, name: str) -> bytes:
    return self._bucket.read(self._folder + name)[0]

  def has(self, name: str) -> bool:
    return self._folder + name in self.objects

  def names(self) -> list[str]:
    return [name.removeprefix(self._folder) for name in self.objects]

  def digests(self, names: Iterable[str], algorithm: str) -> Iterator[str]:
    """MD5 digests come from the bucket's metadata; other algorithms read the objects."""
    for name in names:
      known = self.objects[self._folder + name].md5 if algorithm == manifest.MD5 else None
      yield known or hashlib.new(algorithm, self.read(name)).hexdigest()

  def size(self) -> int:
    return sum(found.size for found in self.objects.values())


class BucketSteps:
  """The steps of a run, with the methods of `DiskSteps`."""

  def __init__(self, directory: BucketDirectory):
    self._directory, self._bucket = directory, directory.bucket
    self._lock: Any = None  # the BucketLock of the trainer
    self.place = epath.Path(self._bucket.address) / FOLDER

  def find(self) -> list[int]:
    """The steps in order."""
    steps = (self._lock.content if self._lock else read_lock(self._bucket)[0])['steps']
    return sorted(self._with_manifest() if steps is None else steps)

  def _with_manifest(self) -> set[int]:
    found = (name.split('/') for name in self._bucket.objects(f'{FOLDER}/'))
    return {int(p[1]) for p in found if len(p) == 3 and is_step(p[1]) and p[2] in _MANIFESTS}

  def files(self, step: int) -> BucketFiles:
    return BucketFiles(self._bucket, _folder(step))

  def path(self, step: int) -> Any:
    return self.place / str(step)

  def holder(self) -> str:
    with storage_errors(
      f'{self._bucket} cannot be read',
      'Give this machine the right to read objects there (roles/storage.objectViewer).',
    ):
      return read_lock(self._bucket)[0].get('token', '')

  def check_writable(self) -> bool:
    name = f'{uuid.uuid4().hex}.trial'
    with storage_errors(
      f'--model_dir={self._bucket} cannot be written',
      'Nothing was changed. Give this machine the right to make, read and delete objects there '
      '(roles/storage.objectUser), or name another --model_dir.',
    ):
      written = self._bucket.write(name, b'')
      self._bucket.delete({name: Object(0, None, written)})
    return True  # a bucket is never full

  def lock(self, process: int | None = None) -> BucketLock:
    lock = BucketLock(self._bucket, process)
    if process is None:
      self._lock = lock
      self._directory.copy()  # the trainer before may have written until now
    return lock

  def unfinished(self, step: int) -> Any:
    token = self._lock.content['token'] if self._lock else self.holder()
    return self.place / f'{step}.unfinished-{token}'

  def open(self) -> None:
    if self._lock.content['steps'] is None:
      self._lock.update(steps=sorted(self._with_manifest()))

  def begin(self, step: int) -> None:
    self._bucket.delete(self._bucket.objects(_folder(self.unfinished(step).name)))

  discard = begin

  def finish(self, step: int, record: bytes) -> None:
    """Copies the objects of an unfinished step to their final names, and then lists the step."""
    self._directory.upload()  # the metrics of a step are there before the step
    source, target = _folder(self.unfinished(step).name), _folder(step)
    saved, others = BucketFiles(self._bucket, source), self._lock.content['unfinished']
    try:
      # What is there is of a save that was interrupted.
      self._delete_safely([target], unfinished=[*others, step])
      self._bucket.copy(saved.objects, source, target)
      names = saved.names()
      digests = dict(zip(names, saved.digests(names, manifest.MD5), strict=True))
      digests['record.json'] = hashlib.md5(record).hexdigest()
      self._bucket.write(target + 'record.json', record, replaces=0)
      text = manifest.content(step, digests)
      self._bucket.write(target + manifest.name(manifest.MD5), text, replaces=0)
      if damage := manifest.damage(self.files(step), step):
        raise OSError(f'{self.path(step)} is not what was saved: {damage}')
    except OSError:
      self._lock.check()  # perhaps another trainer was in the way
      raise
    self._lock.update(steps=[*self.find(), step], unfinished=others)
    self._bucket.delete(saved.objects)

  def is_saved(self, step: int) -> bool:
    return bool(manifest.recorded(self.files(step), step))

  def others(self) -> list[str]:
    objects, folders = self._bucket.browse(f'{FOLDER}/')
    names = sorted(name.split('/')[1] for name in [*objects, *folders])
    return [n for n in names if n and not is_step(n) and manifest.litter_of(n) is None]

  def _delete_safely(self, folders: Iterable[str], **fields: Any) -> None:
    """Changes the lock, then deletes folders."""
    listed = [self._bucket.objects(folder) for folder in folders]
    self._lock.update(**fields)  # raises unless still held: nothing listed is another's
    for found in listed:
      self._bucket.delete(found)

  def delete(self, steps: Iterable[int]) -> list[str]:
    try:
      self._give_up(list(steps))
      self._delete_litter()
    except OSError as error:
      return [f'what is left of steps in {self.place} cannot be deleted ({reason_of(error)})']
    return []

  def _give_up(self, steps: list[int]) -> None:
    """Stops listing steps; the next `_delete_litter` deletes their objects."""
    if steps:
      unfinished = [*self._lock.content['unfinished'], *steps]
      self._lock.update(steps=[s for s in self.find() if s not in steps], unfinished=unfinished)

  def _delete_litter(self) -> None:
    """Deletes what the lock lists as unfinished; a step that it does not know is set aside."""
    _, folders = self._bucket.browse(f'{FOLDER}/')
    names = [folder.split('/')[1] for folder in folders]
    unlisted = {int(name) for name in names if is_step(name)} - {*self.find()}
    if unknown := unlisted - {*self._lock.content['unfinished']}:
      self._lock.update()  # if the lock is still held, it was held at the listing: they are its own
      self.set_aside({step: f'{lock_name(None)} does not name it' for step in sorted(unknown)})
    left = [name for name in names if manifest.litter_of(name) is not None]
    if litter := left + sorted(unlisted):
      self._delete_safely(map(_folder, litter))
    if self._lock.content['unfinished']:
      self._lock.update(unfinished=[])

  def set_aside(self, damaged: Mapping[int, str]) -> None:
    for step, damage in damaged.items():
      name = manifest.free(str(step), lambda n: self._bucket.objects(f'{SET_ASIDE}/{n}/'))
      source, target = _folder(step), f'{SET_ASIDE}/{name}/'
      self._bucket.copy(self._bucket.objects(source), source, target)
      self._give_up([step])
      logging.warning(
        '%s is not valid: %s. Moved to %s/%s', self.path(step), damage, self._bucket, target
      )


def _folder(name: int | str) -> str:
  return f'{FOLDER}/{name}/'
