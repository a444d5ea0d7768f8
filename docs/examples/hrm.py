"""The recurrence of the Hierarchical Reasoning Model (Wang et al. 2025, arXiv 2506.21734).

Two modules of different speed process a constant input x̃, the summary of an interval of tokens:

    z_L <- f_L(z_L + z_H + x̃)        at every step
    z_H <- f_H(z_H + z_L)             at every `steps`-th step

A segment has `cycles` times `steps` such steps. Only its last fast and its last slow step have a
gradient, as if they started from a fixed point (section 2, "Approximate gradient"; figure 4). M
segments follow one another, without a gradient between them ("Deep supervision"). The z_H of each
segment is a plan, and a head decides after which segment to halt ("Adaptive computational time").

Weights are in the dtype of the arithmetic; states stay in float32.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.precision import matmul
from valkyrie.types import Array


class Reasoner(NamedTuple):
  """The weights of f_L or f_H: one block of a transformer over the R tokens of a plan."""

  query: Array  # [D, D]
  key: Array  # [D, D]
  value: Array  # [D, D]
  out: Array  # [D, D]
  gate: Array  # [D, F]
  hidden: Array  # [D, F]
  mlp_out: Array  # [F, D]


class Weights(NamedTuple):
  """Both modules and the halting head, [D, 2] and [2]."""

  slow: Reasoner
  fast: Reasoner
  halt: Array
  halt_bias: Array


class State(NamedTuple):
  """z_H and z_L, each [..., R, D] float32."""

  slow: Array
  fast: Array


class Plan(NamedTuple):
  """The M segments of a plan, float32: tokens [..., M, R, D] and values [..., M, 2]."""

  tokens: Array
  values: Array


class Pace(NamedTuple):
  """The lengths of the recurrence, and its number of attention heads."""

  segments: int  # M
  cycles: int
  steps: int
  heads: int  # H


def _product(x: Array, w: Array) -> Array:
  return matmul(x.astype(w.dtype), w, x.dtype)


def _normed(x: Array) -> Array:
  return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _reason(module: Reasoner, z: Array, given: Array, heads: int) -> Array:
  """f(z + given) [B, R, D]: self-attention, then a gated MLP, each followed by a norm."""
  x = z + given
  batch, tokens, width = x.shape

  def heads_of(w):
    return _product(x, w).reshape(batch, tokens, heads, -1)

  q, k, v = map(heads_of, (module.query, module.key, module.value))
  scores = jnp.einsum('brhk,bshk->bhrs', q, k) * q.shape[-1] ** -0.5
  read = jnp.einsum('bhrs,bshk->brhk', jax.nn.softmax(scores), v).reshape(batch, tokens, width)
  x = _normed(x + _product(read, module.out))
  active = jax.nn.silu(_product(x, module.gate)) * _product(x, module.hidden)
  return _normed(x + _product(active, module.mlp_out))


def think(weights: Weights, state: State, given: Array, pace: Pace) -> State:
  """The state after one segment: cycles · steps fast and `cycles` slow steps.

  `given` is x̃ [B, R, D] float32. Only the last step of each module has a gradient, and none reaches
  the state before the segment.
  """

  def fast_step(weights, state, given):
    return state._replace(fast=_reason(weights.fast, state.fast, state.slow + given, pace.heads))

  def slow_step(weights, state):
    return state._replace(slow=_reason(weights.slow, state.slow, state.fast, pace.heads))

  # The last state is taken for a fixed point, whose gradient needs no earlier steps.
  fixed, state, shown = lax.stop_gradient((weights, state, given))

  def fast_steps(count, state):
    return lax.fori_loop(0, count, lambda _, state: fast_step(fixed, state, shown), state)

  def cycle(_, state):
    return slow_step(fixed, fast_steps(pace.steps, state))

  state = lax.fori_loop(0, pace.cycles - 1, cycle, state)
  state = fast_steps(pace.steps - 1, state)
  return slow_step(weights, fast_step(weights, state, given))


def deliberate(weights: Weights, state: State, given: Array, pace: Pace) -> tuple[State, Array]:
  """M segments, each from the last state of the one before; see `think`.

  Returns the states after each segment [B, M, R, D], and the logits of the values of halting there
  and of continuing [B, M, 2].
  """

  def segment(state, _):
    state = think(weights, state, given, pace)
    return state, state

  _, states = lax.scan(segment, state, length=pace.segments)
  states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), states)
  # The head reads the first token of the plan, as in the authors' code.
  return states, _product(states.slow[:, :, 0], weights.halt) + weights.halt_bias[None, None]


def halting_segment(values: Array) -> Array:
  """The segment to halt after, int32 [...] from 0, for the values [..., M, 2].

  It is the first segment whose value of halting exceeds its value of continuing, else the last.
  """
  halts = values[..., 0] > values[..., 1]
  return jnp.argmax(halts.at[..., -1].set(True), axis=-1)


def make_plans(
  weights: Weights, before: tuple[State, Plan], given: Array, whole: Array, first: Array, pace: Pace
) -> tuple[State, Plan]:
  """Makes the plans of n intervals in turn, from the state and the plan `before` them.

  Args:
    given: summaries of the intervals, [B, n, R, D] float32.
    whole: bool [B, n], false at the intervals that a row lacks; they change nothing.
    first: bool [B, n], whether it is the first of its document, before which the state is zero.

  Returns:
    (the state after them, the plan before them and theirs with leaves [B, 1 + n, ...]).
  """

  def turn(before, now):
    given, whole, first = now
    state = jax.tree.map(lambda x: jnp.where(first[:, None, None], jnp.zeros_like(x), x), before[0])
    states, values = deliberate(weights, state, given, pace)
    halted = halting_segment(values)[:, None, None, None]
    state = jax.tree.map(lambda x: jnp.take_along_axis(x, halted, axis=1)[:, 0], states)

    def if_whole(new, old):
      return jnp.where(whole.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    after = jax.tree.map(if_whole, (state, Plan(states.slow, values)), before)
    return after, after[1]

  time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (given, whole, first))
  (state, _), made = lax.scan(turn, before, time_first)
  plans = jax.tree.map(
    lambda old, new: jnp.concatenate([old[:, None], jnp.moveaxis(new, 0, 1)], axis=1),
    before[1],
    made,
  )
  return state, plans
