"""Hooks of a run: hashes of its states, the length of its steps, and what fails in one of them."""

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


def _hash(tree):
  """Of what this process holds of it."""
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
class HashLearnt:
  """Appends [step, hash of parameters and optimizer, whether the carry is empty]."""

  def __init__(self, path):
    self._path = path

  def __call__(self, step, state, metrics):
    learnt = _hash((state.params, state.optimizer_state))
    carries = [
      shard.data for leaf in jax.tree.leaves(state.carry) for shard in leaf.addressable_shards
    ]
    with open(self._path, 'a') as file:
      print(json.dumps([step, learnt, not any(map(np.any, carries))]), file=file, flush=True)


@gin.configurable
class Pace:
  """Gives each step a length, so that there is a moment in which something can happen to it."""

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


def _die():
  os.kill(os.getpid(), signal.SIGKILL)


def _ask():
  os.kill(os.getpid(), signal.SIGTERM)


_DEEDS = {
  'ask': _ask,
  'die': _die,
  'fail': _fail,
  'stop': _stop,
  'deadlock': _deadlock,
}


@gin.configurable
class Act:
  """Does something at a step, unless the file `once` says that it was done.

  'fail to save' fills the disk first, whose root is the path of `once` without its ending.
  """

  def __init__(self, once, at=None, what='fail'):
    self._once, self._at, self._what = pathlib.Path(once), at, what

  def __call__(self, step, state, metrics):
    if step == self._at and not self._once.exists():
      self._once.touch()
      if self._what == 'fail to save':
        _fill(self._once.with_suffix(''))
        _fail()
      _DEEDS[self._what]()


def _fill(disk):
  with contextlib.suppress(OSError), open(disk / 'ballast', 'wb', buffering=0) as file:
    while True:
      file.write(bytes(4096))
