"""The lock of a trainer on file systems that have no locks."""

import errno
import fcntl
import json
import os
import threading
import time

import pytest

from valkyrie.checkpoint import holder, model_dir
from valkyrie.checkpoint.model_dir import TrainerLock
from valkyrie.errors import StorageError, Unreachable

BEAT = 0.05


@pytest.fixture(autouse=True, params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def locks(request, monkeypatch):
  """File systems without locks."""

  def flock(file, how):
    raise OSError(request.param, os.strerror(request.param))

  monkeypatch.setattr(fcntl, 'flock', flock)
  monkeypatch.setattr(holder, 'BEAT_SECONDS', BEAT)


def write(path, **changes):
  """The lease of a process of this host that has ended, with changes."""
  ended = {**holder.this_process(), 'token': 'x', 'process': 2**22 + 1}
  path.joinpath('trainer.lease').write_text(json.dumps({**ended, **changes}))


def test_a_second_trainer_is_refused_until_the_first_has_ended(tmp_path):
  first = TrainerLock(tmp_path)
  with pytest.raises(StorageError, match=f'process {os.getpid()} on .* is training in'):
    TrainerLock(tmp_path)
  time.sleep(5 * BEAT)
  first.check()
  first.release()
  TrainerLock(tmp_path).release()
  assert [path.name for path in tmp_path.iterdir()] == ['trainer.lock']


@pytest.mark.parametrize('change', [{}, {'boot': 'before'}, {'host': 'a'}, {'process': None}])
def test_a_lease_of_a_process_that_has_ended_is_taken_over(tmp_path, change):
  write(tmp_path, **change)
  lock = TrainerLock(tmp_path)
  lock.check()
  lock.release()


def test_a_torn_lease_is_taken_over(tmp_path):
  (tmp_path / 'trainer.lease').write_text('{"tok')
  TrainerLock(tmp_path).release()


def test_a_lease_with_beats_of_another_host_is_respected(tmp_path):
  write(tmp_path, host='a', process=7)
  over = threading.Event()

  def beat():
    number = 0
    while not over.wait(BEAT):
      number += 1
      write(tmp_path, host='a', process=7, beat=number)

  holder = threading.Thread(target=beat)
  holder.start()
  try:
    with pytest.raises(StorageError, match='process 7 on a is training in'):
      TrainerLock(tmp_path)
  finally:
    over.set()
    holder.join()


def test_a_trainer_that_was_paused_beyond_its_lease_writes_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(holder, 'BEAT_SECONDS', 1000.0)  # the thread of the first one stands still
  first = TrainerLock(tmp_path)
  write(tmp_path, host='a', token='of another')
  with pytest.raises(StorageError, match='or its lease went to another one'):
    first.check()
  first.release()
  assert (tmp_path / 'trainer.lease').exists()


def test_one_of_many_that_start_at_once_holds_the_lease(tmp_path):
  write(tmp_path, boot='before')
  held, refused, together = [], [], threading.Barrier(8)

  def start():
    together.wait()
    try:
      held.append(TrainerLock(tmp_path))
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
  assert model_dir.lock_holder(tmp_path)


def test_the_processes_of_a_run_have_locks_of_their_own(tmp_path):
  locks = [TrainerLock(tmp_path, process) for process in (None, 0, 1, 2)]
  with pytest.raises(Unreachable, match=r'is process 1 of the run in .* Give each process its own'):
    TrainerLock(tmp_path, 1)
  locks[2].release()
  TrainerLock(tmp_path, 1).release()
  for lock in (locks[0], locks[1], locks[3]):
    lock.check()
    lock.release()
