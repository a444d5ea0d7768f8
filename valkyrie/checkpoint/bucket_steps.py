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
from valkyrie.errors import StorageError, reason_of
from valkyrie.storage import foreign_names
from valkyrie.storage.bucket import Bucket, Object, bucket_errors
from valkyrie.storage.free_names import free_name
from valkyrie.storage.lease import Lease, lock_name
from valkyrie.storage.run_directory import BucketDirectory

_MANIFESTS = tuple(manifest.name(algorithm) for algorithm in (manifest.SHA256, manifest.MD5))


class BucketLock(Lease):
  """The lock of a run in a bucket, with the list of its steps; the arguments are `DiskLock`'s."""

  def __init__(self, bucket: Bucket, process: int | None = None):
    self._bucket = bucket
    self._name = lock_name(process)
    super().__init__(f'{bucket}/{self._name}', bucket, process)

  def _read(self) -> tuple[dict[str, Any], int]:
    return read_lock(self._bucket, self._name)

  def _write(self, content: Mapping[str, Any], version: int) -> int:
    text = json.dumps(content)
    return self._bucket.write(self._name, text.encode(), replaces=version)


def read_lock(bucket: Bucket, name: str = lock_name(None)) -> tuple[dict[str, Any], int]:
  """The content of a lock, and its generation; a content without a token, and 0, without one.

  Raises a StorageError if steps or token, which become names of folders, are of another form.
  """
  content: dict[str, Any] = {'steps': None, 'unfinished': []}
  generation = 0
  with contextlib.suppress(FileNotFoundError, ValueError):  # a run that was copied from a disk
    text, generation = bucket.read(name)
    content |= foreign.json_object(text)
  saved = content['steps'] or []
  has_steps = _are_steps(saved) and _are_steps(content['unfinished'])
  token = content.get('token', 'none')
  if not has_steps or not foreign_names.is_below(token):
    raise StorageError(
      f'{bucket}/{name} is not the lock of a trainer: it has {content!r:.200}. If nothing trains '
      'there, delete it: the steps with a manifest are then used.'
    )
  return content, generation


def _are_steps(value: Any) -> bool:
  return isinstance(value, list) and all(is_step(repr(step)) for step in value)


class BucketFiles:
  """The objects of a step in a folder, which ends with a slash, as `manifest.Files`."""

  def __init__(self, bucket: Bucket, folder: str):
    self._bucket = bucket
    self._folder = folder
    self.objects = bucket.objects(folder)

  def read(self, name: str) -> bytes:
    content, _ = self._bucket.read(self._folder + name)
    return content

  def has(self, name: str) -> bool:
    return self._folder + name in self.objects

  def names(self) -> list[str]:
    return [name.removeprefix(self._folder) for name in self.objects]

  def digests(self, names: Iterable[str], algorithm: str) -> Iterator[str]:
    """MD5 digests come from the bucket's metadata; other algorithms read the objects."""
    for name in names:
      digest = None
      if algorithm == manifest.MD5:
        digest = self.objects[self._folder + name].md5
      if not digest:
        digest = hashlib.new(algorithm, self.read(name)).hexdigest()
      yield digest

  def size(self) -> int:
    return sum(entry.size for entry in self.objects.values())


