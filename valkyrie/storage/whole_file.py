"""Files that are there whole or not at all, however the process ends."""

import os
import pathlib

from valkyrie import foreign
from valkyrie.errors import write_errors
from valkyrie.storage import held_folder, owned
from valkyrie.storage.free_names import free_name


def write(path: pathlib.Path, content: bytes | str, otherwise: str = '') -> None:
  """Writes a file, or replaces it; raises a StorageError as `write_errors` if that fails."""
  with write_errors(f'{path} cannot be written', otherwise):
    place = held_folder.place(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
      content = content.encode()
    with owned.new_file(place) as file:
      file.write(content)


def write_version(
  path: pathlib.Path,
  content: bytes,
  otherwise: str = 'pass another --model_dir',
) -> None:
  """As `write`; an earlier file with another content stays as NAME.1, NAME.2, ...

  A folder that a user names may have a file of theirs under a name that a run uses.
  """
  with write_errors(f'{path} cannot be written', otherwise, also=(ValueError,)):
    place = held_folder.place(path)
    if place.is_file():
      old = foreign.content(place)
      if old == content:
        return
      write(_free_number(path), old, otherwise)
    write(path, content, otherwise)


def _free_number(path: pathlib.Path) -> pathlib.Path:
  def is_taken(name: str) -> bool:
    return os.path.lexists(held_folder.place(path.with_name(name)))

  return path.with_name(free_name(path.name, is_taken, numbered=True))
