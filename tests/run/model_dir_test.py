"""The directory of a run: its write test, and the lock of its trainer."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from valkyrie.checkpoint import steps
from valkyrie.checkpoint.steps import DiskSteps
from valkyrie.errors import StorageError, Unreachable
from valkyrie.storage import lease
from valkyrie.storage.lease import DiskLock, lock_holder

HOLD = """
import pathlib, sys, time
from valkyrie.storage.lease import DiskLock
lock = DiskLock(pathlib.Path(sys.argv[1]))
print('locked', flush=True)
time.sleep(600)
"""


def test_a_lock_stops_a_second_trainer_and_ends_with_its_holder(tmp_path):
  command = [sys.executable, '-c', HOLD, str(tmp_path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
    assert holder.stdout.readline() == 'locked\n'
    with pytest.raises(StorageError) as refusal:
      DiskLock(tmp_path)
    assert refusal.value.exit_code == 74
    assert f'process {holder.pid} on {socket.gethostname()}' in str(refusal.value)
    holder.send_signal(signal.SIGKILL)
  lock = DiskLock(tmp_path)
  with pytest.raises(StorageError, match=f'process {os.getpid()} on'):
    DiskLock(tmp_path)
  lock.release()
  DiskLock(tmp_path).release()


def test_a_lock_names_its_holder_and_no_other_one(tmp_path):
  """A later holder in a container has the same PID and host name, as this process has again."""
  holders = set()
  for _ in range(2):
    DiskLock(tmp_path).release()
    holders.add(lock_holder(tmp_path))
  assert len(holders) == 2


def test_a_program_that_reads_the_lock_is_named_and_waited_for(tmp_path, monkeypatch):
  monkeypatch.setattr(lease, 'READER_SECONDS', 0.3)
  DiskLock(tmp_path).release()
  with open(tmp_path / 'trainer.lock') as reader:
    fcntl.flock(reader, fcntl.LOCK_SH)
    with pytest.raises(Unreachable) as refusal:
      DiskLock(tmp_path)
    assert f'process {os.getpid()} (' in str(refusal.value)
    assert f'a shared lock on {tmp_path}/trainer.lock' in str(refusal.value)
    monkeypatch.setattr(lease, 'READER_SECONDS', 600.0)
    threading.Timer(0.3, fcntl.flock, (reader, fcntl.LOCK_UN)).start()
    DiskLock(tmp_path).release()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
  file = tmp_path / 'file'
  file.write_text('precious')
  for place in (file, file / 'below', '/proc/nowhere'):
    with pytest.raises(StorageError, match=f'--model_dir={place}'):
      DiskSteps(place).check_writable()
  for place in (file, file / 'below'):
    with pytest.raises(StorageError, match=r'Move away .*, or name another'):
      DiskSteps(place).check_writable()
  assert file.read_text() == 'precious'


def test_a_file_system_that_cannot_flush_directories_is_refused_at_the_start(tmp_path, monkeypatch):
  def refuse(path):
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

  monkeypatch.setattr(steps, 'sync', refuse)
  with pytest.raises(StorageError, match='directory that can be written: Invalid argument'):
    DiskSteps(tmp_path / 'run').check_writable()
