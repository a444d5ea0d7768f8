"""The lock of a trainer on file systems that have no locks."""

import contextlib
import errno
import fcntl
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

from faults.file_systems import NO_LOCKS
from faults.harness import another_container
from faults.table import Unavailable
import pytest

from valkyrie.errors import StorageError, Unreachable
from valkyrie.monitoring.json_lines import JsonLines
from valkyrie.monitoring.progress import Progress
from valkyrie.storage import holder, lease, whole_file
from valkyrie.storage.lease import DiskLock

BEAT = 0.05


@pytest.fixture(autouse=True, params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def locks(request, monkeypatch):
  """File systems without locks, beside the memory of the machine."""
  flock_in_memory = fcntl.flock

  def flock(file, how):
    descriptor = file if isinstance(file, int) else file.fileno()
    if pathlib.Path(f'/proc/self/fd/{descriptor}').readlink().parent == holder.MEMORY:
      return flock_in_memory(file, how)
    raise OSError(request.param, os.strerror(request.param))

  monkeypatch.setattr(fcntl, 'flock', flock)
  monkeypatch.setattr(lease, 'BEAT_SECONDS', BEAT)


# A trainer of its own process, on such a file system.
TRAINER = f"""{NO_LOCKS}
import pathlib, sys, time
from valkyrie.errors import StorageError
from valkyrie.storage import lease
from valkyrie.storage.lease import DiskLock
lease.BEAT_SECONDS, lease.MISSED = {BEAT}, 200
try:
  lock = DiskLock(pathlib.Path(sys.argv[1]))
except StorageError as error:
  print(error)
else:
  print('locked', flush=True)
  time.sleep(600)
"""


@contextlib.contextmanager
def trainer(path, prefix=()):
  """A process that locks the directory, and its answer."""
  command = [*prefix, sys.executable, '-c', TRAINER, path]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      yield process, process.stdout.readline()
    finally:
      process.kill()


def read(path):
  return json.loads(path.joinpath('trainer.lease').read_text())


def write(path, **changes):
  """The lease of a process that this one cannot see, with changes."""
  content = {'token': 32 * '0', 'process': 2**22 + 1, 'host': socket.gethostname(), 'beat': 0}
  new = path / 'new'
  new.write_text(json.dumps({**content, **changes}))
  new.replace(path / 'trainer.lease')


def test_a_second_trainer_is_refused_until_the_first_has_ended(tmp_path):
  first = DiskLock(tmp_path)
  with pytest.raises(StorageError, match=f'process {os.getpid()} on .* is training in'):
    DiskLock(tmp_path)
  time.sleep(5 * BEAT)
  first.check()
  first.release()
  DiskLock(tmp_path).release()
  assert [path.name for path in tmp_path.iterdir()] == ['trainer.lock']


@pytest.mark.parametrize('change', [{}, {'host': 'a'}, {'process': None}, {'token': '../trainer'}])
def test_a_lease_without_beats_is_taken_over(tmp_path, change):
  write(tmp_path, **change)
  lock = DiskLock(tmp_path)
  lock.check()
  lock.release()


def test_a_trainer_in_another_container_is_refused(tmp_path):
  """It has the same host name, and the PID of the first one is not there."""
  try:
    container = another_container()
  except Unavailable as error:
    pytest.skip(str(error))
  first = DiskLock(tmp_path)
  with trainer(tmp_path, container) as (_, answer):
    assert f'process {os.getpid()} on {socket.gethostname()} is training in' in answer
  first.check()
  first.release()


@pytest.mark.skipif(not os.path.ismount(holder.MEMORY), reason='only beats tell here')
def test_the_lease_of_a_process_that_was_killed_is_free_at_once(tmp_path):
  with trainer(tmp_path) as (process, answer):
    assert answer == 'locked\n'
    assert holder.has_ended(read(tmp_path)['token']) is False
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(StorageError, match=f'process {process.pid} on .* is training in'):
      DiskLock(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # still a zombie
    write(tmp_path, **{**read(tmp_path), 'process': os.getpid()})  # which has its PID by now
    assert holder.has_ended(read(tmp_path)['token']) is True
  token = read(tmp_path)['token']
  DiskLock(tmp_path).release()
  assert not list(holder.MEMORY.glob(f'*{token}*')), 'its file in memory is deleted'


def test_without_memory_of_this_kernel_beats_tell(tmp_path, monkeypatch):
  run, shown = tmp_path / 'run', tmp_path / 'shown'
  run.mkdir()
  shown.mkdir()
  monkeypatch.setattr(holder, 'MEMORY', shown)  # as a sandbox shows a folder of its host
  monkeypatch.setattr(lease, 'MISSED', 200)
  first = DiskLock(run)
  assert holder.has_ended(read(run)['token']) is None
  assert not list(shown.iterdir())
  with pytest.raises(StorageError, match='is training in'):
    DiskLock(run)
  first.release()
  DiskLock(run).release()


def test_a_torn_lease_is_taken_over(tmp_path):
  (tmp_path / 'trainer.lease').write_text('{"tok')
  DiskLock(tmp_path).release()


@pytest.mark.parametrize('host', ['a', socket.gethostname()])
def test_a_lease_with_beats_is_respected(tmp_path, host):
  """Its process is in another container, whose host may have the same name."""
  write(tmp_path, host=host)
  over = threading.Event()

  def beat():
    number = 0
    while not over.wait(BEAT):
      number += 1
      write(tmp_path, host=host, beat=number)

  beats = threading.Thread(target=beat)
  beats.start()
  try:
    with pytest.raises(StorageError, match=f'process {2**22 + 1} on {host} is training in'):
      DiskLock(tmp_path)
  finally:
    over.set()
    beats.join()


def test_a_trainer_that_was_paused_beyond_its_lease_writes_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(lease, 'BEAT_SECONDS', 1000.0)  # the thread of the first one stands still
  first = DiskLock(tmp_path)
  write(tmp_path, host='a', token='of another')
  with pytest.raises(StorageError, match='or its lease went to another one'):
    first.check()
  first.release()
  assert (tmp_path / 'trainer.lease').exists()


def test_a_trainer_without_its_lease_writes_no_line_and_no_picture(tmp_path, monkeypatch):
  monkeypatch.setattr(lease, 'BEAT_SECONDS', 1000.0)
  first, said = DiskLock(tmp_path), io.StringIO()
  progress, lines = Progress(9, said), JsonLines(tmp_path / 'eval' / 'metrics.jsonl')
  progress.log_to(tmp_path / 'log.txt')
  progress.say('before')
  lines.write({'step': 1})
  write(tmp_path, host='a', token='of another')
  before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  progress.say('after')
  with pytest.raises(StorageError, match='no longer belongs to this run'):
    lines.write({'step': 2})
  with pytest.raises(StorageError, match='no longer belongs to this run'):
    whole_file.write(tmp_path / 'loss_by_position.png', b'')
  with pytest.raises(StorageError, match='no longer belongs to this run'):
    lines.close()
  assert {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()} == before
  assert 'the log ends here' in said.getvalue()
  first.release()


@pytest.mark.parametrize('lost', ['to another', 'deleted'])
def test_a_lost_lease_is_not_written_again(tmp_path, lost):
  first = DiskLock(tmp_path)
  file = tmp_path / 'trainer.lease'
  with first._lease._writing:  # a renewal compares and replaces in two operations
    if lost == 'deleted':
      file.unlink()
    else:
      write(tmp_path, host='a')
  time.sleep(5 * BEAT)  # in which the first one would renew its lease
  assert not file.exists() if lost == 'deleted' else read(tmp_path)['host'] == 'a'
  with pytest.raises(StorageError, match='or its lease went to another one'):
    first.check()
  first.release()
  assert file.exists() == (lost == 'to another')


def test_one_of_many_that_start_at_once_holds_the_lease(tmp_path):
  write(tmp_path)
  held, refused, together = [], [], threading.Barrier(8)

  def start():
    together.wait()
    try:
      held.append(DiskLock(tmp_path))
    except StorageError as error:
      refused.append(error)

  threads = [threading.Thread(target=start) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  in_place = [lock for lock in held if lock.is_in_place]
  assert len(in_place) == 1
  for lock in held:
    lock.release()
  assert lease.lock_holder(tmp_path)


def test_the_processes_of_a_run_have_locks_of_their_own(tmp_path):
  locks = [DiskLock(tmp_path, process) for process in (None, 0, 1, 2)]
  with pytest.raises(Unreachable, match=r'is process 1 of the run in .* Give each process its own'):
    DiskLock(tmp_path, 1)
  locks[2].release()
  DiskLock(tmp_path, 1).release()
  for lock in (locks[0], locks[1], locks[3]):
    lock.check()
    lock.release()
