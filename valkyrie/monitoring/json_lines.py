"""An append-only file of JSON lines."""

from collections.abc import Mapping
import contextlib
import functools
import json
import math
import os
import pathlib
from typing import Any

from valkyrie.errors import storage_errors


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """The complete lines of a file; none if it does not exist."""
  content = path.read_text() if path.exists() else ''
  return [json.loads(line) for line in content.rpartition('\n')[0].splitlines()]


def by_step(path: pathlib.Path) -> dict[int, dict[str, Any]]:
  """The last line of each step, in the order of the steps."""
  return dict(sorted({line['step']: line for line in read(path)}.items()))


class JsonLines:
  """A file with one JSON object per line, to which a resumed run and other processes append.

  After a crash, a resumed run repeats the steps since the last checkpoint, and both lines of such a
  step stay: readers use the later one. An incomplete last line, which a crash of the machine can
  leave, is removed. What a full disk does not take is kept, and written with a later line.
  JSON has no NaN or infinities: they are the strings "NaN", "Infinity" and "-Infinity".
  """

  def __init__(self, path: pathlib.Path):
    """Opens the file. Like `sync` and `close`, raises StorageError if it cannot be written."""
    message = f'{path} cannot be written'
    advice = 'Make room there, or name another --model_dir, and run the same command again.'
    self._storage_errors = functools.partial(storage_errors, message, advice)
    self._left = b''  # to be written
    with self._storage_errors():
      path.parent.mkdir(parents=True, exist_ok=True)
      self._file = path.open('a+b', buffering=0)
      self._file.seek(0)
      content = self._file.read()
      complete = content.rfind(b'\n') + 1
      if complete < len(content):
        self._file.truncate(complete)

  def write(self, fields: Mapping[str, int | float | str | None]) -> None:
    """Appends a line, in one system call."""
    line = json.dumps({key: _to_json(value) for key, value in fields.items()}, allow_nan=False)
    self._left += line.encode() + b'\n'
    with contextlib.suppress(OSError):
      self._write_left()

  def _write_left(self) -> None:
    while self._left:
      self._left = self._left[self._file.write(self._left) :]

  def sync(self) -> None:
    """Waits until all lines are on disk."""
    with self._storage_errors():
      self._write_left()
      os.fsync(self._file.fileno())

  def close(self) -> None:
    try:
      with self._storage_errors():
        self._write_left()
    finally:
      self._file.close()


def _to_json(value: int | float | str | None) -> int | float | str | None:
  if isinstance(value, float) and not math.isfinite(value):
    return 'NaN' if math.isnan(value) else 'Infinity' if value > 0 else '-Infinity'
  return value
