"""Features of a language model, the facts about it, and the protocol of an insert in it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from valkyrie.models.attention.patterns import AttentionPattern, Patterns
from valkyrie.models.sites import Entry
from valkyrie.types import Array, Carry, DType

# What the mixers of a layer add to the residual stream, what its MLP adds, and the stream after it.
ACTIVATIONS = ('mixers', 'mlp', 'stream')
SITES = 'sites'  # asks for the inputs of the matrices that are sites of a decomposition

Kind = str | Patterns  # of what a model may return besides its features


class Features(NamedTuple):
  """The output of a language model; logits are hidden @ unembedding.T.

  auxiliary: what the insert returns for terms of the objective; None if it takes no part.
  activations: {kind: [layers, B, T, D]} of the kinds in `ACTIVATIONS` that were asked for.
  sites: {path: [L, B, T, d_in]}, what each site multiplies, if `SITES` were asked for.
  patterns: {path of a mixer: its pattern, [L, B, S, H, N] each}, if `Patterns` were asked for.
  embedded: what the first layer reads, [B, T, D], if it was shifted.
  """

  hidden: Array  # [B, T, D] in the compute dtype
  unembedding: Array  # [V, D] float32, V padded to lanes
  auxiliary: Any = None
  activations: Mapping[str, Array] | None = None
  sites: Mapping[str, Array] | None = None
  patterns: Mapping[str, AttentionPattern] | None = None
  embedded: Array | None = None


class Description(NamedTuple):
  """The facts about a model that training, inference and reports need."""

  vocabulary_size: int  # the tokens that exist
  width: int  # D, of the residual stream
  layers: int  # L
  compute_dtype: DType
  forward_flops: int  # operations of one token in a forward pass, the unembedding included
  window: int  # the largest distance at which any attention window sees a token; 0 without one
  horizon: float | None  # the longest time constant at initialization, in tokens
  max_context: int | None  # the longest document that every mixer can read; None without a bound
  carried: bool  # False if a mixer reads every chunk by itself, as `FullAttention` can
  has_dropout: bool  # whether any block or mixer draws random numbers in training
  insert: str | None  # the Haiku name of the module between the halves; None without one
  exact_gradient: bool  # False if the insert passes on only a part of the gradient
  needs_whole_rows: tuple[str, ...]  # the kinds of parts that accept no pieces of time
  remat_policy: str | None  # what a layer saves for the backward pass
  site_entries: tuple[Entry, ...]  # which matrices are sites

  @property
  def train_flops_per_token(self) -> int:
    """Forward and backward: each product of the forward pass has two in the backward pass.

    Recomputation is not counted: it belongs to the layout, not to the model.
    """
    return 3 * self.forward_flops


class Insert(Protocol):
  """A Haiku module between the lower and the upper layers that adds to the residual stream.

  exact_gradient: whether its backward pass is the derivative of its forward pass.
  The other members, and `sequence_parallel`, are as in `types.SequenceMixer`; `width` is D.
  """

  @property
  def exact_gradient(self) -> bool: ...

  def initial_carry(self, batch_size: int, width: int, dtype: DType) -> Carry: ...

  def forward_flops(self, width: int) -> int: ...

  def __call__(
    self,
    x: Array,
    carry: Carry,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Carry, Any]:
    """x [B, T, D] -> (the addition to it [B, T, D], the carry, the auxiliary output).

    A term of the objective finds the auxiliary output in `Features.auxiliary`.
    """
    ...
