"""Features of a language model, the facts about it, and the protocol of a planner inside it."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from valkyrie.types import Array, Carry, DType

# What the mixers of a layer add to the residual stream, what its MLP adds, and the stream after it.
ACTIVATIONS = ('mixers', 'mlp', 'stream')
SITES = 'sites'  # asks for the inputs of the matrices that are sites of a decomposition


class Drafts(NamedTuple):
  """Predictions from only the plans of each segment; training adds their losses.

  hidden: [M, B, T, D], to be unembedded as `Features.hidden` is.
  values: [M, B, T, 2] float32, logits: the value of halting at this segment, and of continuing.
  weights: [B, T] float32, of a token's losses; 0 without a plan.
  """

  hidden: Array
  values: Array
  weights: Array


class Features(NamedTuple):
  """The output of a language model; logits are hidden @ unembedding.T.

  hidden: [B, T, D] in the compute dtype; unembedding: [V, D] float32, V padded to lanes.
  activations: {kind: [layers, B, T, D]} of the kinds in `ACTIVATIONS` that were asked for.
  sites: {path: [L, B, T, d_in]}, what each site multiplies, if `SITES` were asked for.
  """

  hidden: Array
  unembedding: Array
  drafts: Drafts | None = None
  activations: Mapping[str, Array] | None = None
  sites: Mapping[str, Array] | None = None


class Description(NamedTuple):
  """The facts about a model that training, inference and reports need.

  vocabulary_size: the tokens that exist; width: D, of the residual stream; layers: L.
  forward_flops: operations of one token in a forward pass, the unembedding included.
  window: the largest distance at which any attention window sees a token; 0 without one.
  horizon: the longest time constant at initialization, in tokens; None without a recurrence.
  max_context: the longest document that every mixer can read; None without a bound.
  carried: False if a mixer reads every chunk by itself, as `FullAttention` can.
  has_dropout: whether any mixer draws random numbers in training.
  plan_interval, planner_module: tokens of an interval, and the Haiku name; None without a planner.
  needs_whole_rows: the kinds of parts that accept no pieces of time.
  remat_policy: what a layer saves for the backward pass.
  """

  vocabulary_size: int
  width: int
  layers: int
  compute_dtype: DType
  forward_flops: int
  window: int
  horizon: float | None
  max_context: int | None
  carried: bool
  has_dropout: bool
  plan_interval: int | None
  planner_module: str | None
  needs_whole_rows: tuple[str, ...]
  remat_policy: str | None

  @property
  def train_flops_per_token(self) -> int:
    """Forward and backward: each product of the forward pass has two in the backward pass.

    Recomputation is not counted: it belongs to the layout, not to the model.
    """
    return 3 * self.forward_flops


class Planner(Protocol):
  """A Haiku module between the lower and the upper layers that plans over intervals of tokens."""

  @property
  def plan_interval(self) -> int: ...

  def initial_carry(self, batch_size: int, width: int, dtype: DType) -> Carry:
    """The carry of rows at a document start, at model width D: every leaf [B, ...]."""
    ...

  def forward_flops(self, width: int) -> int:
    """Operations of one token in a forward pass at model width D."""
    ...

  def __call__(
    self, x: Array, carry: Carry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, Carry, Drafts]:
    """x [B, T, D] -> (the addition to the residual stream [B, T, D], the carry, the drafts)."""
    ...
