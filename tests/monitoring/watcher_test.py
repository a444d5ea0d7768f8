"""Watchers: nothing that they do ends a run or holds it up."""

import subprocess
import sys
import threading
import types

import pytest

from valkyrie.monitoring import watcher as room
from valkyrie.monitoring.watcher import Watcher


def test_calls_come_in_order_and_what_the_system_refuses_is_tried_again(monkeypatch):
  monkeypatch.setattr(room, '_FIRST_PAUSE', 0.01)
  said, done = [], []
  watcher = Watcher('mine', said.append)
  refusals = iter([True, True, False])

  def write(number):
    if number == 1 and next(refusals):
      raise RuntimeError('a library') from OSError(28, 'No space left on device')
    done.append(number)

  for number in range(4):
    watcher.call('write', write, number)
  watcher.close()
  assert done == [0, 1, 2, 3]
  assert said[0].startswith('mine: write failed, and is tried again for up to ')
  assert said[1:] == ['mine: write has succeeded']


def test_the_calls_that_are_left_at_the_end_share_its_seconds(monkeypatch):
  seconds = [0.0]

  def sleep(pause):
    seconds[0] += pause

  def refuse():
    raise OSError(28, 'No space left on device')

  clock = types.SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep)
  monkeypatch.setattr(room, 'time', clock)
  watcher = Watcher('mine', lambda text: None)
  watcher.call('wait for the end', watcher._closing.wait, 60)
  for _ in range(9):
    watcher.call('write', lambda: None)
    watcher.call('flush', refuse)
  watcher.close()
  assert room.AT_THE_END <= seconds[0] < 2 * room.AT_THE_END


def test_a_call_that_fails_is_said_once_and_the_others_follow():
  said, done = [], []
  watcher = Watcher('mine', said.append)
  for value in ('1', 'x', '2', 'y', '\ud800'):
    watcher.call('write', lambda text: done.append(int(text)), value)
  watcher.call('encode', str.encode, '\ud800')
  watcher.close()
  assert done == [1, 2]
  first, second = said
  assert 'write failed, and is left out: ValueError: invalid literal for int' in first
  assert 'encode failed' in second and 'UnicodeEncodeError' in second


@pytest.mark.parametrize('error', [ValueError('no'), SystemExit(3), KeyboardInterrupt()])
def test_a_watcher_can_be_left_out_after_an_error(error):
  said, done = [], []
  watcher = Watcher('the tracker', said.append, leaves_after_an_error=True)

  def fail():
    raise error

  watcher.call('start', fail)
  watcher.call('write', done.append, 1)
  watcher.close()
  assert done == [] and len(said) == 1
  assert said[0].startswith('warning: the tracker failed in start and is left out from now on: ')


def test_calls_that_come_faster_than_they_return_are_left_out(monkeypatch):
  monkeypatch.setattr(room, '_MOST_BYTES', 10 * room._BYTES_OF_A_CALL)
  said, done, goes_on = [], [], threading.Event()
  watcher = Watcher('mine', said.append)
  begun = threading.Event()
  watcher.call('wait', lambda: begun.set() or goes_on.wait())
  begun.wait()
  for number in range(100):
    watcher.call('write', done.append, number)
  goes_on.set()
  watcher.close()
  assert done == [*range(10)]
  assert 'mine is too slow (write)' in said[0]
  assert said[-1] == 'warning: mine has missed 90 calls'


# A program with a watcher that does not return, and a thread that Python would wait for.
HANGING = """
import sys, threading, time
from valkyrie.distributed import processes
from valkyrie.monitoring import watcher
processes._EXIT_SECONDS = 0.5
one = watcher.Watcher('the tracker Mine', print)
one.longest_call = 0.5
one.call('write', lambda: threading.Thread(target=time.sleep, args=(1000,)).start())
one.call('end', time.sleep, 1000)
one.close()
processes.exit_with(5)
"""


def test_a_watcher_that_does_not_return_does_not_keep_the_program():
  command = [sys.executable, '-c', HANGING]
  done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
  assert done.returncode == 5, done.stderr
  assert 'the tracker Mine is left out, with its last calls (1): end has not returned for' in (
    done.stdout
  )
