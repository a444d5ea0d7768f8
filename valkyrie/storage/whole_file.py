"""Files that are there whole or not at all, however the process ends."""

import os
import pathlib
import uuid

from valkyrie.errors import storage_errors


def write(path: pathlib.Path, content: bytes | str, advice: str = 'Make room there.') -> None:
  """Writes a file, or replaces it; raises a StorageError with the advice if that fails."""
  unfinished = path.with_name(f'.{path.name}.{uuid.uuid4().hex}')
  with storage_errors(f'{path} cannot be written', advice):
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      with open(unfinished, 'xb') as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
      unfinished.replace(path)
    finally:
      unfinished.unlink(missing_ok=True)