class BucketSteps:
  """The steps of a run, with the methods of `DiskSteps`."""

  def __init__(self, directory: BucketDirectory):
    self._directory = directory
    self._bucket = directory.bucket
    self._lock: Any = None  # the BucketLock of the trainer
    self.place = epath.Path(self._bucket.address) / FOLDER

  def find(self) -> list[int]:
    """The steps in order."""
    if self._lock:
      content = self._lock.content
    else:
      content, _ = read_lock(self._bucket)
    if content['steps'] is None:
      return sorted(self._with_manifest())
    return sorted(content['steps'])

  def _with_manifest(self) -> set[int]:
    """The steps that have a manifest."""
    steps = set()
    for name in self._bucket.objects(f'{FOLDER}/'):
      _, _, rest = name.partition('/')
      step, _, file = rest.partition('/')
      if is_step(step) and file in _MANIFESTS:
        steps.add(int(step))
    return steps

  def files(self, step: int, once: bool = False) -> BucketFiles:
    return BucketFiles(self._bucket, _folder(step))

  def path(self, step: int) -> Any:
    return self.place / str(step)

  def holder(self) -> str:
    right = 'read objects there (roles/storage.objectViewer)'
    with bucket_errors(f'{self._bucket} cannot be read', right):
      content, _ = read_lock(self._bucket)
    return content.get('token', '')

  def check_writable(self) -> bool:
    name = f'{uuid.uuid4().hex}.trial'
    right = (
      'make, read and delete objects there (roles/storage.objectUser), or name another --model_dir'
    )
    with bucket_errors(f'--model_dir={self._bucket} cannot be written', right):
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
    folder = _folder(self.unfinished(step).name)
    left_over = self._bucket.objects(folder)
    self._bucket.delete(left_over)

  discard = begin

  def finish(self, step: int, record: bytes) -> None:
    """Copies the objects of an unfinished step to their final names, and then lists the step."""
    self._directory.upload()  # the metrics of a step are there before the step
    source = _folder(self.unfinished(step).name)
    target = _folder(step)
    saved = BucketFiles(self._bucket, source)
    unfinished = self._lock.content['unfinished']
    try:
      # An interrupted save may have left objects there.
      self._delete_safely([target], unfinished=[*unfinished, step])
      self._bucket.copy(saved.objects, source, target)
      self._write_manifest(saved, step, record)
      damage = manifest.damage(self.files(step), step)
      if damage:
        raise OSError(f'{self.path(step)} is not what was saved: {damage}')
    except OSError:
      self._lock.check()  # perhaps another trainer was in the way
      raise
    steps = [*self.find(), step]
    self._lock.update(steps=steps, unfinished=unfinished)
    self._bucket.delete(saved.objects)

  def _write_manifest(self, saved: BucketFiles, step: int, record: bytes) -> None:
    """Writes the record and the manifest of a step with these files."""
    names = saved.names()
    digests_of_names = saved.digests(names, manifest.MD5)
    digests = dict(zip(names, digests_of_names, strict=True))
    digests['record.json'] = hashlib.md5(record).hexdigest()
    target = _folder(step)
    self._bucket.write(f'{target}record.json', record, replaces=0)
    text = manifest.content(step, digests)
    manifest_name = manifest.name(manifest.MD5)
    self._bucket.write(target + manifest_name, text, replaces=0)

  def is_saved(self, step: int) -> bool:
    return bool(manifest.recorded(self.files(step), step))

  def others(self) -> list[str]:
    objects, folders = self._bucket.browse(f'{FOLDER}/')
    others = []
    for path in [*objects, *folders]:
      _, name, *_ = path.split('/')
      is_ours = is_step(name) or manifest.litter_of(name) is not None
      if name and not is_ours:
        others.append(name)
    return sorted(others)

  def _delete_safely(self, folders: Iterable[str], **fields: Any) -> None:
    """Changes the lock, then deletes folders."""
    listings = [self._bucket.objects(folder) for folder in folders]
    # Raises if the lock was lost: then these could be another trainer's objects.
    self._lock.update(**fields)
    for objects in listings:
      self._bucket.delete(objects)

  def delete(self, steps: Iterable[int]) -> list[str]:
    try:
      self._give_up(list(steps))
      self._delete_litter()
    except OSError as error:
      reason = reason_of(error)
      return [f'what is left of steps in {self.place} cannot be deleted ({reason})']
    return []

  def _give_up(self, steps: list[int]) -> None:
    """Stops listing steps; the next `_delete_litter` deletes their objects."""
    if steps:
      kept = [step for step in self.find() if step not in steps]
      unfinished = [*self._lock.content['unfinished'], *steps]
      self._lock.update(steps=kept, unfinished=unfinished)

  def _delete_litter(self) -> None:
    """Deletes the steps that the lock lists as unfinished; a step that it lacks is set aside."""
    _, folders = self._bucket.browse(f'{FOLDER}/')
    names = []
    for folder in folders:
      _, name, *_ = folder.split('/')
      names.append(name)
    present = {int(name) for name in names if is_step(name)}
    unlisted = present - set(self.find())
    unfinished = set(self._lock.content['unfinished'])
    unknown = unlisted - unfinished
    if unknown:
      # Raises if the lock was lost: then these could be another trainer's steps.
      self._lock.update()
      damage = f'{lock_name(None)} does not name it'
      self.set_aside(dict.fromkeys(sorted(unknown), damage))
    litter: list[int | str] = []
    for name in names:
      if manifest.litter_of(name) is not None:
        litter.append(name)
    litter += sorted(unlisted)
    if litter:
      self._delete_safely(map(_folder, litter))
    if self._lock.content['unfinished']:
      self._lock.update(unfinished=[])

  def set_aside(self, damaged: Mapping[int, str]) -> None:
    for step in damaged:
      name = free_name(str(step), lambda name: self._bucket.objects(f'{SET_ASIDE}/{name}/'))
      source = _folder(step)
      target = f'{SET_ASIDE}/{name}/'
      objects = self._bucket.objects(source)
      self._bucket.copy(objects, source, target)
      self._give_up([step])
      logging.warning('Moved %s to %s/%s', self.path(step), self._bucket, target)


def _folder(name: int | str) -> str:
  return f'{FOLDER}/{name}/'
