"""The one place that replaces and deletes files and folders, and only what this program made.

Three things prove that this program made a file; a path or the look of a name never does.

1. A temporary name (`temporary_names`). What is written has such a name until it is complete, and
   its writer holds a lock on it, which the system frees when the process ends. A later write beside
   it removes what a killed process has left.

2. A mark inside a folder, with the folder's name: a copy or a renamed folder is somebody else's.

       FOLDER/.made_by_valkyrie        {"made_by": "valkyrie", "folder": "FOLDER"}

3. A record, such as store.json, whose files the caller names one by one.

No link is followed, and what this program has not made stays.
"""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
import stat
import time
from typing import BinaryIO

from valkyrie import errors, foreign
from valkyrie.storage import foreign_names, locks, temporary_names
from valkyrie.storage.free_names import free_name

MARK = '.made_by_valkyrie'
_MOST_NAMED = 5
# Locks hold within one machine on some network file systems, and others have none: there, only
# what was not changed for so long counts as left by a process that has ended.
_ABANDONED_SECONDS = 24 * 3600


@contextlib.contextmanager
def new_file(path: pathlib.Path, *, replaces: bool = True) -> Iterator[BinaryIO]:
  """Opens a file that appears at `path`, whole and on disk, when the block ends without an error.

  It has a temporary name until then, which `.name` tells. With `replaces`, it takes the place of a
  file (or of a link, whose target stays); otherwise FileExistsError is raised. Raises OSError.
  """
  remove_litter(path.parent)
  with contextlib.ExitStack() as stack:
    file = stack.enter_context(_locked_file(path))
    place = pathlib.Path(file.name)
    try:
      yield file
      file.flush()
      os.fsync(file.fileno())
      if replaces:
        os.replace(place, path)
      else:
        _give_free_name(place, path)
    except BaseException:
      with contextlib.suppress(FileNotFoundError):
        os.unlink(place)
      raise


@contextlib.contextmanager
def new_folder(
  path: pathlib.Path, *, replaces: Iterable[str] | None = None
) -> Iterator[pathlib.Path]:
  """Makes a folder that appears at `path`, whole, when the block ends without an error.

  The block fills it under a temporary name. A FileExistsError is raised if `path` is taken; with
  `replaces`, the names of the files of a record, the folder that stands there makes way at the end,
  and goes as in `delete_recorded`: what else is in it stays beside the new one, as PATH.replaced.
  """
  with temporary_folder(path) as place:
    yield place
    replaced = None
    if replaces is not None and os.path.lexists(path):
      replaced = _free(path.with_name(f'{path.name}.replaced'))
      os.rename(path, replaced)
    _give_free_name(place, path)
    if replaced is not None:
      tell_what_stays(replaced, delete_recorded(replaced, replaces or ()))


@contextlib.contextmanager
def temporary_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Makes a folder beside `path`, with a temporary name, that is deleted at the end of the block.

  The block may give it, or a file in it, another name by `move`. Raises OSError.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  remove_litter(path.parent)
  place, lock = _locked_folder(path)
  try:
    yield place
  finally:
    shutil.rmtree(place, ignore_errors=True)
    os.close(lock)


def remove_litter(folder: pathlib.Path) -> None:
  """Removes the files and folders with temporary names that killed processes have left.

  One that a living process writes stays, and so does one that cannot be removed.
  """
  with contextlib.suppress(OSError):  # the folder does not exist yet, or cannot be listed
    for name in os.listdir(folder):
      if temporary_names.is_one(name):
        with contextlib.suppress(OSError):
          _remove_abandoned(folder / name, temporary_names.is_of_this_machine(name))


def unfinished(folder: pathlib.Path, name: str) -> list[pathlib.Path]:
  """What has a temporary name for `name`; after `remove_litter`, a living process has made it."""
  places = []
  for entry in os.listdir(folder):
    if temporary_names.target_of(entry) == name:
      places.append(folder / entry)
  return places


def mark(folder: pathlib.Path) -> None:
  """Records in a folder that this program made it under this name; raises OSError."""
  content = {'made_by': 'valkyrie', 'folder': folder.name}
  with open(folder / MARK, 'xb') as file:
    file.write(json.dumps(content).encode() + b'\n')


