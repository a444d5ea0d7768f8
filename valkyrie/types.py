"""The words every room shares.

Shape glossary, used in names and docstrings throughout:

  B  rows of a batch          T  tokens of a chunk, or of any slice of time
  N  chunks of a train step   C  tokens of a chunk (`chunk_size`)
  D  model width              H  attention heads        J  key-value heads (J divides H)
  K  width of a head          W  attention window       G  global keys (registers + document start)
  P  stored S5 states         V  padded vocabulary      L  layers
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

Array = jax.Array
DType = Any  # what `jnp.dtype` accepts
Carry = Any  # a pytree whose leaves are [B, ...]
Params = Any  # a pytree of float32 arrays, as Haiku's `init` returns it


class Batch(NamedTuple):
  """A rectangle of the token stream: every leaf is [B, T], rows are independent streams.

  A row's next batch goes on where this one ends. Documents are told apart by two integers:

  inputs: int32 token ids in [0, V).
  targets: int32, the token that follows each input in its row, across chunk edges too.
  weights: float32, 0 where there is nothing to learn: padding, each document's last token (its
    "next token" belongs to another document), and all but the answer where a task has prompts.
  positions: int32, 0 exactly where a document starts, then counting up by one.
  segment_ids: int32, 0 on padding; documents of a row count up from 1 for the whole run. Padding
    stands at the end of a chunk only, and leaves every carry untouched.
  """

  inputs: Any  # arrays of the host or of devices, or their shapes and dtypes alone
  targets: Any
  weights: Any
  positions: Any
  segment_ids: Any


class SequenceMixer(Protocol):
  """A Haiku module that mixes along time and carries what it must remember between chunks.

  causal: whether no output depends on a later token. A mixer that is not carries nothing.
  dropout: the share of some of its values that it zeroes in training, see `layers.dropout`.

  One that says `shards_of_time = True` can be given a piece of each chunk on a device, and asks the
  others for what stands before it (see `sequence_parallel`); any other is given whole rows.
  """

  @property
  def causal(self) -> bool: ...

  @property
  def dropout(self) -> float: ...

  def initial_carry(self, batch_size: int, dtype: DType) -> Carry:
    """The carry at a document start: pure, no parameters, every leaf [B, ...].

    `dtype` is the compute dtype; the state of a recurrence stays float32 whatever it is.
    """
    ...

  def forward_flops(self, width: int) -> int:
    """Operations a token costs in one forward pass at model width D, a multiply-add being two."""
    ...

  def __call__(
    self, x: Array, carry: Carry, *, positions: Array, segment_ids: Array
  ) -> tuple[Array, Carry]:
    """x [B, T, D] -> (y [B, T, D], the carry after the chunk's last token that is not padding)."""
    ...


class TaskFeed(Protocol):
  """Tokens as a pure function of where in the rows one reads."""

  vocabulary_size: int

  def read(self, position: int, length: int) -> Batch:
    """The batch [B, length] whose first token is each row's token number `position`."""
    ...


def leaf_path(key_path: Sequence[Any]) -> str:
  """'params/model/embedding' for the key path of a leaf, as `jax.tree_util` gives it."""
  return jax.tree_util.keystr(tuple(key_path), simple=True, separator='/')
