"""The steps of a run in its storage: each appears and disappears as a whole."""

from collections.abc import Iterable, Mapping
import contextlib
import json
import math
import os
from typing import Any, Protocol

from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.bucket_steps import BucketSteps
from valkyrie.checkpoint.disk_steps import DiskSteps
from valkyrie.checkpoint.manifest import Files
from valkyrie.errors import ConfigurationError, StorageError, storage_errors
from valkyrie.storage.run_directory import BucketDirectory, opened

LATEST, BEST = 'latest', 'best'  # steps to read, beside numbers


class Lock(Protocol):
  """The lock of a run, which one trainer holds."""

  @property
  def is_in_place(self) -> bool:
    """Whether the run is still that of this trainer."""
    ...

  def check(self) -> None:
    """Raises StorageError if the run is no longer that of this trainer."""
    ...

  def release(self) -> None:
    """Frees the lock."""
    ...


class Steps(Protocol):
  """The steps of one run. Methods raise OSError if the storage refuses.

  Attributes:
    place: the folder of the steps, for messages.
  """

  place: Any

  def find(self) -> list[int]:
    """The steps in order, valid or damaged; none without a run."""
    ...

  def files(self, step: int) -> Files:
    """The files of a step."""
    ...

  def path(self, step: int) -> Any:
    """The folder of a step, for Orbax."""
    ...

  def size(self, step: int) -> int:
    """The bytes of a step."""
    ...

  def holder(self) -> str:
    """Names the present or last trainer; '' before the first."""
    ...

  def check_writable(self) -> None:
    """Makes the directory of the run, and writes there; raises StorageError if it cannot."""
    ...

  def lock(self, process: int | None = None) -> Lock:
    """Takes the lock of the run, or that of the number of a process.

    Raises:
      StorageError: another trainer has it.
      Unreachable: another process has that of the number.
    """
    ...

  def unfinished(self, step: int) -> Any:
    """The folder of a step while it is being written, for Orbax."""
    ...

  def open(self) -> None:
    """Makes the folder of the steps; as all that follow, for the process with the lock."""
    ...

  def begin(self, step: int) -> None:
    """Makes the folder of an unfinished step, empty."""
    ...

  def finish(self, step: int, record: bytes) -> None:
    """Adds record and manifest to an unfinished step, after which it counts.

    The lines that the run has written before are kept first.
    """
    ...

  def discard(self, step: int) -> None:
    """Deletes an unfinished step, as far as it can."""
    ...

  def delete(self, steps: Iterable[int]) -> list[str]:
    """Deletes steps, and the remainders of interrupted saves and deletions.

    Returns why something could not be deleted, for each such thing.
    """
    ...

  def set_aside(self, damaged: Mapping[int, str]) -> None:
    """Moves damaged steps, beside earlier ones of the same number, and logs {step: damage}."""
    ...


def steps_of(model_dir: str | os.PathLike) -> Steps:
  """The steps of a run; reads nothing yet.

  Args:
    model_dir: the directory of the run, the address of one in a bucket, or what
      `run_directory.opened` has made of it.

  Raises:
    ConfigurationError: no run can be there, or the packages for a bucket are missing.
    StorageError: the bucket cannot be read.
  """
  directory = opened(model_dir)
  return BucketSteps(directory) if isinstance(directory, BucketDirectory) else DiskSteps(directory)


def first_valid(steps: Steps, order: Iterable[int]) -> tuple[int | None, dict[int, str]]:
  """Reads steps in the given order until one is valid.

  Returns:
    The valid step, or None if there are no steps; and {step: damage} of the steps before it.

  Raises:
    StorageError: all steps are damaged.
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
  """The steps to read for LATEST, BEST or a number, the preferred one first.

  Raises:
    ConfigurationError: the run has no such step.
  """
  found = steps.find()
  if step == LATEST:
    return found[::-1]
  if step == BEST:
    losses = validation_losses(steps, found)
    chosen = sorted(losses, key=lambda saved: (losses[saved], saved))
  else:
    chosen = [saved for saved in found if str(saved) == step]
  if not chosen:
    missing = 'step with a validation loss' if step == BEST else f'step {step}'
    raise ConfigurationError(
      f'{steps.place} has no {missing}. It has {", ".join(map(str, found)) or "no steps"}.'
    )
  return chosen


def validation_losses(steps: Steps, saved: Iterable[int]) -> dict[int, float]:
  """{step: its validation loss}, of those steps that have a finite one."""
  losses = {}
  for step in saved:
    with contextlib.suppress(StorageError):  # a record that was damaged meanwhile
      losses[step] = record(steps, step).get('validation_loss')
  return {
    step: loss for step, loss in losses.items() if isinstance(loss, float) and math.isfinite(loss)
  }


def record(steps: Steps, step: int) -> dict[str, Any]:
  """The record of a step; raises StorageError if it cannot be read."""
  with storage_errors(
    f'The record of step {step} in {steps.place} cannot be read', also=(ValueError, RecursionError)
  ):
    found = json.loads(steps.files(step).read('record.json'))
    if not isinstance(found, dict):
      raise ValueError('it is not a JSON object')
    return found
