"""Intervals of tokens, the plans made from them, and the attention of tokens to a plan.

Arrays in, arrays out. An interval of `length` tokens ends at each position of its document that is
length - 1 modulo length. So any `length` consecutive tokens of a row hold at most one end, and T
tokens at most ceil(T / length): every shape is static, at any starts of documents.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.models import slices
from valkyrie.models.planner import hrm
from valkyrie.models.planner.hrm import Pace, State, Weights
from valkyrie.types import Array


class Plan(NamedTuple):
  """The M segments of a plan, float32.

  tokens: [..., M, R, D]; values: [..., M, 2], see `hrm.deliberate`.
  """

  tokens: Array
  values: Array


def interval_ends(positions: Array, segment_ids: Array, length: int) -> tuple[Array, Array]:
  """The ends of intervals.

  Returns:
    (the indices of their last tokens [B, ceil(T / length)], ascending and filled with T, the number
    of intervals that ended before each token [B, T]).
  """
  time = positions.shape[1]
  is_end = (positions % length == length - 1) & (segment_ids > 0)
  ends = jnp.sort(jnp.where(is_end, np.arange(time)[None], time), axis=1)
  return ends[:, : -(-time // length)], jnp.cumsum(is_end, axis=1) - is_end


def make_plans(
  weights: Weights,
  before: tuple[State, Plan],
  given: Array,
  whole: Array,
  first: Array,
  pace: Pace,
) -> tuple[State, Plan]:
  """Runs the recurrence over n intervals in turn.

  Args:
    weights: of the recurrence.
    before: the state and the plan after the interval before.
    given: summaries of the intervals, [B, n, R, D] float32.
    whole: bool [B, n], false at the missing intervals of a row that has fewer than n; they change
      nothing.
    first: bool [B, n], whether it is the first of its document, before which the state is zero.
    pace: of the recurrence.

  Returns:
    (the state after them, the plan before them and theirs with leaves [B, 1 + n, ...]).
  """

  def turn(before, now):
    given, whole, first = now
    state = jax.tree.map(lambda x: jnp.where(first[:, None, None], jnp.zeros_like(x), x), before[0])
    states, values = hrm.deliberate(weights, state, given, pace)
    halted = hrm.halting_segment(values)[:, None, None, None]
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


def read_plans(q: Array, keys: Array, values: Array, number: Array, length: int) -> Array:
  """Each token's attention to the tokens of its plan, for each segment; linear cost in time.

  Args:
    q: [B, T, H, K].
    keys: [B, n, M, R, H, K], of n plans; values: the same.
    number: int32 [B, T], the index of the plan that a token reads; it never falls, and in any
      `length` consecutive tokens it rises at most once, by one.
    length: of an interval.

  Returns:
    [B, T, M, H, K].
  """
  time = q.shape[1]
  size = min(length, time)
  q, number = slices.cut(q, size), slices.cut(number, size)  # [N, B, Q, ...]
  first = number[:, :, 0]
  both = jnp.minimum(jnp.stack([first, first + 1], axis=-1), keys.shape[1] - 1)
  pick = jax.vmap(jax.vmap(lambda row, at: row[at]), (None, 0))  # over slices, over rows
  near_keys, near_values = pick(keys, both), pick(values, both)  # [N, B, 2, M, R, H, K]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  scores = jnp.einsum('nbshk,nbcmphk->nbhscmp', q, near_keys, preferred_element_type=wide)
  shares = jax.nn.softmax(scores * q.shape[-1] ** -0.5)
  mine = (number[..., None] - first[..., None, None]) == np.arange(2)[None, None, None]
  shares = jnp.where(mine[:, :, None, :, :, None, None], shares, 0).astype(values.dtype)
  return slices.join(jnp.einsum('nbhscmp,nbcmphk->nbsmhk', shares, near_values), time)
