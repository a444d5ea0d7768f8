"""The folders of runs in which this process works. It writes into these very folders, or fails.

A run lasts for days, and its path may meanwhile name another folder, after `mv` or when a link was
changed. A process therefore holds the folder itself by a descriptor, from its lock or its start on.
Whoever writes a file asks `place` for the path to open; messages keep the path that the user knows.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib

from valkyrie.errors import StorageError

_DESCRIPTORS = '/proc/self/fd'  # of Linux; elsewhere the path is compared and used


class HeldFolder:
  """A folder that this process holds until `release`.

  path: absolute, the one that the user gave.
  check: raises a StorageError if the folder no longer belongs to this process.
  """

  def __init__(self, folder: str | os.PathLike, check: Callable[[], None] = lambda: None):
    """Opens a folder that exists; raises OSError if that fails."""
    self.path = pathlib.Path(os.path.abspath(folder))
    self.check = check
    self.descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _held.append(self)

  def reach(self) -> pathlib.Path:
    """A path to this very folder, whatever its name is now."""
    if os.path.isdir(_DESCRIPTORS):
      return pathlib.Path(_DESCRIPTORS, str(self.descriptor))
    status = os.fstat(self.descriptor)
    if not os.path.samestat(os.stat(self.path), status):
      raise StorageError(
        f'{self.path} is not the folder in which this run began: it was moved or replaced. '
        'Nothing was written there. Run the same command again with the path of the run.'
      )
    return self.path

  def release(self) -> None:
    """Lets the folder go; a second call does nothing."""
    if self in _held:
      _held.remove(self)
      os.close(self.descriptor)


_held: list[HeldFolder] = []  # by this process; the last one of a path counts


@contextlib.contextmanager
def held(folder: str | os.PathLike) -> Iterator[None]:
  """A context in which this process holds a folder, if there is one."""
  try:
    held_folder = HeldFolder(folder)
  except OSError:  # there is none, or it cannot be read: whoever needs it says so
    yield
    return
  try:
    yield
  finally:
    held_folder.release()


def place(path: str | os.PathLike) -> pathlib.Path:
  """The path by which to open a file to be written: below a held folder, through its descriptor.

  Raises a StorageError if that folder no longer belongs to this process.
  """
  folder = _folder_of(path)
  if folder is None:
    return pathlib.Path(path)
  folder.check()
  absolute = pathlib.Path(os.path.abspath(path))
  return folder.reach() / absolute.relative_to(folder.path)


def check(path: str | os.PathLike) -> None:
  """Raises a StorageError if an open file is in a folder that no longer belongs to this process."""
  folder = _folder_of(path)
  if folder is not None:
    folder.check()


def _folder_of(path: str | os.PathLike) -> HeldFolder | None:
  """The held folder in which a file is, None if there is none."""
  absolute = pathlib.Path(os.path.abspath(path))
  for folder in reversed(_held):
    if absolute.is_relative_to(folder.path):
      return folder
  return None
