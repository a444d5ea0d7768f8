"""A lock of the kernel is asked for in one place, which has three answers."""

import errno
import fcntl
import os
import pathlib
import re

import pytest

import valkyrie
from valkyrie.storage import locks


def test_a_lock_excludes_others_until_it_is_free(tmp_path):
  path = tmp_path / 'file'
  path.touch()
  with path.open('rb') as file, path.open('rb') as other:
    assert locks.attempt(file) is True
    assert locks.attempt(other) is False
    assert locks.attempt(other, shared=True) is False
    locks.free(file)
    assert locks.attempt(other, shared=True) is True
    assert locks.attempt(file, shared=True) is True
    assert locks.attempt(file) is False


@pytest.mark.parametrize('code', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_told_from_one_that_fails(tmp_path, monkeypatch, code):
  def answer(number):
    def refuse(*_):
      raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, 'flock', refuse)

  with (tmp_path / 'file').open('wb') as file:
    answer(code)
    assert locks.attempt(file) is None
    answer(errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
      locks.attempt(file)


def test_the_package_asks_for_locks_in_this_place_only():
  (package,) = valkyrie.__path__
  files = pathlib.Path(package).rglob('*.py')
  asking = [file.name for file in files if re.search(r'\bfcntl\b', file.read_text())]
  assert asking == ['locks.py']
