"""The recurrence of the Hierarchical Reasoning Model (Wang et al. 2025, arXiv 2506.21734).

Two modules of different pace think about an input x̃ that stands still:

    z_L <- f_L(z_L + z_H + x̃)        at every step
    z_H <- f_H(z_H + z_L)             at every T-th step

N times T steps are a segment. Of these only the last fast and the last slow step have a gradient,
as if what they start from were a fixed point (section 2, "Approximate gradient"; figure 4). M
segments follow one another, and no gradient passes between them ("Deep supervision"). Each offers
its z_H as a plan, and a head says of each whether to halt there ("Adaptive computational time").

Arrays in, arrays out. Weights are in the dtype of the arithmetic; states stay in float32.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.layers import matmul
from valkyrie.types import Array


class Reasoner(NamedTuple):
  """The weights of f_L or f_H: one block of a transformer over the P tokens of a plan."""

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
  """z_H and z_L, each [..., P, D] float32."""

  slow: Array
  fast: Array


class Pace(NamedTuple):
  """How long is thought, and with how many attention heads."""

  segments: int  # M
  cycles: int  # N
  steps: int  # T
  heads: int  # H


def _product(x: Array, w: Array) -> Array:
  return matmul(x.astype(w.dtype), w, x.dtype)


def _normed(x: Array) -> Array:
  return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _reason(module: Reasoner, z: Array, given: Array, heads: int) -> Array:
  """f(z + given) [B, P, D]: self-attention, then a gated MLP, each with its norm behind it."""
  x = z + given
  batch, tokens, width = x.shape

  def heads_of(w):
    return _product(x, w).reshape(batch, tokens, heads, -1)

  q, k, v = map(heads_of, (module.query, module.key, module.value))
  scores = jnp.einsum('bphk,bqhk->bhpq', q, k) * q.shape[-1] ** -0.5
  read = jnp.einsum('bhpq,bqhk->bphk', jax.nn.softmax(scores), v).reshape(batch, tokens, width)
  x = _normed(x + _product(read, module.out))
  active = jax.nn.silu(_product(x, module.gate)) * _product(x, module.hidden)
  return _normed(x + _product(active, module.mlp_out))


def think(weights: Weights, state: State, given: Array, pace: Pace) -> State:
  """One segment: N·T fast and N slow steps, of which the last of each has a gradient.

  Args:
    weights: of both modules.
    state: [B, P, D], where the segment starts; no gradient reaches it.
    given: x̃ [B, P, D] float32.
    pace: N, T and H.

  Returns:
    The state after it.
  """

  def fast_step(weights, state, given):
    return state._replace(fast=_reason(weights.fast, state.fast, state.slow + given, pace.heads))

  def slow_step(weights, state):
    return state._replace(slow=_reason(weights.slow, state.slow, state.fast, pace.heads))

  still, state, shown = lax.stop_gradient((weights, state, given))

  def fast_steps(count, state):
    return lax.fori_loop(0, count, lambda _, state: fast_step(still, state, shown), state)

  def cycle(_, state):
    return slow_step(still, fast_steps(pace.steps, state))

  state = lax.fori_loop(0, pace.cycles - 1, cycle, state)
  state = fast_steps(pace.steps - 1, state)
  return slow_step(weights, fast_step(weights, state, given))


def deliberate(weights: Weights, state: State, given: Array, pace: Pace) -> tuple[State, Array]:
  """M segments, each from where the one before it ended.

  Args:
    weights: of both modules and of the halting head.
    state: [B, P, D], where the first one starts.
    given: x̃ [B, P, D] float32.
    pace: M, N, T and H.

  Returns:
    (the states after each segment [B, M, P, D], the logits of the values of halting there and of
    going on [B, M, 2]).
  """

  def segment(state, _):
    state = think(weights, state, given, pace)
    return state, state

  _, states = lax.scan(segment, state, length=pace.segments)
  states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), states)
  # The head reads the first token of the plan, as that of the authors' code does.
  return states, _product(states.slow[:, :, 0], weights.halt) + weights.halt_bias[None, None]


def halting_segment(values: Array) -> Array:
  """The segment that stands, int32 [...], counted from 0, for the values [..., M, 2].

  It is the first one in which halting is worth more than going on; the last, if there is none.
  """
  halts = values[..., 0] > values[..., 1]
  return jnp.argmax(halts.at[..., -1].set(True), axis=-1)
