"""Faulty configurables of a run: feeds, an evaluator and a mixer."""

import hashlib
import os
import pathlib
import signal
import time

import gin
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.data.feed import TaskFeed
from valkyrie.run.evaluator import Evaluator

_MARK = 10**6  # added to the segment ids of the steps in which NonFinite acts


def _stall():
  time.sleep(1000)


@gin.configurable
class FaultyFeed(TaskFeed):
  """A feed with a fault in the given steps of one process.

  fault: 'stall' never returns, once, at the step of `Act`; 'nan' and 'inf' are the weights of all
  tokens; 'mark' marks the tokens for `NonFinite`.
  """

  def __init__(self, fault, *arguments, steps=(), process=0, **options):
    super().__init__(*arguments, **options)
    self._fault = fault
    self._steps = steps if jax.process_index() == process else ()
    if fault == 'stall':
      self._once = pathlib.Path(gin.query_parameter('Act.once'))
      self._steps = (gin.query_parameter('Act.at'),)  # this process's step

  def read(self, position, length, rows=None):
    batch = super().read(position, length, rows)
    if position // length + 1 in self._steps:
      if self._fault == 'mark':
        return batch._replace(segment_ids=batch.segment_ids + _MARK)
      if self._fault != 'stall':
        return batch._replace(weights=batch.weights * np.float32(self._fault))
      if not self._once.exists():
        self._once.touch()
        _stall()
    return batch


@gin.configurable
class HashingFeed(TaskFeed):
  """A feed that appends `position row hash` for each row of a batch."""

  def __init__(self, path, *arguments, **options):
    super().__init__(*arguments, **options)
    self._path = path

  def read(self, position, length, rows):
    batch = super().read(position, length, rows)
    with open(self._path, 'a') as file:
      for number, row in enumerate(rows):
        digest = hashlib.sha256(b''.join(leaf[number].tobytes() for leaf in batch)).hexdigest()
        print(position, row, digest, file=file, flush=True)
    return batch


@gin.configurable
class FarFeed(TaskFeed):
  """A feed whose run begins at a distant token of its rows."""

  def __init__(self, first, *arguments, **options):
    super().__init__(*arguments, **options)
    self._first = first

  def read(self, position, length, rows=None):
    return super().read(self._first + position, length, rows)


@gin.configurable
class InterruptedEvaluator(Evaluator):
  """An evaluator that sends SIGTERM to its own process once, at its first evaluation."""

  def __call__(self, *arguments, **options):
    once = pathlib.Path(gin.query_parameter('Act.once'))
    if not once.exists():
      once.touch()
      os.kill(os.getpid(), signal.SIGTERM)
    return super().__call__(*arguments, **options)


@gin.configurable
class NonFinite(hk.Module):
  """An identity mixer; in marked steps one of its values is not finite.

  place: 'loss' replaces the output, 'gradient' the gradient of the input, 'carry' the carry.
  """

  causal = True
  dropout = 0.0

  def __init__(self, place, value, name=None):
    super().__init__(name)
    self._place, self._value = place, float(value)

  def initial_carry(self, batch_size, dtype):
    return jnp.zeros((batch_size, 1), jnp.float32)

  def forward_flops(self, width):
    return 0

  def __call__(self, x, carry, *, positions, segment_ids):
    here = segment_ids >= _MARK
    if self._place == 'loss':
      return jnp.where(here[..., None], self._value, x), carry
    if self._place == 'gradient':
      return _replace_gradient(x, here[..., None], self._value), carry
    return x, jnp.where(here[:, :1], self._value, carry)


@jax.custom_vjp
def _replace_gradient(x, here, value):
  return x


_replace_gradient.defvjp(
  lambda x, here, value: (x, (here, value)),
  lambda kept, gradient: (jnp.where(kept[0], kept[1], gradient), None, None),
)
