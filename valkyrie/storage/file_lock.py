"""A lock of a file for which processes wait in turn, and which names its holder.

process 31 on a, since 2026-11-28 12:00:00 UTC
"""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import logging
import os
import pathlib
import re
import socket
import time
from typing import BinaryIO

from valkyrie import foreign
from valkyrie.storage import locks, owned

_PAUSE_SECONDS = 1.0  # between two attempts
_FIRST_WORD_SECONDS = 3.0  # of waiting
_NEXT_WORD_SECONDS = 60.0
_HOLDER = re.compile(r'process (\d+) on (\S+), since \S+ \S+ UTC')


@contextlib.contextmanager
def held(file: pathlib.Path, what: str, waits: Callable[[], None]) -> Iterator[None]:
  """Waits for the lock of a file, which is made if it is missing, and holds it during the block.

  The system frees it when its process ends. While another process holds it, `waits` is called every
  second, and the log says who is waited for. On a file system without locks the block runs without
  one, so it must be right when two processes run it at once.

  Args:
    file: the file of the lock; it stays.
    what: what the holder does, for the log: 'build /data/store'.

  Raises:
    OSError: the file cannot be opened, or is a link.
  """
  file.parent.mkdir(parents=True, exist_ok=True)
  with owned.open_lock_file(file) as stream:
    began = time.monotonic()
    due = began + _FIRST_WORD_SECONDS
    while not _is_locked(stream, file):
      waits()
      if time.monotonic() >= due:
        logging.warning('%s', _waiting(file, what))
        due = time.monotonic() + _NEXT_WORD_SECONDS
      time.sleep(_PAUSE_SECONDS)
    since = datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M:%S UTC')
    host = socket.gethostname()
    words = f'process {os.getpid()} on {host}, since {since}\n'
    with contextlib.suppress(OSError):  # a full disk is no reason not to hold the lock
      owned.rewrite(stream, words.encode())
    yield


def _is_locked(stream: BinaryIO, file: pathlib.Path) -> bool:
  is_locked = locks.attempt(stream)
  if is_locked is None:
    logging.warning(
      'The file system of %s has no locks: if another process does the same at the same time, both '
      'do all of the work. The result is right. To avoid that, start one process first.',
      file.parent,
    )
  return is_locked is not False


def _waiting(file: pathlib.Path, what: str) -> str:
  """Who is waited for, and what to do."""
  words = ''
  with contextlib.suppress(OSError, ValueError):
    words = foreign.content(file).decode(errors='replace').strip()
  holder = _HOLDER.fullmatch(words)
  if holder is None:
    return f'Waiting to {what}: another process holds {file}. This process goes on when it ends.'
  return (
    f'Waiting to {what}: {foreign.shown(words)}, does the same. This process goes on when the '
    f'other one is finished or ends. If it is paused, resume it on {foreign.shown(holder[2])} by: '
    f'kill -CONT {holder[1]}, or end it by: kill -KILL {holder[1]}'
  )
