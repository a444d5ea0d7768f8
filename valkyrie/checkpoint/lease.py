"""The lease of a trainer, for file systems without locks: a file that its holder renews.

Lustre and NFS may answer `flock` with ENOSYS, ENOLCK or EOPNOTSUPP. `holder` has the content of the
file. A lease without beats belongs to a process that has ended or hangs, and another trainer takes
it over.
"""

import contextlib
import json
import os
import pathlib
import threading
from typing import Any
import uuid

from valkyrie.checkpoint import holder
from valkyrie.checkpoint.holder import Holder


class Lease:
  """A lease of a directory; renewed by a thread until `release`.

  Raises:
    holder.LeaseTaken: another process holds it.
    OSError: it cannot be read or written.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._holder = Holder()
    self._mine = self._holder.lease
    while not self._create():
      found = self._read()
      if found is not None:
        holder.wait_for_end(found, self._read)
        self._free(found)
    self._over = threading.Event()
    self._thread = threading.Thread(target=self._renew, name='lease', daemon=True)
    self._thread.start()

  @property
  def is_mine(self) -> bool:
    """Whether no other process has taken the lease."""
    return (self._read() or {}).get('token') == self._mine['token']

  def release(self) -> None:
    """Ends the lease."""
    self._over.set()
    self._thread.join()
    with contextlib.suppress(OSError):
      if self.is_mine:
        self._path.unlink()
    self._holder.end()

  def _create(self) -> bool:
    """Makes the file with its content, unless there is one."""
    new = self._write()
    try:
      os.link(new, self._path)
    except FileExistsError:
      return False
    finally:
      new.unlink()
    return True

  def _write(self) -> pathlib.Path:
    """A new file with the content of the lease."""
    new = self._path.with_name(f'{self._path.name}.{self._mine["token"]}')
    with open(new, 'w') as file:
      file.write(json.dumps(self._mine))
      file.flush()
      os.fsync(file.fileno())
    return new

  def _read(self) -> dict[str, Any] | None:
    """The content of the lease; None without one."""
    with contextlib.suppress(FileNotFoundError):
      return _content(self._path)
    return None

  def _free(self, found: dict[str, Any]) -> None:
    """Removes a lease that has ended. Of several processes that do, one finds it."""
    taken = self._path.with_name(f'{self._path.name}.{uuid.uuid4().hex}')
    with contextlib.suppress(FileNotFoundError):
      self._path.rename(taken)
      if _content(taken) != found:  # somebody has taken it over meanwhile
        with contextlib.suppress(FileExistsError):
          os.link(taken, self._path)
      taken.unlink()

  def _renew(self) -> None:
    while not self._over.wait(holder.BEAT_SECONDS):
      self._mine['beat'] += 1
      with contextlib.suppress(OSError):  # the next beat, or the check before a save, will see
        if self.is_mine:
          self._write().replace(self._path)


def _content(path: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads(path.read_text())
  except ValueError:  # a machine has lost its power
    found = None
  return found if isinstance(found, dict) else {}
