"""The steps of a run that are read, and those that are kept."""

from collections.abc import Iterable, Sequence
import logging
import math
from typing import Any

from valkyrie import foreign
from valkyrie.checkpoint import manifest
from valkyrie.checkpoint.steps import Steps
from valkyrie.errors import ConfigurationError, StorageError, storage_errors

# Steps to read, beside numbers.
LATEST = 'latest'
BEST = 'best'


def first_valid(
  steps: Steps,
  order: Iterable[int],
  once: bool = False,
) -> tuple[int | None, dict[int, str]]:
  """The first valid step in an order, None if it is empty; and {step: damage} of steps before it.

  Logs these. With `once`, files that this process has read so are read again only if they have
  changed since. Raises a StorageError if all steps of the order are damaged.
  """
  damaged: dict[int, str] = {}
  for step in order:
    with storage_errors(
      f'Step {step} in {steps.place} cannot be read, so that nobody can tell whether it is valid',
      'Nothing was changed. Run the same command again when the disk or the network works, or move '
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
    others = [str(step) for step in steps.find() if step not in damaged]
    if others:
      raise StorageError(
        f'The steps of {steps.place} that were asked for are damaged:\n{lines}\n'
        f'Nothing was changed. Name another one: {", ".join(others)}, or latest.'
      )
    raise StorageError(
      f'All steps in {steps.place} are damaged, so that the run cannot continue from any:\n'
      f'{lines}\nNothing was changed. Restore the directory from a copy, move it away to start '
      'from step 0, or name another --model_dir.'
    )
  return None, {}


def in_order_of_preference(steps: Steps, step: str) -> list[int]:
  """The steps to read for LATEST, BEST or a number.

  Raises a ConfigurationError if there is none, and a StorageError if the file system does not tell
  the loss of one for BEST.
  """
  saved = steps.find()
  if step == LATEST:
    return saved[::-1]
  if step == BEST:
    losses, untold = _validation_losses(steps, saved)
    for number, error in untold.items():
      with storage_errors(f'The record of step {number} in {steps.place} cannot be read'):
        raise error
    chosen = [*losses]
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


def _validation_losses(
  steps: Steps,
  saved: Iterable[int],
) -> tuple[dict[int, float], dict[int, OSError]]:
  """{step: its finite validation loss}, the lowest first, and {step: why nobody can tell it}.

  A step whose record has none, is missing or is damaged is in neither.
  """
  losses: dict[int, float] = {}
  untold: dict[int, OSError] = {}
  for step in saved:
    try:
      loss = _read_record(steps, step).get('validation_loss')
    except (FileNotFoundError, NotADirectoryError, ValueError):
      continue
    except OSError as error:
      untold[step] = error
      continue
    if isinstance(loss, float) and math.isfinite(loss):
      losses[step] = loss
  lowest_first = sorted(losses, key=lambda step: (losses[step], step))
  return {step: losses[step] for step in lowest_first}, untold


def superseded(
  steps: Steps,
  saved: Sequence[int],
  keep: int,
  keep_period: int | None,
  keep_best: int,
) -> list[int]:
  """The steps that are not kept, of all `saved` ones in order; never the newest one.

  For the numbers to keep, see `manager.Checkpoints`. A step whose loss the file system does not
  tell is kept until it does.
  """
  kept: set[int] = set()
  if keep_best:
    losses, untold = _validation_losses(steps, saved)
    kept.update([*losses][:keep_best])
    kept.update(untold)
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
    return _read_record(steps, step)


def _read_record(steps: Steps, step: int) -> dict[str, Any]:
  content = steps.files(step).read('record.json')
  return foreign.json_object(content)
