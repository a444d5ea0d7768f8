"""Files that grow: neither a link, a second name nor something other than a file is written."""

import errno
import fcntl
import io
import os
import pathlib
import resource

import pytest

from valkyrie.errors import StorageError
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.progress import Progress
from valkyrie.storage import appended
from valkyrie.storage.lease import DiskLock


def lines(path):
  writer = JsonLines(path)
  writer.write({'step': 1})
  writer.close()


def log(path):
  progress = Progress(1, io.StringIO())
  progress.log_to(path)
  progress.say('a line')


def lock(path):
  DiskLock(path.parent).release()


WRITERS = {'metrics.jsonl': lines, 'log.txt': log, 'trainer.lock': lock}


@pytest.mark.parametrize('name', WRITERS)
@pytest.mark.parametrize('kind', ['link', 'dangling link', 'pipe', 'folder'])
def test_what_is_not_a_file_is_refused_and_unchanged(tmp_path, name, kind, capsys):
  path, other = tmp_path / 'run' / name, tmp_path / 'precious'
  path.parent.mkdir()
  if kind == 'link':
    other.write_text('precious')
  if 'link' in kind:
    path.symlink_to(other)
  elif kind == 'pipe':
    os.mkfifo(path)  # to open one waits for a reader
  else:
    path.mkdir()
  said = 'is a symbolic link' if 'link' in kind else 'is not a file'
  if name == 'log.txt':  # which ends no run
    WRITERS[name](path)
  else:
    with pytest.raises(StorageError, match=f'{path} {said}.* Move it away'):
      WRITERS[name](path)
  assert other.exists() == (kind == 'link')
  assert not other.exists() or other.read_text() == 'precious'


@pytest.mark.parametrize('name', WRITERS)
def test_a_file_with_two_names_becomes_two(tmp_path, name):
  first, copy = tmp_path / 'first' / name, tmp_path / 'copy' / name
  for path in (first, copy):
    path.parent.mkdir()
  WRITERS[name](first)
  before = first.read_bytes()
  os.link(first, copy)  # as `cp -al` does
  WRITERS[name](copy)
  assert first.read_bytes() == before != copy.read_bytes()
  if name != 'trainer.lock':
    assert copy.read_bytes().startswith(before)
  assert first.stat().st_nlink == copy.stat().st_nlink == 1
  assert [path.name for path in copy.parent.iterdir()] == [name]


def test_a_copy_by_hard_links_has_a_lock_of_its_own(tmp_path):
  for name in ('first', 'copy'):
    (tmp_path / name).mkdir()
  DiskLock(tmp_path / 'first').release()
  os.link(tmp_path / 'first' / 'trainer.lock', tmp_path / 'copy' / 'trainer.lock')
  copy = DiskLock(tmp_path / 'copy')
  copy.check()
  with pytest.raises(StorageError, match='is training in'):
    DiskLock(tmp_path / 'copy')
  first = DiskLock(tmp_path / 'first')
  first.check()
  copy.release()
  first.release()


def test_a_copy_of_a_run_that_is_training_is_refused_with_what_to_do(tmp_path):
  for name in ('first', 'copy'):
    (tmp_path / name).mkdir()
  first = DiskLock(tmp_path / 'first')
  place = tmp_path / 'copy' / 'trainer.lock'
  os.link(tmp_path / 'first' / 'trainer.lock', place)
  with pytest.raises(StorageError, match=f'In that case delete {place}'):
    DiskLock(tmp_path / 'copy')
  place.unlink()  # the advice
  copy = DiskLock(tmp_path / 'copy')
  first.check()
  copy.release()
  first.release()


def test_writers_at_once_replace_a_shared_file_once(tmp_path):
  first, copy = tmp_path / 'a.jsonl', tmp_path / 'b.jsonl'
  lines(first)
  os.link(first, copy)
  writers = [JsonLines(copy) for _ in range(3)]
  for step, writer in enumerate(writers):
    writer.write({'step': 10 + step})
    writer.close()
  assert len(copy.read_text().splitlines()) == 4 and len(first.read_text().splitlines()) == 1


def test_a_lock_that_another_program_holds_is_not_waited_for_longer_than_asked(tmp_path):
  path = pathlib.Path(tmp_path, 'a')
  with appended.opened(path) as file, path.open() as other:
    with appended.locked(file, 0.0) as is_held:
      assert is_held
    fcntl.flock(other, fcntl.LOCK_SH)
    with appended.locked(file, 0.0) as is_held:
      assert not is_held


def test_a_full_disk_leaves_no_part_of_what_is_appended(tmp_path):
  path = tmp_path / 'supervise.jsonl'
  appended.append(path, b'a line\n')
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
  try:
    with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
      appended.append(path, b'another line\n')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  appended.append(path, b'a third one\n')
  assert path.read_text().splitlines() == ['a line', 'a third one']


def test_a_link_that_is_put_there_at_the_last_moment_is_not_followed(tmp_path, monkeypatch):
  (tmp_path / 'other').write_text('other')
  (tmp_path / 'log.txt').symlink_to('other')
  monkeypatch.setattr(appended.os.path, 'lexists', lambda path: False)  # as it was a moment ago
  with pytest.raises(OSError, match=r'symbolic links.*log\.txt'):
    appended.opened(tmp_path / 'log.txt')
  assert (tmp_path / 'other').read_text() == 'other'
