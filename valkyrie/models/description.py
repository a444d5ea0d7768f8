"""Facts about a model that its surroundings need."""

from typing import NamedTuple

from valkyrie.types import DType


class Description(NamedTuple):
  """What a model says about itself.

  vocabulary_size: the tokens that exist.
  compute_dtype: of activations.
  forward_flops: operations of one token in a forward pass, the unembedding included.
  window: the largest distance at which any attention window sees a token; 0 without one.
  horizon: the longest time constant of any mixer's state at initialization, in tokens; None without
    a recurrence.
  max_context: the longest document that every mixer can read; None without a bound.
  carried: False if a mixer reads every chunk by itself, as `FullAttention` can.
  has_dropout: whether any mixer draws random numbers in training.
  plan_interval: of the planner; None without one.
  planner_module: the Haiku name of the planner; None without one.
  needs_whole_rows: the kinds of parts that accept no pieces of time.
  """

  vocabulary_size: int
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

  @property
  def train_flops_per_token(self) -> int:
    """Forward and backward: each product of the forward pass has two in the backward pass.

    Recomputation is not counted: it belongs to the layout, not to the model.
    """
    return 3 * self.forward_flops
