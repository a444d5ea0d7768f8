"""Planner: a recurrence over intervals of tokens, whose plans the next interval reads.

A document is cut into intervals of I = `plan_interval` tokens, counted from its start. At the end
of an interval its tokens are summarized in R tokens, and the recurrence of `hrm` turns the summary
into a plan of R tokens, which every token of the document's next interval reads by attention. The
state of the recurrence passes from plan to plan, and is zero at the start of a document:

    positions   0 ... I-1 | I ... 2I-1 | 2I ...
    reads       nothing   | plan 0     | plan 1        plan n is made from interval n

So a token sees nothing of its own interval or later, and a plan never leaves its document. The
unfinished interval is carried, so the cuts between chunks change nothing.

Letters of shapes, beside those of `valkyrie.types`: I tokens of an interval, R tokens of a plan, M
segments of a plan.
"""

import dataclasses
import functools
import itertools
from typing import ClassVar, NamedTuple

from drafts import Drafts
import gin
import haiku as hk
import hrm
from hrm import Pace, Plan, Reasoner, State, Weights
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.models import slices
from valkyrie.models.layers import Module, RMSNorm, parameter, project, projections
from valkyrie.models.matrices import products
from valkyrie.models.precision import wide
from valkyrie.types import POSITION_PERIOD, Array, DType


class PlannerCarry(NamedTuple):
  """The planner's carry of a row."""

  tokens: Array  # [B, plan_interval - 1, D], the last ones, oldest first, in the compute dtype
  state: State  # [B, R, D] float32, before the next plan
  plan: Plan  # of the last finished interval


