"""The recurrence over a chunk, from the state carried in to the state carried out.

Where time is split over devices (see `time_shards`), each device scans its piece from zero. What a
piece does to the state before it is then known, Λ̄^T x + what it ended with, and is gathered from
all: one state and one decay a device. The state that enters a piece is so composed, and grows
through it by powers of Λ̄, up to the first document that starts there.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from valkyrie.models.s5.powers import powers
from valkyrie.models.s5.scan import Complex, diagonal_scan
from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array


def scan_chunk(
  decay: Complex, inputs: Complex, carry: Complex, reset: Array, length: Array, *, form: str
) -> tuple[Complex, Complex]:
  """Runs `scan.diagonal_scan` over a chunk, or over this device's piece of one.

  Args:
    decay: Λ̄ [P].
    inputs: [T, B, P].
    carry: the state [B, P] before the chunk.
    reset: bool [T, B], true where the step starts afresh from zero.
    length: int32 [B], the steps that count: what comes after them is padding.
    form: a key of `scan.FORMS`.

  Returns:
    (the states [T, B, P], the state [B, P] after the chunk's last step that counts).
  """
  if sequence_parallel.axes():
    return _scan_piece(decay, inputs, carry, reset, length, form=form)
  states = diagonal_scan(decay, inputs, carry, reset, form=form)
  return states, state_after(states, carry, length)


def state_after(states: Complex, initial: Complex, length: Array) -> Complex:
  """The state [B, P] after `length` [B] steps: padding at a chunk's end leaves no trace."""

  def pick(part, first):
    last = jnp.take_along_axis(part, jnp.maximum(length - 1, 0)[None, :, None], axis=0)[0]
    return jnp.where(length[:, None] > 0, last, first)

  return Complex(pick(states.re, initial.re), pick(states.im, initial.im))


class _Piece(NamedTuple):
  """What a piece of time does to the state x before it, decay · x + state; [B, P] each."""

  decay: Complex
  state: Complex


def _then(first: _Piece, second: _Piece) -> _Piece:
  return _Piece(second.decay * first.decay, second.decay * first.state + second.state)


def _scan_piece(
  decay: Complex, inputs: Complex, carry: Complex, reset: Array, length: Array, *, form: str
) -> tuple[Complex, Complex]:
  time, is_first = reset.shape[0], sequence_parallel.index() == 0
  steps = np.arange(time)[:, None]
  # The carry enters on device 0, where it is right.
  known = carry.map(lambda part: jnp.where(is_first, part, 0))
  states = diagonal_scan(decay, inputs, known, reset, form=form)

  table = powers(decay, time)
  survives = jnp.min(jnp.where(reset, steps, time), axis=0)  # steps that what enters lives through
  passes = (survives >= length)[:, None]
  through = table.at(length).map(lambda part: jnp.where(passes, part, 0))
  before, after = sequence_parallel.before_and_after(
    _Piece(through, state_after(states, known, length)), _then
  )

  entering = before.state.map(lambda part: jnp.where(is_first, 0, part))
  grown = table.grown(decay.map(lambda part: part[None]) * entering, time)
  lives = (steps < survives[None])[..., None]
  return states + grown.map(lambda part: jnp.where(lives, part, 0)), after.state
