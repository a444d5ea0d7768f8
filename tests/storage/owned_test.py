"""Only what this program made is replaced or deleted, and only when its successor is complete."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

from valkyrie.errors import StorageError
from valkyrie.storage import owned, whole_file

WRITES_A_PART = """
import os, pathlib, signal, sys
from valkyrie.storage import owned
with owned.new_{kind}(pathlib.Path(sys.argv[1])) as made:
  if '{kind}' == 'file':
    made.write(b'a part')
    made.flush()
  else:
    (made / 'part').write_bytes(b'a part')
  print('begun', flush=True)
  os.kill(os.getpid(), signal.{signal})
"""


def begun(path, kind, ending='SIGKILL'):
  """A process that has written a part of a file or folder, and then got a signal."""
  program = WRITES_A_PART.format(kind=kind, signal=ending)
  process = subprocess.Popen([sys.executable, '-c', program, str(path)], stdout=subprocess.PIPE)
  assert process.stdout is not None
  assert process.stdout.readline() == b'begun\n'
  return process


def names(folder):
  return sorted(os.listdir(folder))


@pytest.mark.parametrize('kind', ['file', 'folder'])
def test_the_next_write_removes_what_a_killed_process_left(tmp_path, kind):
  begun(tmp_path / 'result', kind).wait()
  assert len(names(tmp_path)) == 1
  whole_file.write(tmp_path / 'another', b'whole')
  assert names(tmp_path) == ['another']


@pytest.mark.parametrize('kind', ['file', 'folder'])
def test_what_a_living_process_writes_stays_and_appears_whole(tmp_path, kind):
  process = begun(tmp_path / 'result', kind, 'SIGSTOP')
  try:
    whole_file.write(tmp_path / 'another', b'whole')
    assert len(names(tmp_path)) == 2
  finally:
    process.send_signal(signal.SIGCONT)
  assert process.wait() == 0
  assert names(tmp_path) == ['another', 'result']


@pytest.mark.parametrize(
  'kind, place, name',
  [
    ('file', owned.locks, 'attempt'),
    ('folder', owned.locks, 'attempt'),
    ('folder', owned.os, 'open'),
  ],
)
def test_what_is_not_locked_yet_can_be_taken_for_litter_and_is_made_again(
  tmp_path, monkeypatch, kind, place, name
):
  function = getattr(place, name)
  removed = []

  def remove_first(*arguments, **options):
    monkeypatch.setattr(place, name, function)
    removed.extend(names(tmp_path))
    owned.remove_litter(tmp_path)  # as another process that starts to write at this moment
    assert names(tmp_path) == []
    return function(*arguments, **options)

  monkeypatch.setattr(place, name, remove_first)
  with getattr(owned, f'new_{kind}')(tmp_path / 'result') as made:
    if kind == 'file':
      made.write(b'whole')
    else:
      (made / 'part').write_bytes(b'whole')
    assert len(removed) == 1 and removed != names(tmp_path)
  assert names(tmp_path) == ['result']


@pytest.mark.parametrize(
  'name',
  [
    '.result.0123456789abcdef0123456789abcdef',  # of another program
    '.result.tmp',
    'result.unfinished',
  ],
)
def test_a_name_that_only_looks_temporary_is_somebody_elses(tmp_path, name):
  (tmp_path / name).write_bytes(b'theirs')
  whole_file.write(tmp_path / 'result', b'whole')
  assert (tmp_path / name).read_bytes() == b'theirs'


def test_a_copy_of_a_temporary_file_under_another_name_is_somebody_elses(tmp_path):
  begun(tmp_path / 'result', 'file').wait()
  (left,) = tmp_path.iterdir()
  shutil.copy(left, tmp_path / f'{left.name}.saved')
  whole_file.write(tmp_path / 'result', b'whole')
  assert names(tmp_path) == [f'{left.name}.saved', 'result']


def test_an_error_leaves_the_earlier_file_and_nothing_else(tmp_path):
  whole_file.write(tmp_path / 'result', b'earlier')
  with pytest.raises(ZeroDivisionError), owned.new_file(tmp_path / 'result') as file:
    file.write(b'a part')
    _ = 1 / 0
  assert names(tmp_path) == ['result']
  assert (tmp_path / 'result').read_bytes() == b'earlier'


def test_a_new_file_or_folder_replaces_nothing_if_it_may_not(tmp_path):
  (tmp_path / 'result').write_bytes(b'theirs')
  with pytest.raises(FileExistsError), owned.new_file(tmp_path / 'result', replaces=False):
    pass
  with pytest.raises(FileExistsError), owned.new_folder(tmp_path / 'result'):
    pass
  (tmp_path / 'link').symlink_to(tmp_path / 'gone')
  with pytest.raises(FileExistsError), owned.new_folder(tmp_path / 'link'):
    pass
  assert names(tmp_path) == ['link', 'result']
  assert (tmp_path / 'result').read_bytes() == b'theirs'


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
  (tmp_path / 'target').write_bytes(b'theirs')
  (tmp_path / 'result').symlink_to('target')
  whole_file.write(tmp_path / 'result', b'whole')
  assert (tmp_path / 'target').read_bytes() == b'theirs'
  assert not (tmp_path / 'result').is_symlink()


def test_the_longest_name_can_be_written(tmp_path):
  whole_file.write(tmp_path / ('é' * 127), b'whole')
  assert names(tmp_path) == ['é' * 127]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path):
  (tmp_path / 'file').write_bytes(b'')
  with pytest.raises(StorageError, match='cannot be written'):
    whole_file.write(tmp_path / 'file' / 'result', b'whole')


def made(folder):
  folder.mkdir()
  owned.mark(folder)
  (folder / 'state').mkdir()
  (folder / 'state' / 'array').write_bytes(b'ours')
  return folder


def test_a_marked_folder_is_deleted_and_a_copy_or_renamed_one_stays(tmp_path):
  folder = made(tmp_path / '8.unfinished')
  shutil.copytree(folder, tmp_path / '8.unfinished-forensics')
  assert owned.delete_marked(folder)
  assert not owned.delete_marked(tmp_path / '8.unfinished-forensics')
  made(tmp_path / '9.unfinished').rename(tmp_path / '9.kept')
  assert not owned.delete_marked(tmp_path / '9.kept')
  (tmp_path / '10.unfinished').mkdir()
  assert not owned.delete_marked(tmp_path / '10.unfinished')
  assert names(tmp_path) == ['10.unfinished', '8.unfinished-forensics', '9.kept']


def test_a_folder_into_which_a_thread_still_writes_is_deleted_the_next_time(tmp_path, monkeypatch):
  folder = made(tmp_path / '8.unfinished')
  remove = os.rmdir

  def write_first(path, **options):
    if path == folder:
      (folder / 'late').write_bytes(b'of Orbax')
      monkeypatch.setattr(os, 'rmdir', remove)
    remove(path, **options)

  def find_no_room(path, mode):
    raise OSError(errno.ENOSPC, 'the disk is full')

  monkeypatch.setattr(os, 'rmdir', write_first)
  monkeypatch.setattr(owned, 'open', find_no_room, raising=False)
  with pytest.raises(OSError, match='not empty'):
    owned.delete_marked(folder)
  assert owned.delete_marked(folder)
  assert names(tmp_path) == []


def test_no_link_is_followed_out_of_a_marked_folder(tmp_path):
  theirs = tmp_path / 'theirs'
  theirs.mkdir()
  (theirs / 'text').write_bytes(b'theirs')
  folder = made(tmp_path / '8.unfinished')
  (folder / 'link').symlink_to(theirs)
  (folder / 'state' / 'link').symlink_to(theirs / 'text')
  (tmp_path / '9.unfinished').symlink_to(folder)
  assert not owned.delete_marked(tmp_path / '9.unfinished')
  assert owned.delete_marked(folder)
  assert (theirs / 'text').read_bytes() == b'theirs'


def test_exactly_the_recorded_files_are_deleted(tmp_path):
  folder, theirs = tmp_path / 'store', tmp_path / 'theirs'
  for place in (folder, folder / 'shard', folder / 'other', theirs):
    place.mkdir()
  for name in ('shard/array', 'shard/notes', 'other/array', 'record'):
    (folder / name).write_bytes(b'')
  (theirs / 'array').write_bytes(b'theirs')
  (folder / 'linked').symlink_to(theirs)
  (folder / 'link').symlink_to(theirs / 'array')
  recorded = ['shard/array', 'other/array', '../theirs/array', 'linked/array', 'link', 'record']
  stays = owned.delete_recorded(folder, recorded)
  assert stays == ['link', 'linked', 'shard/notes']
  assert (theirs / 'array').read_bytes() == b'theirs'
  for name in stays:
    (folder / name).unlink()
  assert owned.delete_recorded(folder, ['shard/array']) == []
  assert not folder.exists()


def test_a_link_to_a_folder_is_not_a_folder_of_ours(tmp_path):
  (tmp_path / 'theirs').mkdir()
  (tmp_path / 'theirs' / 'array').write_bytes(b'theirs')
  (tmp_path / 'store').symlink_to('theirs')
  owned.delete_recorded(tmp_path / 'store', ['array'])
  assert (tmp_path / 'theirs' / 'array').read_bytes() == b'theirs'


def test_a_move_replaces_nothing(tmp_path):
  for name in ('one', 'two'):
    (tmp_path / name).write_bytes(name.encode())
  with pytest.raises(FileExistsError):
    owned.move(tmp_path / 'one', tmp_path / 'two')
  owned.move(tmp_path / 'one', tmp_path / 'three')
  assert (tmp_path / 'two').read_bytes() == b'two'
  assert names(tmp_path) == ['three', 'two']


def test_what_another_machine_left_is_removed_after_a_day(tmp_path):
  digits = '0123456789abcdef' + '00000000'  # of the file and of the machine
  check = hashlib.sha256(f'valkyrie result {digits}'.encode()).hexdigest()[:8]
  left = tmp_path / f'.result.{digits}{check}'
  left.write_bytes(b'a part')
  whole_file.write(tmp_path / 'result', b'whole')
  assert left.exists()
  os.utime(left, (0, 0))
  whole_file.write(tmp_path / 'result', b'whole')
  assert names(tmp_path) == ['result']


def test_only_a_regular_file_is_deleted(tmp_path):
  os.mkfifo(tmp_path / 'pipe')
  (tmp_path / 'target').write_bytes(b'')
  (tmp_path / 'link').symlink_to('target')
  for name in ('pipe', 'link', 'missing'):
    assert not owned.delete_file(tmp_path / name)
  assert owned.delete_file(tmp_path / 'target')
  assert names(tmp_path) == ['link', 'pipe']
