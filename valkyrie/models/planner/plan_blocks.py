"""Blocks of tokens, the plans made of them, and how the tokens of the next block read a plan.

Arrays in, arrays out. A block of `grain` tokens is whole at each position of its document that is
grain - 1 modulo grain. So in any `grain` consecutive tokens of a row at most one becomes whole, and
in T tokens at most ceil(T / grain): every shape is known, wherever documents start.
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
  """What M segments of thought made of a block, float32.

  tokens: [..., M, P, D]; values: [..., M, 2], see `hrm.deliberate`.
  """

  tokens: Array
  values: Array


def completions(positions: Array, segment_ids: Array, grain: int) -> tuple[Array, Array]:
  """Where blocks become whole.

  Returns:
    (the indices of their last tokens [B, ceil(T / grain)], ascending, then T where there are no
    more, the number of blocks that are whole before each token [B, T]).
  """
  time = positions.shape[1]
  whole = (positions % grain == grain - 1) & (segment_ids > 0)
  ends = jnp.sort(jnp.where(whole, np.arange(time)[None], time), axis=1)
  return ends[:, : -(-time // grain)], jnp.cumsum(whole, axis=1) - whole


def plan_blocks(
  weights: Weights,
  before: tuple[State, Plan],
  given: Array,
  whole: Array,
  first: Array,
  pace: Pace,
) -> tuple[State, Plan]:
  """Thinks over n blocks in turn.

  Args:
    weights: of the recurrence.
    before: the state where it starts, and the plan that stands, of the block before.
    given: the blocks summed up, [B, n, P, D] float32.
    whole: bool [B, n], false where a row has fewer than n: such a block changes nothing.
    first: bool [B, n], whether it is the first of its document, before which the state is zero.
    pace: of the recurrence.

  Returns:
    (the state after them, the plan that stood and theirs with leaves [B, 1 + n, ...]).
  """

  def turn(before, now):
    given, whole, first = now
    state = jax.tree.map(lambda x: jnp.where(first[:, None, None], jnp.zeros_like(x), x), before[0])
    states, values = hrm.deliberate(weights, state, given, pace)
    stands = hrm.halting_segment(values)[:, None, None, None]
    state = jax.tree.map(lambda x: jnp.take_along_axis(x, stands, axis=1)[:, 0], states)

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


def read_plans(q: Array, keys: Array, values: Array, number: Array, grain: int) -> Array:
  """Each token's attention to the tokens of its plan, for each segment: cost linear in time.

  Args:
    q: [B, T, H, K].
    keys: [B, n, M, P, H, K], of n plans; values: the same.
    number: int32 [B, T], which of the n plans a token reads; it does not fall, and in any `grain`
      consecutive tokens it rises at most once, by one.
    grain: the block's length.

  Returns:
    [B, T, M, H, K].
  """
  time = q.shape[1]
  size = min(grain, time)
  q, number = slices.cut(q, size), slices.cut(number, size)  # [N, B, S, ...]
  first = number[:, :, 0]
  both = jnp.minimum(jnp.stack([first, first + 1], axis=-1), keys.shape[1] - 1)
  pick = jax.vmap(jax.vmap(lambda row, at: row[at]), (None, 0))  # over slices, over rows
  near_keys, near_values = pick(keys, both), pick(values, both)  # [N, B, 2, M, P, H, K]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  scores = jnp.einsum('nbshk,nbcmphk->nbhscmp', q, near_keys, preferred_element_type=wide)
  shares = jax.nn.softmax(scores * q.shape[-1] ** -0.5)
  mine = (number[..., None] - first[..., None, None]) == np.arange(2)[None, None, None]
  shares = jnp.where(mine[:, :, None, :, :, None, None], shares, 0).astype(values.dtype)
  return slices.join(jnp.einsum('nbhscmp,nbcmphk->nbsmhk', shares, near_values), time)