def is_marked(folder: pathlib.Path) -> bool:
  """Whether there is a folder, not a link, that this program marked under this name."""
  if not _is_folder(folder) or (folder / MARK).is_symlink():
    return False
  try:
    content = foreign.json_object(foreign.content(folder / MARK))
  except (OSError, ValueError):
    return False
  return content == {'made_by': 'valkyrie', 'folder': folder.name}


def remove_mark(folder: pathlib.Path) -> None:
  """Removes the mark of a folder, which is complete now; raises OSError."""
  os.unlink(folder / MARK)


def delete_marked(folder: pathlib.Path) -> bool:
  """Deletes a marked folder with all that is in it; returns whether it was marked.

  The mark goes last, so that a killed deletion can be repeated, and comes back if the folder is not
  empty after all. Raises OSError.
  """
  if not is_marked(folder):
    return False
  for name in os.listdir(folder):
    if _is_folder(folder / name):
      shutil.rmtree(folder / name)
    elif name != MARK:
      os.unlink(folder / name)
  aside = folder.with_name(temporary_names.make(folder.name))
  os.rename(folder / MARK, aside)
  try:
    os.rmdir(folder)
  except OSError:  # a thread of Orbax wrote into it meanwhile
    os.rename(aside, folder / MARK)  # on a full disk there is no room for another mark
    raise
  os.unlink(aside)
  return True


def delete_recorded(folder: pathlib.Path, names: Iterable[str]) -> list[str]:
  """Deletes the files of a record, in this order, then each folder that has become empty.

  Args:
    folder: a folder, which is not a link.
    names: names of the files, relative to the folder. The name of the record is the last, so that
      a killed deletion can be repeated. A name that leads out of the folder, a link, a folder of
      that name, and a file behind a link are passed over.

  Returns:
    What stays in the folder, which this program has not made; nothing if the folder is gone.

  Raises:
    OSError: the file system refused.
  """
  if not _is_folder(folder):
    return []
  parents = {folder}
  for name in filter(foreign_names.is_below, names):
    *parents_below, _ = pathlib.PurePath(name).parents  # the last one is the folder
    between = [folder / parent for parent in parents_below]
    if all(map(_is_folder, between)):
      parents.update(between)
      delete_file(folder / name)
  deepest_first = sorted(parents, key=lambda path: len(path.parts), reverse=True)
  for parent in deepest_first:
    if not os.listdir(parent):
      os.rmdir(parent)
  stays = []
  for path in folder.rglob('*'):
    is_filled = _is_folder(path) and bool(os.listdir(path))
    if not is_filled:
      relative = path.relative_to(folder)
      stays.append(relative.as_posix())
  return sorted(stays)


def tell_what_stays(folder: pathlib.Path, stays: Sequence[str]) -> None:
  """Logs what `delete_recorded` has left in a folder."""
  if stays:
    names = ', '.join(map(foreign.shown, errors.first_of(stays, _MOST_NAMED)))
    logging.warning('%s stays: it has %s, which this program did not make', folder, names)


def delete_empty(folder: pathlib.Path) -> None:
  """Deletes a folder and those in it where no file is left; follows no link. Raises OSError."""
  for place, _, _ in os.walk(folder, topdown=False):
    if not os.listdir(place):
      os.rmdir(place)


def delete_file(file: pathlib.Path) -> bool:
  """Deletes a regular file that the caller has made; returns whether it did. Raises OSError."""
  if not _is_regular(file):
    return False
  with contextlib.suppress(FileNotFoundError):  # another process was faster
    os.unlink(file)
  return True


def replace_file(new: pathlib.Path, place: pathlib.Path) -> None:
  """Puts a whole file of this program, with a name of its own, in the place of an earlier one."""
  os.replace(new, place)


def rename(place: pathlib.Path, target: pathlib.Path) -> None:
  """As `move`, but of several processes that rename the same file, one succeeds.

  The others get a FileNotFoundError. No process may make the target meanwhile.
  """
  if os.path.lexists(target):
    raise FileExistsError(f'{target} is there already')
  os.rename(place, target)


def cut(file: BinaryIO, size: int) -> None:
  """Shortens a file that this process has opened and appends to."""
  os.ftruncate(file.fileno(), size)


