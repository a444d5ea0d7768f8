"""The steps of a run on disk: directories named by numbers, which appear and vanish as a whole.

checkpoints/400/              whole, as far as its manifest is true
checkpoints/500.unfinished/   a save under way, or what a crash left of one
checkpoints/100.deleted/      a step that makes room
set_aside/300/                a damaged step: moved, never deleted
"""

from collections.abc import Iterable
import logging
import pathlib
import shutil

from valkyrie.checkpoint import manifest
from valkyrie.errors import StorageError


def find(directory: pathlib.Path) -> list[int]:
  """The steps in a directory, which need not exist, in order; whether they are whole is not asked.

  Raises:
    StorageError: a step is a symbolic link.
  """
  steps = []
  for place in directory.iterdir() if directory.is_dir() else ():
    if place.name.isdecimal() and place.name == str(int(place.name)):
      if place.is_symlink():
        raise StorageError(
          f'{place} is a symbolic link, and a step is read only from its own directory. Put the '
          'step itself there, or remove the link.'
        )
      steps.append(int(place.name))
  return sorted(steps)


def newest_whole(directory: pathlib.Path) -> tuple[int | None, dict[int, str]]:
  """(the newest step that is whole, what is wrong with each later one)."""
  damaged = {}
  for step in reversed(find(directory)):
    wrong = manifest.damage(directory / str(step), step)
    if wrong is None:
      return step, damaged
    damaged[step] = wrong
  return None, damaged


def set_aside(directory: pathlib.Path, damaged: dict[int, str], refuge: pathlib.Path) -> None:
  """Moves damaged steps to `refuge`, beside what is there already."""
  for step, wrong in damaged.items():
    refuge.mkdir(exist_ok=True)
    goal, copies = refuge / str(step), 0
    while goal.exists():
      copies += 1
      goal = refuge / f'{step}.{copies}'
    (directory / str(step)).rename(goal)
    logging.warning('Step %d in %s is not whole: %s. Moved to %s', step, directory, wrong, goal)


def unfinished(directory: pathlib.Path, step: int) -> pathlib.Path:
  """Where a step is written until it is whole."""
  return directory / f'{step}.unfinished'


def begin(directory: pathlib.Path, step: int) -> None:
  """Makes the directory of an unfinished step, empty."""
  place = unfinished(directory, step)
  if place.exists():
    shutil.rmtree(place)
  place.mkdir()


def finish(directory: pathlib.Path, step: int) -> None:
  """Gives the unfinished step its manifest, then its name: what has the name is whole."""
  place = unfinished(directory, step)
  manifest.write(place, step)
  place.rename(directory / str(step))
  manifest.sync_directory(directory)


def delete(directory: pathlib.Path, steps: Iterable[int]) -> None:
  """Deletes steps, none of which is ever seen in part."""
  for step in steps:
    going = (directory / str(step)).rename(directory / f'{step}.deleted')
    shutil.rmtree(going)


def clear_litter(directory: pathlib.Path) -> None:
  """Deletes what a crash left of saves and deletions."""
  for place in directory.iterdir():
    number, _, ending = place.name.partition('.')
    if number.isdecimal() and ending in ('unfinished', 'deleted'):
      shutil.rmtree(place)
