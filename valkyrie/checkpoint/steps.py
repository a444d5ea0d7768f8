"""The steps of a run on disk: numbered directories that appear and disappear as a whole.

checkpoints/400/              a saved step, valid if its files match its manifest
checkpoints/500.unfinished/   a running save, or the remainder of one after a crash
checkpoints/100.deleted/      a step that is being deleted
set_aside/300/                a damaged step: moved, never deleted
"""

from collections.abc import Iterable
import logging
import pathlib
import shutil

from valkyrie.checkpoint import manifest
from valkyrie.errors import StorageError


def find(directory: pathlib.Path) -> list[int]:
  """The steps of a directory in order, valid or damaged; the directory need not exist.

  Raises:
    StorageError: a step is a symbolic link.
  """
  steps = []
  for place in directory.iterdir() if directory.is_dir() else ():
    if place.name.isdecimal() and place.name == str(int(place.name)):
      if place.is_symlink():
        raise StorageError(
          f'{place} is a symbolic link, but a step must be a directory. Move the step itself '
          'there, or remove the link.'
        )
      steps.append(int(place.name))
  return sorted(steps)


def first_valid(directory: pathlib.Path, order: Iterable[int]) -> tuple[int | None, dict[int, str]]:
  """Reads steps in the given order until one is valid.

  Returns:
    The valid step, or None if there are no steps; and {step: damage} of the steps before it.

  Raises:
    StorageError: all steps are damaged.
  """
  damaged = {}
  for step in order:
    damage = manifest.damage(directory / str(step), step)
    if damage is None:
      return step, damaged
    damaged[step] = damage
  if damaged:
    lines = '\n'.join(f'  step {step}: {damage}' for step, damage in damaged.items())
    raise StorageError(
      f'All steps in {directory} are damaged, so that the run cannot continue from any:\n{lines}\n'
      'Nothing was changed. Restore the directory from a copy, move it away to start from step 0, '
      'or name another --model_dir.'
    )
  return None, {}


def set_aside(directory: pathlib.Path, damaged: dict[int, str], target: pathlib.Path) -> None:
  """Moves damaged steps to the directory `target`, beside earlier ones of the same number."""
  for step, damage in damaged.items():
    target.mkdir(exist_ok=True)
    place, copies = target / str(step), 0
    while place.exists():
      copies += 1
      place = target / f'{step}.{copies}'
    (directory / str(step)).rename(place)
    logging.warning('Step %d in %s is damaged: %s. Moved to %s', step, directory, damage, place)


def unfinished(directory: pathlib.Path, step: int) -> pathlib.Path:
  """The directory of a step while it is being written."""
  return directory / f'{step}.unfinished'


def begin(directory: pathlib.Path, step: int) -> None:
  """Makes the directory of an unfinished step, empty."""
  place = unfinished(directory, step)
  if place.exists():
    _remove(_discarded(place, step))
  place.mkdir()


def finish(directory: pathlib.Path, step: int) -> None:
  """Writes the manifest of an unfinished step, then gives the directory its final name."""
  place = unfinished(directory, step)
  manifest.write(place, step)
  place.rename(directory / str(step))
  manifest.sync_directory(directory)


def delete(directory: pathlib.Path, steps: Iterable[int]) -> list[str]:
  """Deletes steps; renames each first, so that no partial step has a step's name.

  Returns:
    Why a step could not be deleted, for each of these; it is whole, or remains as litter.
  """
  problems = []
  for step in steps:
    try:
      place = _discarded(directory / str(step), step)
    except OSError as error:
      problems.append(f'{directory / str(step)} cannot be deleted ({error.strerror})')
    else:
      problems += _remove(place)
  return problems


def clear_litter(directory: pathlib.Path) -> list[str]:
  """Deletes the remainders of saves and deletions that were interrupted, or had failed.

  Returns:
    As `delete`.
  """
  problems = []
  for place in directory.iterdir():
    number, _, ending = place.name.partition('.')
    if number.isdecimal() and ending.endswith(('unfinished', 'deleted')):
      problems += _remove(place)
  return problems


def _discarded(place: pathlib.Path, step: int) -> pathlib.Path:
  """Renames what is to be deleted."""
  target, copies = place.with_name(f'{step}.deleted'), 0
  while target.exists():  # a deletion has failed, for instance while somebody has a file open
    copies += 1
    target = place.with_name(f'{step}.{copies}.deleted')
  return place.rename(target)


def _remove(place: pathlib.Path) -> list[str]:
  try:
    shutil.rmtree(place)
  except FileNotFoundError:
    return []
  except OSError as error:
    return [f'{place} cannot be deleted ({error.strerror})']
  return []