def open_lock_file(path: pathlib.Path) -> BinaryIO:
  """Opens a file to lock, which is made if it is missing; raises OSError if it is a link.

  Its content stays until `rewrite`, which its holder may call.
  """
  flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
  descriptor = os.open(path, flags, 0o666)
  if not stat.S_ISREG(os.fstat(descriptor).st_mode):
    os.close(descriptor)
    raise OSError(errno.EINVAL, 'it is not a regular file', str(path))
  return open(descriptor, 'r+b', buffering=0)


def rewrite(file: BinaryIO, content: bytes) -> None:
  """Replaces the content of a file that this process has opened and locked."""
  os.ftruncate(file.fileno(), 0)
  os.pwrite(file.fileno(), content, 0)
  os.fsync(file.fileno())  # other machines that share the folder can read it now


def move(place: pathlib.Path, target: pathlib.Path) -> None:
  """Gives a file or a folder of this program another name; FileExistsError if that is taken."""
  _give_free_name(place, target)


def _locked_file(path: pathlib.Path) -> BinaryIO:
  """A new file beside `path`, with a temporary name and a lock."""
  while True:
    place = path.with_name(temporary_names.make(path.name))
    with contextlib.ExitStack() as stack:
      file = stack.enter_context(open(place, 'x+b'))
      stack.callback(delete_file, place)
      # `remove_litter` of another process may see the file before its lock, and take it for litter.
      if locks.attempt(file) is not False and _is_at(place, file.fileno()):
        stack.pop_all()  # the caller closes it
        return file


def _locked_folder(path: pathlib.Path) -> tuple[pathlib.Path, int]:
  """A new folder beside `path`, with a temporary name, and the descriptor that locks it."""
  while True:
    place = path.with_name(temporary_names.make(path.name))
    os.mkdir(place)
    # As in `_locked_file`, but a folder can also be gone before it is opened.
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
      descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
      stack.callback(os.close, descriptor)
      if locks.attempt(descriptor) is not False and _is_at(place, descriptor):
        stack.pop_all()  # the caller closes it
        return place, descriptor


def _remove_abandoned(place: pathlib.Path, is_local: bool) -> None:
  """Removes a file or folder with a temporary name, unless a process may still write it."""
  is_folder = _is_folder(place)
  flags = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_NONBLOCK
  descriptor = os.open(place, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
  try:
    is_locked = locks.attempt(descriptor)
    is_abandoned = is_local and is_locked
    if is_locked is not False and not is_abandoned:
      is_abandoned = time.time() - _last_change(place) > _ABANDONED_SECONDS
    if not (is_abandoned and _is_at(place, descriptor)):
      return
    if is_folder:
      shutil.rmtree(place)
    elif stat.S_ISREG(os.fstat(descriptor).st_mode):
      os.unlink(place)
  finally:
    os.close(descriptor)


def _last_change(place: pathlib.Path) -> float:
  """The time of the last change of a file, or of anything in a folder, in seconds."""
  inside = place.rglob('*') if _is_folder(place) else ()
  return max(path.lstat().st_mtime for path in (place, *inside))


def _free(path: pathlib.Path) -> pathlib.Path:
  """The first of PATH, PATH.1, PATH.2, ... that is not taken."""
  return path.with_name(free_name(path.name, lambda name: os.path.lexists(path.with_name(name))))


def _give_free_name(place: pathlib.Path, target: pathlib.Path) -> None:
  """Renames a file or folder; raises FileExistsError if the target is there, even as a link."""
  if _is_regular(place):
    try:
      os.link(place, target)  # which replaces nothing, also in a race
    except FileExistsError:
      raise
    except OSError:  # a file system without hard links
      pass
    else:
      os.unlink(place)
      return
  if os.path.lexists(target):
    raise FileExistsError(f'{target} is there already')
  os.rename(place, target)


def _is_at(place: pathlib.Path, descriptor: int) -> bool:
  """Whether an open file is the one at a path."""
  try:
    return os.path.samestat(os.lstat(place), os.fstat(descriptor))
  except FileNotFoundError:
    return False


def _is_folder(place: pathlib.Path) -> bool:
  """Whether there is a folder, not a link to one."""
  return os.path.isdir(place) and not os.path.islink(place)


def _is_regular(file: pathlib.Path) -> bool:
  """Whether there is a regular file, not a link to one."""
  return os.path.isfile(file) and not os.path.islink(file)
