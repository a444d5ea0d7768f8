"""The holder of a lease: its process, and whether that has ended."""

import os
import pathlib
import socket
from typing import Any
import uuid

BEAT_SECONDS = 10.0
MISSED = 3  # beats, after which a lease is free


class LeaseTaken(Exception):
  """Another process holds the lease; the message names it."""


def this_process() -> dict[str, Any]:
  """The content of a new lease of this process."""
  return {
    'token': uuid.uuid4().hex,
    'process': os.getpid(),
    'host': socket.gethostname(),
    'boot': _boot(),
    'beat': 0,
  }


def words(lease: dict[str, Any]) -> str:
  """The holder of a lease, for a message."""
  return f'process {lease.get("process")} on {lease.get("host")}'


def has_ended(lease: dict[str, Any]) -> bool | None:
  """Whether the holder of a lease has ended; None if it runs on another machine."""
  if (lease.get('host'), lease.get('boot')) != (socket.gethostname(), _boot()):
    return None
  try:
    os.kill(int(lease.get('process')), 0)  # pyright: ignore[reportArgumentType]
  except (TypeError, ValueError, ProcessLookupError):
    return True
  except PermissionError:
    return False
  return False


def _boot() -> str:
  """Identifies the time since the machine was started; '' where it cannot be read."""
  try:
    return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
  except OSError:
    return ''
