"""A planner: what a block of tokens left is thought over, and stands as registers through the next.

A document is cut into blocks of `plan_block` tokens, counted from its start. When a block is whole,
it is summed up in P tokens, and the recurrence of `hrm` turns these into a plan: P tokens again,
which every token of the document's next block reads by attention. The recurrence goes on from plan
to plan, and starts afresh, from zero, in the first block of a document:

    positions   0 ... g-1 | g ... 2g-1 | 2g ...
    read        nothing   | plan 0     | plan 1        plan n is made of the tokens of block n

So no token sees anything of its own block, a fortiori nothing later; a plan never leaves its
document; and since the block that is not yet whole is carried, where chunks are cut changes
nothing.
"""

from typing import NamedTuple

import chex
import gin
import haiku as hk
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.models.layers import RMSNorm, matmul, project
from valkyrie.models.planner import hrm, plan_blocks
from valkyrie.models.planner.hrm import Pace, Reasoner, State, Weights
from valkyrie.models.planner.plan_blocks import Plan
from valkyrie.models.sizes import check_sizes
from valkyrie.types import Array, DType


class PlannerCarry(NamedTuple):
  """What the planner remembers of a row.

  block: [B, plan_block - 1, D], what its last tokens left, oldest first, in the compute dtype.
  state: [B, P, D] float32, where the next plan's thinking starts.
  plan: of the last block that became whole.
  """

  block: Array
  state: State
  plan: Plan


class Drafts(NamedTuple):
  """What each segment's plan alone says of the next tokens; training adds their losses.

  hidden: [M, B, T, D], to be unembedded as `Features.hidden` is.
  values: [M, B, T, 2] float32, logits: what halting at this segment is worth, and going on.
  weights: [B, T] float32, how much a token's losses count; 0 where no plan stands.
  """

  hidden: Array
  values: Array
  weights: Array