@gin.configurable
@dataclasses.dataclass(eq=False)
class Planner(Module):
  """Summarizes intervals of tokens, plans the next one, and lets its tokens read the plan.

  It differs from the paper, whose task is a puzzle and not a stream. The state starts from zero;
  the learned queries of the summary distinguish the tokens of a plan. Every segment is computed, so
  that shapes are static, and the halting head chooses the segment whose plan is read, both in
  training and in evaluation.

  Attributes:
    plan_interval: I, tokens of an interval.
    plan_tokens: R, tokens of a plan.
    mlp_width: hidden width of both modules' gated MLPs.
    head_width: K of all its attention, dividing the model's width.
    cycles: steps of the slow module in a segment.
    steps: steps of the fast module in a cycle.
    segments: M, the largest number of segments.
  """

  plan_interval: int
  plan_tokens: int
  mlp_width: int
  head_width: int
  cycles: int = 2
  steps: int = 2
  segments: int = 2

  exact_gradient: ClassVar[bool] = False  # only the last two steps of a segment have one

  def __post_init__(self):
    super().__post_init__()
    for name in ('plan_interval', 'plan_tokens', 'mlp_width', 'cycles', 'steps', 'segments'):
      if getattr(self, name) < 1:
        raise ConfigurationError(
          f'Planner.{name} = {getattr(self, name)} is out of range. Use 1 or more.'
        )
    if POSITION_PERIOD % self.plan_interval:
      below, above = (
        next(n for n in candidates if POSITION_PERIOD % n == 0)
        for candidates in (range(self.plan_interval, 0, -1), itertools.count(self.plan_interval))
      )
      raise ConfigurationError(
        f'Planner.plan_interval={self.plan_interval} does not divide {POSITION_PERIOD}, with which '
        f'the positions of very long documents repeat. Use {below} or {above}.'
      )

  def initial_carry(self, batch_size: int, width: int, dtype: DType) -> PlannerCarry:
    """The carry at a document start, at model width D: all zero."""
    zeros = functools.partial(jnp.zeros, dtype=wide(dtype))
    state = zeros((batch_size, self.plan_tokens, width))
    tokens = zeros((batch_size, self.segments, self.plan_tokens, width))
    plan = Plan(tokens, zeros((batch_size, self.segments, 2)))
    return PlannerCarry(
      jnp.zeros((batch_size, self.plan_interval - 1, width), dtype), State(state, state), plan
    )

  def forward_flops(self, width: int) -> int:
    """Operations of one token at model width D: its share of making a plan, and reading one.

    Without the drafts; only the last two steps of a segment have a backward pass.
    """
    r = self.plan_tokens
    m = self.segments
    module = r * (8 * width * width + 4 * r * width + 6 * width * self.mlp_width)
    recurrence = m * self.cycles * (self.steps + 1) * module
    plan = recurrence + 2 * r * width * width + 4 * m * r * width * width
    return plan // self.plan_interval + 4 * width * width + 4 * r * width * (1 + 2 * m)

  def __call__(
    self, x: Array, carry: PlannerCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, PlannerCarry, Drafts]:
    """Reads a chunk of the residual stream, x [B, T, D]; see `features.Insert`."""
    batch, time, width = x.shape
    if width % self.head_width:
      raise ConfigurationError(
        f'Planner.head_width={self.head_width} must divide the width of the model, {width}.'
      )
    pace = Pace(self.segments, self.cycles, self.steps, width // self.head_width)
    x = RMSNorm(name='input_norm')(x)

    # The plans of the intervals that end in this chunk.
    ends, number = _interval_ends(positions, segment_ids, self.plan_interval)
    last = jnp.minimum(ends, time - 1)
    tokens = jnp.concatenate([carry.tokens, x], axis=1)
    at = last[:, :, None] + np.arange(self.plan_interval)[None, None]
    given = self._summarize(jax.vmap(lambda row, at: row[at])(tokens, at)).astype(wide(x.dtype))
    first = jnp.take_along_axis(positions, last, axis=1) == self.plan_interval - 1
    weights = self._weights(width, x.dtype)
    state, plans = hrm.make_plans(
      weights, (carry.state, carry.plan), given, ends < time, first, pace
    )

    # The tokens' attention to them.
    axes = ('embed', 'heads')
    (q,) = project(x, axes, query=width)
    keys, values = project(plans.tokens.astype(x.dtype), axes, key=width, value=width)

    def split_heads(projected):
      return projected.reshape(*projected.shape[:-1], pace.heads, self.head_width)

    read = _read_plans(
      split_heads(q), split_heads(keys), split_heads(values), number, self.plan_interval
    )
    has_plan = positions >= self.plan_interval
    read = jnp.where(has_plan[..., None, None], read.reshape(batch, time, -1, width), 0)
    own = jax.vmap(lambda row, at: row[at])(plans.values, number)  # [B, T, M, 2]
    segment = hrm.halting_segment(own)[..., None, None]
    chosen = jnp.take_along_axis(read, segment, axis=2)[:, :, 0]
    # Zero at initialization: an untrained planner changes nothing.
    (out,) = products(chosen, projections(x, ('heads', 'embed'), jnp.zeros, out=width))

    length = jnp.sum(segment_ids > 0, axis=1)
    kept = jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, self.plan_interval - 1))(
      tokens, length
    )
    carry = PlannerCarry(kept, state, jax.tree.map(lambda leaf: leaf[:, -1], plans))
    hidden = RMSNorm(name='draft_norm')(read.reshape(batch, -1, width))
    drafts = Drafts(
      hidden=jnp.moveaxis(hidden.reshape(read.shape), 2, 0),
      values=jnp.moveaxis(own, 2, 0),
      has_plan=has_plan,
    )
    return out, carry, drafts

  @hk.transparent
  def _summarize(self, tokens: Array) -> Array:
    """Intervals [B, n, I, D] -> [B, n, R, D]: attention of R learned queries to the tokens."""
    width = tokens.shape[-1]
    shape = (self.plan_tokens, width)
    init = hk.initializers.RandomNormal(1.0)
    queries = parameter('queries', shape, init, axes=(None, 'embed'))
    asked = queries.astype(tokens.dtype)
    scores = jnp.einsum('bnid,rd->bnri', tokens, asked, preferred_element_type=wide(asked.dtype))
    shares = jax.nn.softmax(scores * width**-0.5).astype(tokens.dtype)
    summed = jnp.einsum('bnri,bnid->bnrd', shares, tokens)
    (summary,) = project(summed, ('embed', 'heads'), summary=width)
    return summary + queries[None, None].astype(summary.dtype)

  @hk.transparent
  def _weights(self, width: int, dtype: DType) -> Weights:
    def matrix(name, *axes):
      shape = tuple(self.mlp_width if axis == 'mlp' else width for axis in axes)
      init = hk.initializers.TruncatedNormal(shape[0] ** -0.5)
      return parameter(name, shape, init, axes=axes, cast=dtype).astype(dtype)

    def reasoner(pace):
      return Reasoner(
        query=matrix(f'{pace}_query', 'embed', 'heads'),
        key=matrix(f'{pace}_key', 'embed', 'heads'),
        value=matrix(f'{pace}_value', 'embed', 'heads'),
        out=matrix(f'{pace}_out', 'heads', 'embed'),
        gate=matrix(f'{pace}_gate', 'embed', 'mlp'),
        hidden=matrix(f'{pace}_hidden', 'embed', 'mlp'),
        mlp_out=matrix(f'{pace}_mlp_out', 'mlp', 'embed'),
      )

    # As in the authors' code, both values are near zero at first.
    return Weights(
      slow=reasoner('slow'),
      fast=reasoner('fast'),
      halt=parameter('halt', (width, 2), jnp.zeros, axes=('embed', None)),
      halt_bias=parameter('halt_bias', (2,), hk.initializers.Constant(-5.0), axes=('norm',)),
    )


