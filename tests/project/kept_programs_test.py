"""Of the programs that tests keep, half ones are deleted, and all where the folder is full."""

import os

from jax._src import compilation_cache
import kept_programs


def program(folder, name, size=1000):
  file = folder / f'{name}-cache'
  file.write_bytes(compilation_cache.compress_executable(os.urandom(size)))
  return file


def test_half_a_program_is_deleted_and_a_whole_one_stays(tmp_path):
  kept_programs.check(tmp_path / 'new')
  whole = program(tmp_path, 'whole')
  half = program(tmp_path, 'half')
  half.write_bytes(half.read_bytes()[:500])
  empty = tmp_path / 'empty-cache'
  empty.touch()
  kept_programs.check(tmp_path)
  assert whole.exists() and not half.exists() and not empty.exists()


def test_only_new_programs_are_read(tmp_path, monkeypatch):
  old = program(tmp_path, 'old')
  os.utime(old, (0, 0))
  kept_programs.check(tmp_path)
  program(tmp_path, 'new')
  read = []
  monkeypatch.setattr(compilation_cache, 'decompress_executable', read.append)
  kept_programs.check(tmp_path)
  assert len(read) == 1


def test_a_folder_that_is_too_large_is_emptied(tmp_path, monkeypatch):
  files = [program(tmp_path, name) for name in 'ab']
  monkeypatch.setattr(kept_programs, 'MOST_BYTES', 1500)
  kept_programs.check(tmp_path)
  assert not any(file.exists() for file in files)
