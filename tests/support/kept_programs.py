"""Compiled programs that tests share, within a run of the suite and with the runs after it."""

import pathlib
import zlib

from jax._src import compilation_cache

MOST_BYTES = 2**31
_CHECKED = 'checked'  # an empty file: when the folder was last checked
_ERRORS = (zlib.error, ValueError, EOFError, RuntimeError)


def check(folder: pathlib.Path) -> None:
  """Deletes the programs that a killed process has half written, and all above `MOST_BYTES`.

  jax writes a program in place, and would warn at every later use of half a one. Only programs
  that are newer than the last check are read. A program that another run is writing may go, too:
  it is then compiled once more.
  """
  folder.mkdir(parents=True, exist_ok=True)
  marker = folder / _CHECKED
  last_check = marker.stat().st_mtime if marker.exists() else 0.0
  marker.touch()
  programs = {program: program.stat() for program in folder.glob('*-cache')}
  is_full = sum(found.st_size for found in programs.values()) > MOST_BYTES
  for program, found in programs.items():
    is_new = found.st_mtime >= last_check - 1  # file systems round times
    if is_full or (is_new and not _is_whole(program)):
      program.unlink(missing_ok=True)


def _is_whole(program: pathlib.Path) -> bool:
  try:
    compilation_cache.decompress_executable(program.read_bytes())
  except _ERRORS:
    return False
  return True
