"""The steps of a run in its storage: each appears and disappears as a whole."""

from collections.abc import Iterable
import contextlib
import json
import math
import os
from typing import Any

from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.bucket_steps import BucketLock, BucketSteps
from valkyrie.checkpoint.disk_steps import DiskSteps
from valkyrie.errors import ConfigurationError, StorageError, storage_errors
from valkyrie.storage.lease import DiskLock
from valkyrie.storage.run_directory import BucketDirectory, opened

LATEST, BEST = 'latest', 'best'  # steps to read, beside numbers


Steps = DiskSteps | BucketSteps  # with the same methods, which `DiskSteps` describes
Lock = DiskLock | BucketLock


def steps_of(model_dir: str | os.PathLike) -> Steps:
  """The steps of a run; none is read yet.

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
