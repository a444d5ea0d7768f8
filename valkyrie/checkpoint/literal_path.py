"""Paths for Orbax and tensorstore, which do not take every path of a file system literally.

They read `*`, `?` and `[` as a pattern, a backslash as a slash, and `gs:` or a folder /gs, /s3, /az
or /hf of this machine as a bucket. A path through a file descriptor has no such characters.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
from typing import Any

from etils import epath

from valkyrie.storage.bucket import is_bucket

_DESCRIPTORS = '/proc/self/fd'  # of Linux; elsewhere the path itself is used


@contextlib.contextmanager
def literal(place: Any) -> Iterator[epath.Path]:
  """A path to `place`, CHECKPOINTS/STEP/NAME, that is valid inside the context.

  Raises:
    OSError: the folder CHECKPOINTS cannot be opened.
  """
  if is_bucket(place) or not os.path.isdir(_DESCRIPTORS):
    yield epath.Path(place)
    return
  # The folder of the steps: that of a new step may not be visible to the other hosts yet.
  folder = place.parent.parent
  descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
  try:
    yield epath.Path(_DESCRIPTORS) / str(descriptor) / pathlib.Path(place).relative_to(folder)
  finally:
    os.close(descriptor)


def without_descriptors(message: str) -> str:
  """A message of Orbax or tensorstore with paths relative to the folder of the steps."""
  return re.sub(rf'{_DESCRIPTORS}/\d+/', '', message)
