"""Temporary names of files and folders, which this program alone makes, and recognizes.

    .NAME.<16 random digits><8 of the machine><8 that check the others>      all hexadecimal

A name whose digits do not fit together is somebody else's.
"""

import hashlib
import os
import pathlib
import re
import secrets

_FORM = re.compile(r'\.(.+)\.([0-9a-f]{24})([0-9a-f]{8})', re.DOTALL)
_LONGEST_NAME = 200  # bytes of NAME: a file system allows 255 in all


def make(name: str) -> str:
  """A temporary name for a file or folder that will be called `name`."""
  short = os.fsencode(name)[:_LONGEST_NAME].decode('utf-8', errors='ignore') or 'file'
  digits = secrets.token_hex(8) + _machine()
  return f'.{short}.{digits}{_check_digits(short, digits)}'


def is_one(name: str) -> bool:
  """Whether a file or folder of this name is one that is being written, or was left by a kill."""
  return _match(name) is not None


def target_of(name: str) -> str | None:
  """The name that a temporary name was made for; None if it is another kind of name."""
  match = _match(name)
  return match and match[1]


def is_of_this_machine(name: str) -> bool:
  """Whether a temporary name was made since the last start of this machine."""
  match = _match(name)
  return match is not None and match[2].endswith(_machine())


def _match(name: str) -> re.Match[str] | None:
  match = _FORM.fullmatch(name)
  if match is None or match[3] != _check_digits(match[1], match[2]):
    return None
  return match


def _check_digits(name: str, digits: str) -> str:
  text = f'valkyrie {name} {digits}'.encode(errors='surrogateescape')
  return hashlib.sha256(text).hexdigest()[:8]


def _machine() -> str:
  """8 digits of this start of this machine, within which a lock is certain."""
  try:
    boot = pathlib.Path('/proc/sys/kernel/random/boot_id').read_bytes()
  except OSError:
    boot = os.uname().nodename.encode()
  return hashlib.sha256(boot).hexdigest()[:8]
