"""A file of JSON lines with one line for each step."""

from collections.abc import Mapping
import contextlib
import fcntl
import os
import pathlib

from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.storage.lines import last_of_each_step

_REOPENED = 100  # times at most, where a file system has no lasting numbers of files


class StepLines(JsonLines):
  """JSON lines in which the line of a step takes the place of an earlier one of that step.

  A line is appended first. The earlier one leaves the file when it is opened, when a resumed run
  has come to the last step of the file, or when it is closed: a file with all other lines then gets
  its name. This waits while another process has the file open, such as an evaluation of a run that
  trains, and does not happen on a file system without locks.
  """

  def __init__(self, path: pathlib.Path):
    """Opens the file; raises StorageError as `JsonLines`."""
    super().__init__(path)
    self._name, self._last, self._has_repeated = path.name, -1, True
    with self._storage_errors():
      self._folder = os.open(path.parent, os.O_RDONLY)
    with contextlib.suppress(OSError):
      self._share()
    self._drop_repeated()

  def write(self, fields: Mapping[str, int | float | str | None]) -> None:
    """Appends the line of a step."""
    super().write(fields)
    step = int(fields['step'] or 0)
    self._has_repeated |= step <= self._last
    if step >= self._last:  # before it is saved: a run that is complete does not open the file
      self._last = step
      self._drop_repeated()

  def close(self) -> None:
    try:
      self._drop_repeated()
    finally:
      os.close(self._folder)
      super().close()

  def _drop_repeated(self) -> None:
    if not self._has_repeated:
      return
    with contextlib.suppress(OSError):  # then the last line of a step counts, as it always does
      self._has_repeated = self._once() is not None
      if self._has_repeated:
        try:
          fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
          self._replace()
          self._has_repeated = False
        finally:
          self._share()

  def _once(self) -> bytes | None:
    """The file without the repeated lines; None if it has none."""
    self._file.seek(0)
    content = self._file.read()
    lines = last_of_each_step(content)
    self._last = max((step for step in lines if isinstance(step, int)), default=-1)
    kept = b''.join(lines.values())
    return kept if kept != content else None

  def _replace(self) -> None:
    """Gives the name to a file without the repeated lines; this process alone has the old one."""
    kept = self._once()
    if kept is None or not self._has_name(follow_symlinks=False):
      return
    new = f'{self._name}.new'
    with self._open_beside(new, os.O_TRUNC) as file:
      while kept:
        kept = kept[file.write(kept) :]
      os.fsync(file.fileno())
    os.replace(new, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

  def _share(self) -> None:
    """Keeps others from replacing the file, and opens the new one if they have done so before."""
    fcntl.flock(self._file, fcntl.LOCK_SH)
    for _ in range(_REOPENED):
      if self._has_name():
        return
      file = self._open_beside(self._name)
      self._file.close()
      self._file = file
      fcntl.flock(self._file, fcntl.LOCK_SH)

  def _has_name(self, follow_symlinks: bool = True) -> bool:
    try:
      found = os.stat(self._name, dir_fd=self._folder, follow_symlinks=follow_symlinks)
    except FileNotFoundError:
      return False
    return os.path.samestat(found, os.fstat(self._file.fileno()))

  def _open_beside(self, name: str, also: int = 0):
    """Opens a file in the folder, which may have been renamed meanwhile."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | also
    return os.fdopen(os.open(name, flags, 0o666, dir_fd=self._folder), 'a+b', buffering=0)
