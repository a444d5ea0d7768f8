"""Files of a run that grow: opened without following a link, and with one name only.

A link in a folder that somebody copied or made may lead to a file of another run or of a user, and
`cp -al` gives a file of one run a second name in another. Neither file may change.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import shutil
import stat
import time
from typing import BinaryIO

from valkyrie.errors import StorageError
from valkyrie.storage import held_folder, locks, owned

_PATIENCE = 1.0  # seconds for which a lock of another program is waited for


def opened(path: pathlib.Path) -> BinaryIO:
  """Opens a file of a run, without a buffer, to read it and to append to it; makes it if missing.

  A file with other names, as after `cp -al`, is first replaced by a copy that has only this name.
  Raises a StorageError if there is something other than a file, and OSError if it cannot be opened.
  """
  file = open_file(path)
  try:
    while os.fstat(file.fileno()).st_nlink > 1:
      _replace_by_copy(path, file)
      other = open_file(path)
      file.close()
      file = other
  except BaseException:
    file.close()
    raise
  return file


def open_file(path: pathlib.Path) -> BinaryIO:
  """As `opened`, also a file with other names."""
  place = held_folder.place(path)
  is_there = os.path.lexists(place)
  if is_there and not stat.S_ISREG(os.lstat(place).st_mode):
    kind = 'not a file'
    if place.is_symlink():
      kind = 'a symbolic link'
    raise StorageError(
      f'{path} is {kind}, but the run writes a file of that name. Nothing was written there. Move '
      'it away, and run the same command again.'
    )
  return open(place, 'a+b', buffering=0, opener=_open_literally)


def append(path: pathlib.Path, content: bytes) -> None:
  """Appends to a file of a run all of the bytes, or none; raises as `opened`."""
  with opened(path) as file, locked(file):
    write_whole(file, content)


def write_whole(file: BinaryIO, content: bytes) -> None:
  """Appends all of the bytes, or none, to a file that is `opened` and locked; raises OSError."""
  begin = os.fstat(file.fileno()).st_size
  written = 0
  try:
    while written < len(content):
      written += file.write(content[written:])
  except OSError:
    size = os.fstat(file.fileno()).st_size
    if size == begin + written:  # nobody has appended without the lock
      owned.cut(file, begin)
    raise


def _open_literally(path: str, flags: int) -> int:
  """Follows no link and waits for no other process, also if one has just put something there."""
  return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def _replace_by_copy(path: pathlib.Path, file: BinaryIO) -> None:
  """Gives a path a file of its own with the same content, unless another process has done so."""
  place = held_folder.place(path)
  with locked(file):  # two processes that append to the same file would lose lines
    status = os.fstat(file.fileno())
    if os.path.samestat(os.lstat(place), status):
      with owned.new_file(place) as copy:
        file.seek(0)
        shutil.copyfileobj(file, copy)


@contextlib.contextmanager
def locked(file: BinaryIO, patience: float = _PATIENCE) -> Iterator[bool]:
  """A context in which other processes that ask for the same lock do not change a file.

  Yields whether it is held: a file system may have no locks, and another program may hold one for
  longer than the patience. Neither ends or holds up the run.
  """
  end = time.monotonic() + patience
  is_held = locks.attempt(file)
  while is_held is False and time.monotonic() < end:
    time.sleep(0.01)
    is_held = locks.attempt(file)
  try:
    yield bool(is_held)
  finally:
    if is_held:
      locks.free(file)
