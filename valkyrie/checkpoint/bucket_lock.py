"""The lock of a trainer in a bucket, and the list of the steps that count: one object.

    {"token": "0b9c...", "process": 31, "host": "a", "beat": 12, "ended": false,
     "steps": [400, 500], "unfinished": [300]}

`holder` has the first four fields. Of the unfinished steps, objects are being written or deleted.

Every write of it depends on the one before. So a trainer that was paused for longer than its lease,
and has lost it, can add no step: there is no moment between its check and its write.
"""

from collections.abc import Mapping
import contextlib
import json
import threading
from typing import Any

from valkyrie.checkpoint import holder
from valkyrie.checkpoint.holder import Holder, LeaseTaken
from valkyrie.checkpoint.steps import is_step
from valkyrie.errors import StorageError, Unreachable, storage_errors
from valkyrie.storage import foreign_names
from valkyrie.storage.bucket import Bucket, Changed

NAME = 'trainer.lock'


def read(bucket: Bucket, name: str = NAME) -> tuple[dict[str, Any], int]:
  """The content of a lock, and its generation; empty and 0 without one.

  Raises:
    StorageError: it has other steps than numbers, or an odd token; both become names of folders.
  """
  try:
    content, generation = bucket.read(name)
  except FileNotFoundError:
    return {}, 0
  try:
    found = json.loads(content)
  except (ValueError, RecursionError):  # a run that was copied from a disk
    found = None
  found = found if isinstance(found, dict) else {}
  steps = [found.get('steps') or [], found.get('unfinished', [])]
  numbers = all(isinstance(some, list) and all(is_step(repr(s)) for s in some) for some in steps)
  if not (numbers and foreign_names.is_below(found.get('token', 'none'))):
    raise StorageError(
      f'{bucket}/{name} is not the lock of a trainer: it has {found!r:.200}. If nothing trains '
      'there, delete it: the steps with a manifest are then used.'
    )
  return found, generation


class BucketLock:
  """The lock of a run in a bucket, as `steps.Lock`; a thread renews it until `release`.

  Raises:
    StorageError: another process has it, or the bucket cannot be used.
    Unreachable: another process has that of the number.
  """

  def __init__(self, bucket: Bucket, process: int | None = None):
    """Takes the lock of the run, which has the steps, or that of the number of a process."""
    self._bucket = bucket
    self._name = NAME if process is None else f'trainer-{process}.lock'
    self._place = f'{bucket}/{self._name}'
    self._writing = threading.Lock()
    self._lost = False
    self._holder = Holder()
    try:
      with storage_errors(f'{self._place} cannot be locked'):
        self._content, self._generation = self._taken()
    except LeaseTaken as error:
      if process is not None:
        raise Unreachable(
          f'{error} is process {process} of the run in {bucket} already. Give each process its own '
          '--process. To replace it, run the same command again after its end.'
        ) from error
      raise StorageError(
        f'{error} is training in {bucket}, and two trainers would overwrite each other. Wait for '
        'it or stop it, or name another --model_dir.'
      ) from error
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._renew, name='lease', daemon=True)
    self._thread.start()

  @property
  def content(self) -> Mapping[str, Any]:
    """What the object has."""
    return self._content

  @property
  def is_in_place(self) -> bool:
    """Whether the lock is still that of this trainer."""
    found, _ = read(self._bucket, self._name)
    return not self._lost and found.get('token') == self._content['token']

  def check(self) -> None:
    """Raises StorageError if the lock is no longer that of this trainer."""
    with storage_errors(f'{self._place} cannot be read'):
      if not self.is_in_place:
        self._raise_lost()

  def update(self, **fields: Any) -> None:
    """Changes fields of the object, all at once.

    Raises:
      StorageError: the lock is no longer that of this trainer; nothing is changed.
      OSError: the bucket cannot be written.
    """
    with self._writing:
      if self._lost:
        self._raise_lost()
      new = {**self._content, **fields}
      self._generation = self._written(new)
      self._content = new

  def release(self) -> None:
    """Frees the lock; the steps stay."""
    self._over.set()
    self._thread.join()
    with contextlib.suppress(OSError, StorageError):
      self.update(ended=True)
    self._holder.end()

  def _taken(self) -> tuple[dict[str, Any], int]:
    """Writes the lock of this process, and returns its content and its generation."""
    mine = {**self._holder.lease, 'ended': False}
    while True:
      found, generation = read(self._bucket, self._name)
      if (held := _held(found)) is not None:
        holder.wait_for_end(held, lambda: _held(read(self._bucket, self._name)[0]))
      mine |= {'steps': found.get('steps'), 'unfinished': found.get('unfinished', [])}
      with contextlib.suppress(Changed):  # by another trainer, or by the holder as it ended
        return mine, self._bucket.write(self._name, _encoded(mine), replaces=generation)

  def _written(self, new: dict[str, Any]) -> int:
    while True:
      try:
        return self._bucket.write(self._name, _encoded(new), replaces=self._generation)
      except Changed:
        found, self._generation = read(self._bucket, self._name)
        if found.get('token') != self._content['token']:
          self._lost = True
          self._raise_lost()
        # else an earlier write of this process, for which no answer came

  def _raise_lost(self) -> None:
    raise StorageError(
      f'{self._place} is no longer that of this run: another trainer has taken it over, for '
      'instance while this one was paused or did not reach the bucket, or somebody has deleted it. '
      'No step was added. To go on, run the same command again after the end of the other one.'
    )

  def _renew(self) -> None:
    while not self._over.wait(holder.BEAT_SECONDS):
      with contextlib.suppress(OSError, StorageError):  # the next beat, or the next save, will see
        self.update(beat=self._content['beat'] + 1)


def _held(content: dict[str, Any]) -> dict[str, Any] | None:
  """The content of a lock that a process holds; None if none does."""
  return content if content.get('token') and not content.get('ended') else None


def _encoded(content: Mapping[str, Any]) -> bytes:
  return json.dumps(content).encode()
