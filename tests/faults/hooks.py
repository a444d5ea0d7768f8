"""Hooks of a run: hashes of its states, a minimal step time, and faults in a step."""

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import threading
import time

import gin
import jax
import numpy as np

from valkyrie.distributed import heartbeat
from valkyrie.monitoring import watcher


def _hash(tree):
  """A hash of the shards of this process."""
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    digest.update(f'{path} {leaf.dtype} {leaf.shape}'.encode())
    for shard in leaf.addressable_shards:
      digest.update(f'{shard.index}'.encode() + np.asarray(shard.data).tobytes())
  return digest.hexdigest()


@gin.configurable
class HashState:
  """Appends `step hash` for each train state."""

  def __init__(self, path):
    self._path = path

  def __call__(self, step, state, metrics):
    with open(self._path, 'a') as file:
      print(step, _hash(state), file=file, flush=True)


@gin.configurable
class HashParameters:
  """Appends [step, hash of parameters and optimizer state, whether the carry is zero]."""

  def __init__(self, path):
    self._path = path

  def __call__(self, step, state, metrics):
    digest = _hash((state.params, state.optimizer_state))
    carries = [
      shard.data for leaf in jax.tree.leaves(state.carry) for shard in leaf.addressable_shards
    ]
    with open(self._path, 'a') as file:
      print(json.dumps([step, digest, not any(map(np.any, carries))]), file=file, flush=True)


@gin.configurable
class Pace:
  """Makes each step longer, so that a fault can be injected during it."""

  def __init__(self, seconds=0.0):
    self._seconds = seconds

  def __call__(self, step, state, metrics):
    time.sleep(self._seconds)


def _fail():
  raise ValueError('an injected bug')


def _stop():
  os.kill(os.getpid(), signal.SIGSTOP)


def _deadlock():
  lock = threading.Lock()
  lock.acquire()
  lock.acquire()


def _kill():
  os.kill(os.getpid(), signal.SIGKILL)


def _terminate():
  os.kill(os.getpid(), signal.SIGTERM)


def _fail_as_a_device():
  raise jax.errors.JaxRuntimeError('INTERNAL: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (injected)')


def _write_garbage():
  pipe = int(os.environ[heartbeat.VARIABLE].partition(':')[0])
  for line in (b'{', b'[1]', b'{"stage": "dance"}', b'{"saved": "x"}', b'{"step": null}', bytes(9)):
    os.write(pipe, line + b'\n')


_ACTIONS = {
  'terminate': _terminate,
  'kill': _kill,
  'fail': _fail,
  'fail as a device': _fail_as_a_device,
  'stop': _stop,
  'deadlock': _deadlock,
  'garbage': _write_garbage,
}


@gin.configurable
class LogIn:
  """Takes the secrets that a tracker of a user's own needs."""

  def __init__(self, api_key, token, headers, others):
    del api_key, token, headers, others

  def __call__(self, step, state, metrics):
    pass


@gin.configurable
class HangingTracker:
  """A tracker that does not return from one of its methods; its run waits for seconds only."""

  def __init__(self, method):
    self._method = method
    watcher._LONGEST_CALL = 20.0  # a first picture takes seconds

  def _called(self, method):
    if method == self._method:
      threading.Thread(target=time.sleep, args=(10_000,)).start()  # Python would wait for it, too
      time.sleep(10_000)

  def start(self, run):
    self._called('start')

  def write(self, stream, step, numbers):
    self._called('write')

  def end(self):
    self._called('end')


@gin.configurable
class Act:
  """Performs an action at a step, unless the file `once` exists, and makes that file.

  The action 'fail to save' first fills the disk at the path of `once` without its suffix; 'wait'
  waits until `once` is deleted.
  """

  def __init__(self, once, at=None, action='fail'):
    self._once, self._at, self._action = pathlib.Path(once), at, action

  def __call__(self, step, state, metrics):
    if step == self._at and not self._once.exists():
      self._once.touch()
      if self._action == 'fail to save':
        _fill(self._once.with_suffix(''))
        _fail()
      if self._action == 'wait':
        while self._once.exists():
          time.sleep(0.01)
        return
      _ACTIONS[self._action]()


def _fill(disk):
  with contextlib.suppress(OSError), open(disk / 'ballast', 'wb', buffering=0) as file:
    while True:
      file.write(bytes(4096))
