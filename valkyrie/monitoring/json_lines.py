"""An append-only file of JSON lines."""

from collections.abc import Callable, Mapping
import contextlib
import functools
import json
import math
import os
import pathlib
import time
from typing import Any, BinaryIO

from valkyrie import foreign
from valkyrie.errors import end_after, storage_errors, write_errors
from valkyrie.monitoring.patience import (
  AT_THE_END,
  PATIENCE,
  may_pass_when_opened,
  patiently,
  tell,
)
from valkyrie.storage import appended, held_folder, owned

_LONGEST_LOCK = 1.0  # seconds for which a lock of another program is waited for, once
_MOMENT = 0.05  # seconds in which a process completes a line
_BLOCK = 4096


def read_lines(path: pathlib.Path, **kinds: Any) -> list[dict[str, Any]]:
  """The complete lines of a file, with fields of these types; none if it does not exist.

  Raises a StorageError if no `JsonLines` can have written a line.
  """
  advice = 'Restore it from a copy, or move it away.'
  with storage_errors(f'{path} cannot be read', advice, also=(ValueError,)):
    if not path.exists():
      return []
    content = foreign.content(path)
  objects: list[dict[str, Any]] = []
  lines = content.split(b'\n')
  for number, line in enumerate(lines[:-1], 1):
    message = f'{path}:{number} cannot be read'
    with storage_errors(message, 'Delete this line of the file.', also=(ValueError,)):
      values = foreign.json_object(line, **kinds)
      if not all(map(_is_written, values.values())):
        raise ValueError('expected only texts and numbers of 64 bits')
      objects.append(values)
  return objects


def _is_written(value: Any) -> bool:
  if isinstance(value, int):
    return abs(value) < 2**63
  return isinstance(value, str | float | None)


def by_step(path: pathlib.Path) -> dict[int, dict[str, Any]]:
  """The last line of each step, in the order of the steps; raises as `read_lines`."""
  lines: dict[int, dict[str, Any]] = {}
  for line in read_lines(path, step=int):
    step = line['step']
    lines[step] = line
  in_order = sorted(lines.items())
  return dict(in_order)


class JsonLines(contextlib.AbstractContextManager['JsonLines']):
  """A file with one JSON object per line, to which a resumed run and other processes append.

  After a crash, a resumed run repeats the steps since the last checkpoint, and both lines of such a
  step stay: readers use the later one. A full disk takes whole lines only: half a line is cut off
  at once, and the line is kept and written with a later one. An incomplete last line, which a crash
  can leave, is cut off before a line is appended. A lock of the file orders all this.
  JSON has no NaN or infinities: they are the strings "NaN", "Infinity" and "-Infinity".
  A context manager that closes.
  """

  def __init__(
    self,
    path: pathlib.Path,
    patience: float = PATIENCE,
    say: Callable[[str], None] = tell,
  ):
    """Opens the file.

    Like `sync` and `close`, it tries again for `patience` seconds what the file system refuses,
    says so by `say`, and raises StorageError then.
    """
    message = f'{path} cannot be written'
    otherwise = 'name another --model_dir, and run the same command again'
    self._write_errors = functools.partial(write_errors, message, otherwise)
    self._path = pathlib.Path(os.path.abspath(path))
    self._patience = patience
    self._say = say
    self._longest_lock = _LONGEST_LOCK
    self._left = b''  # to be written, whole lines
    self._file = patiently(self._opened, patience, say, passes=may_pass_when_opened)
    self.sync()

  def _opened(self) -> BinaryIO:
    with self._write_errors():
      folder = held_folder.place(self._path.parent)
      folder.mkdir(parents=True, exist_ok=True)
      return appended.opened(self._path)

  def write(self, fields: Mapping[str, int | float | str | None]) -> None:
    """Appends a line, in one system call.

    Raises a StorageError if the run was lost to another trainer.
    """
    texts = {}
    for name, value in fields.items():
      if isinstance(value, float) and not math.isfinite(value):
        texts[name] = json.dumps(value)  # without quotes, as json writes it, NaN is not JSON
    line = json.dumps({**fields, **texts}, allow_nan=False)
    self._left += line.encode() + b'\n'
    with contextlib.suppress(OSError):
      self._append_left()

  def _append_left(self) -> None:
    """Appends what is left to be written, unless the file is full; it then ends with a line."""
    held_folder.check(self._path)
    with appended.locked(self._file, self._longest_lock) as is_locked:
      # Another program that holds a lock for long is waited for only once.
      self._longest_lock = _LONGEST_LOCK if is_locked else 0.0
      begin = self._cut_half_line(is_locked)
      written = 0
      try:
        while written < len(self._left):
          written += self._file.write(self._left[written:])
      except OSError:
        whole = self._left.rfind(b'\n', 0, written) + 1
        if self._size() == begin + written:  # nobody has appended without the lock
          owned.cut(self._file, begin + whole)
        self._left = self._left[whole:]
        raise
      self._left = b''

  def _cut_half_line(self, is_locked: bool) -> int:
    """Cuts off what a crash has left of a last line; returns the size of the file."""
    end = self._end_of_lines()
    if end < self._size() and not is_locked:  # another process may be writing it
      time.sleep(_MOMENT)
      end = self._end_of_lines()
    if end < self._size():
      owned.cut(self._file, end)
    return end

  def _end_of_lines(self) -> int:
    """The number of bytes up to the last end of a line."""
    end = self._size()
    while end > 0:
      begin = max(0, end - _BLOCK)
      block = os.pread(self._file.fileno(), end - begin, begin)
      if b'\n' in block:
        return begin + block.rindex(b'\n') + 1
      end = begin
    return 0

  def _size(self) -> int:
    return os.fstat(self._file.fileno()).st_size

  def sync(self) -> None:
    """Waits until all lines are on disk."""
    patiently(self._sync, self._patience, self._say)

  def _sync(self) -> None:
    with self._write_errors():
      self._append_left()
      os.fsync(self._file.fileno())

  def hasten(self) -> None:
    """Makes `sync` and `close` try for less long, at the end of a run that has failed."""
    self._patience = min(self._patience, AT_THE_END)

  def close(self) -> None:
    """Waits until all lines are on disk, and closes the file."""
    try:
      self.sync()
    finally:
      self._file.close()

  def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if error is not None:
      self.hasten()
    end_after(self.close, error)
