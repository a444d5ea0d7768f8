"""An append-only file of JSON lines."""

from collections.abc import Mapping
import contextlib
import functools
import json
import math
import os
import pathlib
from typing import Any

from valkyrie import foreign
from valkyrie.errors import storage_errors


def read(path: pathlib.Path, **kinds: Any) -> list[dict[str, Any]]:
  """The complete lines of a file, with fields of these types; none if it does not exist.

  Raises a StorageError if no `JsonLines` can have written a line.
  """
  found: list[dict[str, Any]] = []
  with storage_errors(f'{path} cannot be read', also=(ValueError,)):
    content = foreign.content(path) if path.exists() else b''
  for number, line in enumerate(content.split(b'\n')[:-1], 1):
    with storage_errors(f'{path}:{number} cannot be read', also=(ValueError,)):
      found.append(foreign.json_object(line, **kinds))
      if not all(map(_is_written, found[-1].values())):
        raise ValueError('expected only texts and numbers of 64 bits')
  return found


def _is_written(value: Any) -> bool:
  return isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < 2**63)


def by_step(path: pathlib.Path) -> dict[int, dict[str, Any]]:
  """The last line of each step, in the order of the steps; raises as `read`."""
  return dict(sorted({line['step']: line for line in read(path, step=int)}.items()))


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
    known = {  # json writes NaN without quotes, which is no JSON
      key: json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value
      for key, value in fields.items()
    }
    self._left += json.dumps(known, allow_nan=False).encode() + b'\n'
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
