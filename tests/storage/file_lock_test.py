"""A process that waits for a lock says for whom; without locks, it goes on."""

import errno
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from valkyrie.storage import file_lock

HOLDS = """
import os, pathlib, signal, sys
from valkyrie.storage import file_lock
with file_lock.held(pathlib.Path(sys.argv[1]), 'build a store', lambda: None):
  print('held', flush=True)
  os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_waiting_process_names_a_paused_holder_and_its_advice_works(tmp_path, caplog):
  file, held = tmp_path / 'store' / '.lock', threading.Event()
  holder = subprocess.Popen([sys.executable, '-c', HOLDS, file], stdout=subprocess.PIPE)
  assert holder.stdout is not None
  assert holder.stdout.readline() == b'held\n'

  def wait():
    with file_lock.held(file, 'build a store', lambda: None):
      held.set()

  waiting = threading.Thread(target=wait)
  with caplog.at_level(logging.WARNING):
    waiting.start()
    while not caplog.messages:
      assert not held.is_set()
      time.sleep(0.05)
  (said,) = caplog.messages
  assert re.match(
    rf'Waiting to build a store: process {holder.pid} on \S+, since \d{{4}}-\S+ \S+ UTC, ', said
  )
  (advice,) = re.findall(r'or end it by: kill -KILL (\d+)$', said)
  os.kill(int(advice), signal.SIGKILL)
  assert held.wait(60)
  waiting.join()
  holder.wait()


def test_a_text_of_somebody_else_in_the_lock_is_not_shown(tmp_path, caplog):
  file = tmp_path / '.lock'
  file.write_text('\x1b[2J process 1 on a')
  with open(file) as stream:
    fcntl.flock(stream, fcntl.LOCK_EX)
    assert file_lock._waiting(file, 'build').startswith('Waiting to build: another process holds')


@pytest.mark.parametrize('code', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_without_locks_the_block_runs_and_the_log_says_so(tmp_path, monkeypatch, caplog, code):
  def refuse(*_):
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(fcntl, 'flock', refuse)
  with file_lock.held(tmp_path / '.lock', 'build', lambda: None):
    pass
  assert f'The file system of {tmp_path} has no locks' in caplog.text