@gin.configurable
class Planner(hk.Module):
  """Reads blocks of tokens, plans the next one, and lets its tokens read the plan.

  It differs from the paper where a stream differs from a puzzle. The state starts from zero, the
  carry of a row that has read nothing; what tells the tokens of a plan apart is what they ask of
  the block. All segments are thought, so that shapes are static, and the halting head chooses whose
  plan stands; it chooses alike in training and afterwards, with no exploration.
  """

  def __init__(
    self,
    plan_block: int,
    plan_tokens: int,
    mlp_width: int,
    head_width: int,
    cycles: int = 2,
    steps: int = 2,
    segments: int = 2,
    draft_weight: float = 0.1,
    name: str | None = None,
  ):
    """Configures the planner.

    Args:
      plan_block: g, tokens of a block; the chunks of training are multiples of it.
      plan_tokens: P, tokens of a plan.
      mlp_width: hidden width of both modules' gated MLPs.
      head_width: K, dividing the model's width, of all its attention.
      cycles: N, steps of the slow module in a segment.
      steps: T, steps of the fast module in a cycle.
      segments: M, at most how many segments are thought.
      draft_weight: by which the losses of the segments' drafts are multiplied.
      name: Haiku's.

    Raises:
      ConfigurationError: where one of the counts is not positive.
    """
    super().__init__(name)
    check_sizes('Planner', plan_block=plan_block, plan_tokens=plan_tokens, mlp_width=mlp_width)
    check_sizes('Planner', head_width=head_width, cycles=cycles, steps=steps, segments=segments)
    self.plan_block = plan_block
    self.plan_tokens = plan_tokens
    self.mlp_width = mlp_width
    self.head_width = head_width
    self.cycles = cycles
    self.steps = steps
    self.segments = segments
    self.draft_weight = draft_weight

  def initial_carry(self, batch_size: int, width: int, dtype: DType) -> PlannerCarry:
    """The carry at a document start, at model width D: all zero."""
    wide = jnp.promote_types(dtype, jnp.float32)
    state = jnp.zeros((batch_size, self.plan_tokens, width), wide)
    plan = Plan(
      jnp.zeros((batch_size, self.segments, self.plan_tokens, width), wide),
      jnp.zeros((batch_size, self.segments, 2), wide),
    )
    return PlannerCarry(
      jnp.zeros((batch_size, self.plan_block - 1, width), dtype), State(state, state), plan
    )

  def forward_flops(self, width: int) -> int:
    """What a token costs at model width D: its share of a plan's making, and its reading.

    The drafts are not in it, since only training unembeds them. Three times this is more than a
    training step computes: of all steps of thought, only the last two of a segment go backward.
    """
    p, m = self.plan_tokens, self.segments
    module = p * (8 * width * width + 4 * p * width + 6 * width * self.mlp_width)
    thought = m * self.cycles * (self.steps + 1) * module
    plan = thought + 2 * p * width * width + 4 * m * p * width * width
    return plan // self.plan_block + 4 * width * width + 4 * p * width * (1 + 2 * m)

  def __call__(
    self, x: Array, carry: PlannerCarry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, PlannerCarry, Drafts]:
    """Reads a chunk.

    Args:
      x: [B, T, D], the residual stream.
      carry: what the chunk before left.
      positions, segment_ids: int32 [B, T], see `types.Batch`.

    Returns:
      (what the tokens read in their plans [B, T, D], the carry after the chunk's last token that is
      not padding, the drafts).
    """
    batch, time, width = x.shape
    chex.assert_shape(carry.block, (batch, self.plan_block - 1, width))
    pace = Pace(self.segments, self.cycles, self.steps, self._heads(width))
    x = RMSNorm(name='input_norm')(x)
    wide = carry.state.slow.dtype

    # Plans, of the blocks that become whole in this chunk.
    ends, number = plan_blocks.completions(positions, segment_ids, self.plan_block)
    last = jnp.minimum(ends, time - 1)
    tokens = jnp.concatenate([carry.block, x], axis=1)
    at = last[:, :, None] + np.arange(self.plan_block)[None, None]
    given = self._sum_up(jax.vmap(lambda row, at: row[at])(tokens, at)).astype(wide)
    first = jnp.take_along_axis(positions, last, axis=1) == self.plan_block - 1
    weights = self._weights(width, x.dtype)
    state, plans = plan_blocks.plan_blocks(
      weights, (carry.state, carry.plan), given, ends < time, first, pace
    )

    # Their reading.
    (q,) = project(x, query=width)
    keys, values = project(plans.tokens.astype(x.dtype), key=width, value=width)

    def heads_of(projected):
      return projected.reshape(*projected.shape[:-1], pace.heads, self.head_width)

    read = plan_blocks.read_plans(
      heads_of(q), heads_of(keys), heads_of(values), number, self.plan_block
    )
    stands = positions >= self.plan_block
    read = jnp.where(stands[..., None, None], read.reshape(batch, time, -1, width), 0)
    own = jax.vmap(lambda row, at: row[at])(plans.values, number)  # [B, T, M, 2]
    segment = hrm.halting_segment(own)[..., None, None]
    chosen = jnp.take_along_axis(read, segment, axis=2)[:, :, 0]
    # Zero at first: a planner that has not learnt yet changes nothing.
    out = matmul(chosen, hk.get_parameter('out', (width, width), jnp.float32, jnp.zeros))

    length = jnp.sum(segment_ids > 0, axis=1)
    block = jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, self.plan_block - 1))(
      tokens, length
    )
    carry = PlannerCarry(block, state, jax.tree.map(lambda leaf: leaf[:, -1], plans))
    return out, carry, self._drafts(read, own, stands)

  def _heads(self, width: int) -> int:
    heads, left = divmod(width, self.head_width)
    if left:
      raise ConfigurationError(
        f'Planner: head_width={self.head_width} must divide the width of the model, {width}.'
      )
    return heads

  @hk.transparent
  def _sum_up(self, blocks: Array) -> Array:
    """Blocks [B, n, g, D] -> [B, n, P, D]: P learned queries' attention to the block's tokens."""
    width = blocks.shape[-1]
    shape = (self.plan_tokens, width)
    queries = hk.get_parameter('queries', shape, jnp.float32, hk.initializers.RandomNormal(1.0))
    scores = jnp.einsum(
      'bngd,pd->bnpg',
      blocks,
      queries.astype(blocks.dtype),
      preferred_element_type=jnp.promote_types(blocks.dtype, jnp.float32),
    )
    shares = jax.nn.softmax(scores * width**-0.5).astype(blocks.dtype)
    (summary,) = project(jnp.einsum('bnpg,bngd->bnpd', shares, blocks), summary=width)
    return summary + queries[None, None].astype(summary.dtype)

  @hk.transparent
  def _weights(self, width: int, dtype: DType) -> Weights:
    hidden = self.mlp_width
    square = (width, width)
    shapes = {
      **{name: square for name in ('query', 'key', 'value', 'out')},
      **{name: (width, hidden) for name in ('gate', 'hidden')},
      'mlp_out': (hidden, width),
    }

    def parameter(name, shape, init):
      return hk.get_parameter(name, shape, jnp.float32, init)

    def reasoner(pace):
      inits = {name: hk.initializers.TruncatedNormal(s[0] ** -0.5) for name, s in shapes.items()}
      return Reasoner(
        **{
          name: parameter(f'{pace}_{name}', shape, inits[name]).astype(dtype)
          for name, shape in shapes.items()
        }
      )

    # As the authors begin: neither seems worth anything.
    return Weights(
      slow=reasoner('slow'),
      fast=reasoner('fast'),
      halt=parameter('halt', (width, 2), jnp.zeros),
      halt_bias=parameter('halt_bias', (2,), hk.initializers.Constant(-5.0)),
    )

  @hk.transparent
  def _drafts(self, read: Array, values: Array, stands: Array) -> Drafts:
    batch, time, segments, width = read.shape
    hidden = RMSNorm(name='draft_norm')(read.reshape(batch, -1, width))
    return Drafts(
      hidden=jnp.moveaxis(hidden.reshape(batch, time, segments, width), 2, 0),
      values=jnp.moveaxis(values, 2, 0),
      weights=jnp.where(stands, self.draft_weight, 0.0).astype(values.dtype),
    )
