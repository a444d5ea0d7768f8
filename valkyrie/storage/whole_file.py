"""Files that are there whole or not at all, however the process ends."""

import pathlib

from valkyrie.errors import storage_errors
from valkyrie.storage import held_folder, owned


def write(path: pathlib.Path, content: bytes | str, advice: str = 'Make room there.') -> None:
  """Writes a file, or replaces it; raises a StorageError with the advice if that fails."""
  with storage_errors(f'{path} cannot be written', advice):
    place = held_folder.place(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
      content = content.encode()
    with owned.new_file(place) as file:
      file.write(content)
