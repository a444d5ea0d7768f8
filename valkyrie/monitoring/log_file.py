"""The log of a run: a file that grows by lines, and for which nothing waits."""

import pathlib

from valkyrie.errors import reason_of
from valkyrie.storage import appended, held_folder

_LARGEST = 2**20  # bytes that wait for room; the newest lines count


class LogFile:
  """Appends lines. What a full disk does not take is kept, and written with a later line."""

  def __init__(self, path: pathlib.Path):
    """Opens the file; raises as `appended.opened`."""
    self._path = path
    self._file = appended.opened(path)
    self._left = b''
    self._is_refused = False

  def write(self, text: str) -> str | None:
    """Appends a text of whole lines; returns what to say to the user, if there is something.

    Raises a StorageError if the run was lost to another trainer.
    """
    self._left += text.encode(errors='backslashreplace')
    held_folder.check(self._path)
    try:
      while self._left:
        written = self._file.write(self._left)
        self._left = self._left[written:]
    except OSError as error:
      self._left = _newest_lines(self._left)
      if self._is_refused:
        return None
      self._is_refused = True
      return (
        f'the log {self._path} cannot be written ({reason_of(error)}); its lines are kept, and '
        'written when there is room'
      )
    self._is_refused = False
    return None


def _newest_lines(content: bytes) -> bytes:
  """The end of a content that is too long, from a line on."""
  if len(content) <= _LARGEST:
    return content
  end = content[-_LARGEST:]
  begin_of_line = end.find(b'\n') + 1
  return b'(lines are missing here)\n' + end[begin_of_line:]