def _interval_ends(positions: Array, segment_ids: Array, length: int) -> tuple[Array, Array]:
  """The ends of intervals of `length` tokens.

  Returns:
    (the indices of their last tokens [B, ceil(T / length)], ascending and filled with T, the number
    of intervals that ended before each token [B, T]).
  """
  # An interval ends at each position that is length - 1 modulo length, so T tokens of a row hold at
  # most ceil(T / length) ends at any starts of documents: every shape is static.
  time = positions.shape[1]
  is_end = (positions % length == length - 1) & (segment_ids > 0)
  ends = jnp.sort(jnp.where(is_end, np.arange(time)[None], time), axis=1)
  return ends[:, : -(-time // length)], jnp.cumsum(is_end, axis=1) - is_end


def _read_plans(q: Array, keys: Array, values: Array, number: Array, length: int) -> Array:
  """Each token's attention to the tokens of its plan, for each segment; linear cost in time.

  q [B, T, H, K]; keys and values [B, n, M, R, H, K] of n plans -> [B, T, M, H, K]. `number`, int32
  [B, T], is the index of the plan that a token reads.
  """
  # In any `length` consecutive tokens the number rises at most once, by one: two plans for a slice.
  time = q.shape[1]
  size = min(length, time)
  q, number = slices.cut(q, size), slices.cut(number, size)  # [N, B, Q, ...]
  first = number[:, :, 0]
  both = jnp.minimum(jnp.stack([first, first + 1], axis=-1), keys.shape[1] - 1)
  pick = jax.vmap(jax.vmap(lambda row, at: row[at]), (None, 0))  # over slices, over rows
  # [N, B, 2, M, R, H, K]
  near_keys = pick(keys, both)
  near_values = pick(values, both)
  dtype = wide(q.dtype)
  scores = jnp.einsum('nbqhk,nbcmrhk->nbhqcmr', q, near_keys, preferred_element_type=dtype)
  shares = jax.nn.softmax(scores * q.shape[-1] ** -0.5)
  mine = (number[..., None] - first[..., None, None]) == np.arange(2)[None, None, None]
  shares = jnp.where(mine[:, :, None, :, :, None, None], shares, 0).astype(values.dtype)
  return slices.join(jnp.einsum('nbhqcmr,nbcmrhk->nbqmhk', shares, near_values), time)
