"""A standard stream that nobody may read: what finds no room in a pipe or a terminal is dropped.

A blocking write to a full pipe waits for a reader, in C, where no signal handler of Python runs. On
Linux a pipe is therefore opened again without blocking, which holds for writes of C libraries too,
and a terminal for what Python writes. Elsewhere, and for sockets, Python looks for room before it
writes a piece that fits.
"""

from collections.abc import Iterator
import contextlib
import io
import math
import os
import select
import stat
import threading
import time
from typing import Any

_PIECE = getattr(select, 'PIPE_BUF', 512)  # bytes that a pipe with room takes whole
_LONGEST_WAIT = 2.0  # seconds for a slow reader
_SHORTEST_WAIT = 0.05
_SHARE = 0.05  # of the time may be such waiting


def may_wait(descriptor: int) -> bool:
  """Whether a write can wait for a reader: to a pipe, a terminal or a socket."""
  try:
    mode = os.fstat(descriptor).st_mode
  except OSError:
    return False
  return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


class UnreadStream(io.RawIOBase):
  """A raw stream to a descriptor that `may_wait`, which drops what finds no room.

  Attributes:
    dropped: the number of lines that were dropped until now.
    waiting: the descriptor as it was, whose writes wait; for a child process.
  """

  def __init__(self, descriptor: int):
    self.dropped = 0
    self.waiting = os.dup(descriptor)
    self._descriptor = descriptor
    self._output = descriptor
    self._lock = threading.RLock()
    self._unsaid = 0  # the lines dropped since this was last said
    self._drops_a_line = False
    self._begins_a_line = True
    self._waited_until = -math.inf
    self._open_again()

  def write(self, data: Any) -> int:
    """Writes all bytes, or drops the rest of a line that finds no room, and lines after it.

    Raises an OSError if the reader is gone.
    """
    content = bytes(data)
    with self._lock:
      shown = content
      if self._drops_a_line:
        lost, end, shown = content.partition(b'\n')
        self._drops_a_line = not end
        self._count(end)
        if not end and b'\r' in lost:  # with which a bar begins its line again
          self._drops_a_line = False
          shown = b'\r' + lost.rpartition(b'\r')[2]
      if shown and self._unsaid and self._has_room(self._patience()):
        shown = self._notice() + shown
      left = self._send(shown)
      self._count(left)
      if left:
        self._drops_a_line = not left.endswith(b'\n')
    return len(content)

  def _count(self, lost: bytes) -> None:
    lines = lost.count(b'\n')
    self.dropped += lines
    self._unsaid += lines

  def _notice(self) -> bytes:
    notice = f'(lines missing here, since nobody read them: {self._unsaid:,})\n'
    if not self._begins_a_line:
      notice = f'\n{notice}'
    self._unsaid = 0
    return notice.encode()

  def _send(self, content: bytes) -> bytes:
    """Writes the content; returns what found no room."""
    while content and self._has_room(self._patience()):
      try:
        written = os.write(self._output, content[:_PIECE])
      except BlockingIOError:  # another process has taken the room
        break
      last = content[written - 1 : written]
      self._begins_a_line = last == b'\n'
      content = content[written:]
    return content

  def _patience(self) -> float:
    since_wait = time.monotonic() - self._waited_until
    seconds = min(_LONGEST_WAIT, _SHARE * since_wait)
    return seconds if seconds >= _SHORTEST_WAIT else 0.0

  def _has_room(self, seconds: float) -> bool:
    poll = select.poll()
    poll.register(self._output, select.POLLOUT)
    if poll.poll(0):  # also if the reader is gone, which the write then reports
      return True
    if not seconds:
      return False
    found = poll.poll(1000 * seconds)
    self._waited_until = time.monotonic()
    return bool(found)

  def _open_again(self) -> None:
    """Opens the pipe or the terminal without blocking, on Linux."""
    if stat.S_ISSOCK(os.fstat(self._descriptor).st_mode):
      return
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
    with contextlib.suppress(OSError):  # of another system, or a terminal of another user
      new = os.open(f'/proc/self/fd/{self._descriptor}', flags)
      if os.isatty(new):  # programs that a hook starts expect that their terminal waits
        self._output = new
      else:
        os.dup2(new, self._descriptor)
        os.close(new)

  @contextlib.contextmanager
  def patiently(self) -> Iterator[None]:
    """A context in which writes to the descriptor wait for their reader."""
    os.dup2(self.waiting, self._descriptor)
    try:
      yield
    finally:
      self._close_output()
      self._open_again()

  def restore(self) -> None:
    """Lets writes to the descriptor wait as before, unless nobody reads them now."""
    has_room = self._has_room(0.0)
    self._close_output()
    if has_room:
      os.dup2(self.waiting, self._descriptor)
    os.close(self.waiting)

  def _close_output(self) -> None:
    if self._output != self._descriptor:
      os.close(self._output)
    self._output = self._descriptor

  def writable(self) -> bool:
    return True

  def fileno(self) -> int:
    return self._descriptor

  def isatty(self) -> bool:
    return os.isatty(self._descriptor)
