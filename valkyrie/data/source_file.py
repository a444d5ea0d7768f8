"""A file of a text source, and which of several names lead to the same file."""

from collections.abc import Collection, Sequence
import os
from typing import NamedTuple

from valkyrie import foreign
from valkyrie.data.file_names import format_of


class SourceFile(NamedTuple):
  """A file: its path in its file system, its bytes, and its times in nanoseconds.

  modified: the time of its content, which programs such as `cp -p` may set.
  changed: the time of its inode on this machine, which only the system sets; 0 in a bucket.
  """

  path: str
  size: int
  modified: int
  changed: int

  def __str__(self) -> str:
    """The path as messages show it."""
    return foreign.shown(self.path)


def further_links(
  files: Sequence[SourceFile], formats: Collection[str]
) -> dict[SourceFile, SourceFile]:
  """The further names of local files, each with the first name of the same file.

  A name that ends with one of `formats` comes before the others.
  """
  # Only files of equal size and times can be one file; the others need no further look.
  similar: dict[tuple[int, int, int], list[SourceFile]] = {}
  for file in files:
    facts = (file.size, file.modified, file.changed)
    similar.setdefault(facts, []).append(file)
  first_names: dict[tuple[int, int], SourceFile] = {}
  further: dict[SourceFile, SourceFile] = {}
  for group in similar.values():
    if len(group) == 1:
      continue
    known_first = sorted(group, key=lambda file: format_of(file.path) not in formats)
    for file in known_first:
      status = os.stat(file.path)
      identity = (status.st_dev, status.st_ino)
      first = first_names.setdefault(identity, file)
      if first is not file:
        further[file] = first
  return further
