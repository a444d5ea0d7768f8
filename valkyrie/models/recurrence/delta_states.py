"""The states between the slices of the gated delta rule.

A slice makes S + growth S - erased S + written of the state S before it, or only `written` where a
document starts in it. On one device a state passes from slice to slice. Where the devices share a
chunk, each composes the effects of its slices, and the states between devices are found in
log2(devices) messages.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array


class SliceEffects(NamedTuple):
  """What N slices make of the states before them, see the module."""

  starts: Array  # bool [N, B, 1, 1, 1]: a document starts in the slice
  growth: Array  # [N, B, H, 1, 1], 0 where one starts
  erased: Array  # [N, B, H, K, K], 0 where one starts
  written: Array  # [N, B, H, K, Z]


class _Effect(NamedTuple):
  """What a span of time makes of the state S before it: S + change S + state, or only `state`."""

  starts: Array  # bool [..., 1, 1, 1]: a document starts in the span, so S is dropped
  change: Array  # [..., H, K, K]
  state: Array  # [..., H, K, Z]


def _after(state: Array, effect: _Effect) -> Array:
  """The state after a span."""
  changed = effect.change @ state + effect.state
  return jnp.where(effect.starts, effect.state, state + changed)


def _then(first: _Effect, second: _Effect) -> _Effect:
  """The effect of a span, then of the next one."""
  starts = first.starts | second.starts
  change = first.change + second.change + second.change @ first.change
  state = _after(first.state, second)
  return _Effect(starts, change, state)


def states_between(slices: SliceEffects, initial: Array) -> tuple[Array, Array]:
  """(the state before each slice [N, B, H, K, Z], the state after the chunk).

  `initial` [B, H, K, Z] is the state before the chunk; like the one after, it is correct on
  device 0.
  """
  if not sequence_parallel.axes():
    return _pass_states(slices, initial)
  identity = jnp.eye(slices.erased.shape[-1], dtype=slices.written.dtype)
  change = slices.growth * identity[None, None, None] - slices.erased
  effects = _Effect(slices.starts, change, slices.written)

  def compose(before, effect):
    return _then(before, effect), before

  nothing = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), effects)
  begin = sequence_parallel.select_first(initial, nothing.state)
  before = nothing._replace(state=begin)
  piece, reached = lax.scan(compose, before, effects)
  before, ended = sequence_parallel.device_prefix_scan(piece, _then, nothing)
  return _after(before.state[None], reached), ended.state


@jax.custom_vjp
def _pass_states(slices: SliceEffects, initial: Array) -> tuple[Array, Array]:
  """`states_between` of one device, with states in the dtype of `erased`.

  The state is summed in the dtype of `written`. What products read, here and in the backward pass,
  is stored in that of `erased`: states and their gradients are the largest arrays of the layer.
  """

  def step(state, piece):
    before = state.astype(piece.erased.dtype)
    lost = jnp.matmul(piece.erased, before, preferred_element_type=state.dtype)
    after = state + (piece.growth * state - lost + piece.written)
    return jnp.where(piece.starts, piece.written, after), before

  after, states = lax.scan(step, initial, slices)
  return states, after


def _pass_states_forward(slices, initial):
  results: Any = _pass_states(slices, initial)
  states, _ = results
  return results, (slices.starts, slices.growth, slices.erased, states)


def _pass_states_backward(residuals, gradients):
  starts, growth, erased, states = residuals
  d_states, d_last = gradients
  narrow = erased.dtype

  def step(d_after, effect):
    starts, growth, erased, state, d_state = effect
    d_written = d_after.astype(narrow)
    by_state = d_after * state
    d_growth = jnp.sum(by_state, axis=(-2, -1), keepdims=True)
    transposed = jnp.swapaxes(erased, -1, -2)
    d_lost = jnp.matmul(transposed, d_written, preferred_element_type=d_after.dtype)
    d_before = d_after + (growth * d_after - d_lost)
    return jnp.where(starts, 0, d_before) + d_state, (d_growth, d_written)

  effects = starts, growth, erased, states, d_states
  d_initial, (d_growth, d_written) = lax.scan(step, d_last, effects, reverse=True)
  d_erased = -jnp.matmul(d_written, jnp.swapaxes(states, -1, -2))
  d_starts: Any = None  # a bool has no gradient
  d_slices = SliceEffects(d_starts, d_growth, d_erased, d_written.astype(d_initial.dtype))
  return d_slices, d_initial


_pass_states.defvjp(_pass_states_forward, _pass_states_backward)
