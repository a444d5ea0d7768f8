"""Shared types and the shape glossary.

Letters of shapes, in names and docstrings throughout:

  B  rows of a batch          T  tokens of a chunk, or of any slice of time
  N  chunks, or slices        C  tokens of a chunk (`chunk_size`)
  D  model width              H  attention heads        J  key-value heads (J divides H)
  K  width of a head          W  attention window       G  global keys (registers + document start)
  P  states of a recurrence   V  padded vocabulary      L  layers
  F  width inside a mixer     Z  width of a head's values, where it is not K
  Q  tokens of a slice        S  queries of a slice
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

Array = jax.Array
DType = Any  # anything that `jnp.dtype` accepts
Carry = Any  # a pytree whose leaves are [B, ...]
Params = Any  # a pytree of arrays, as Haiku's `init` returns it
Axes = tuple[str | None, ...]  # a logical axis for each dimension; None is never split


_POSITIONS = 2**30  # after which they repeat, far below the overflow of int32
POSITION_PERIOD = 2**15 * 3**2 * 5**2 * 7 * 11  # 0.57 billion, with many divisors


class Batch(NamedTuple):
  """A rectangle of the token stream: every leaf is [B, T], rows are independent streams.

  A row's next batch continues where this one ends. Two integers tell documents apart:

  inputs: int32 token ids in [0, V).
  targets: int32, the token that follows each input in its row, across chunk edges too.
  weights: float32, 0 at padding, at each document's last token (its next token belongs to another
    document), and at all but the answer where a task has prompts.
  positions: int32, 0 where a document starts, from there counting up by one to 2^30, and 0 at
    padding. Beyond 2^30 the last POSITION_PERIOD of these repeat: far from the start, and with the
    same remainders.
  segment_ids: int32, 0 at padding; documents of a row count up from 1 to 2^30, and again. One that
    begins with the carry of another has its positions and its segment id, too (pass_carry). Padding
    stands only at the end of a chunk, and leaves every carry untouched.
  """

  inputs: Any  # arrays of the host or of devices, or only their shapes and dtypes
  targets: Any
  weights: Any
  positions: Any
  segment_ids: Any


def position_of(distance: Any) -> Any:
  """The positions of tokens, from their distances to the start of their document; see `Batch`.

  The distances are an array of numpy in int64, or of jax, below 2^31 then.
  """
  periods = (distance - _POSITIONS + POSITION_PERIOD) // POSITION_PERIOD
  return distance - POSITION_PERIOD * periods.clip(0)


class SequenceMixer(Protocol):
  """A Haiku module that mixes along time and carries its memory between chunks.

  causal: whether no output depends on a later token. A bidirectional mixer carries nothing.
  dropout: the share of values that it zeroes in training, see `layers.dropout`.

  Optional attributes, with the value that a mixer without them has:

  sequence_parallel (False): the mixer accepts a device's piece of each chunk and communicates with
    the other devices (see `sharding.sequence_parallel`). Other mixers get whole rows.
  reach (0): the largest distance at which its attention window sees a token.
  horizon (None): the longest time constant of its state at initialization, in tokens.
  max_context (None): the longest document that it can read, if it carries what it reads.
  slides (False): whether it also reads longer documents, and sees their last tokens.
  carried (True): whether chunks pass on what they read; False if each is read by itself.
  configure: a method that takes the `layers.MixerOptions` of the model before it is called.
  """

  @property
  def causal(self) -> bool: ...

  @property
  def dropout(self) -> float: ...

  def initial_carry(self, batch_size: int, dtype: DType) -> Carry:
    """The carry at a document start: pure, no parameters, every leaf [B, ...].

    What has a slot for each token of a document is `sharding.sequence_parallel.OverTime`, which
    devices share.
    `dtype` is the compute dtype; the state of a recurrence is float32 or wider.
    """
    ...

  def forward_flops(self, width: int) -> int:
    """Operations of one token in a forward pass at model width D; a multiply-add is two."""
    ...

  def __call__(
    self,
    x: Array,
    carry: Carry,
    *,
    positions: Array,
    segment_ids: Array,
  ) -> tuple[Array, Carry]:
    """x [B, T, D] -> (y [B, T, D], the carry after the chunk's last token that is not padding)."""
    ...


class TaskFeed(Protocol):
  """Tokens as a pure function of the position in the rows.

  batch_size: B, its rows; vocabulary: the codec; vocabulary_size: ids are in [0, vocabulary_size).
  tokens_per_byte: tokens per byte of the text, if defined; fingerprint: a hash of the content.
  row_tokens: the tokens of the longest row in one epoch.
  row_end: tokens after which all rows are padding; None if the feed is endless.
  longest: the largest position in a document, or in a sequence that is read as one, plus 1.

  A feed of several sources also has `sources`, a mapping of names to feeds, and `weights`, the
  share of each. They are evaluated one by one.

  The vocabulary is known at once; the other attributes may have to read the data first.
  """

  batch_size: int
  vocabulary: Any
  vocabulary_size: int

  @property
  def tokens_per_byte(self) -> float | None: ...

  @property
  def fingerprint(self) -> str: ...

  @property
  def row_tokens(self) -> int: ...

  @property
  def row_end(self) -> int | None: ...

  @property
  def longest(self) -> int: ...

  def open(self) -> None:
    """Opens the data, which otherwise waits for the first use; raises if it cannot fill B rows."""
    ...

  def read(self, position: int, length: int, rows: Sequence[int] | None = None) -> Batch:
    """The batch [rows, length] whose first token is each row's token number `position`.

    `rows` are the numbers of the wanted rows; None is all B.
    """
    ...

  def progress(self, position: int) -> Mapping[str, float]:
    """What was read before a position: 'epochs'; of several sources, 'tokens/NAME' and others."""
    ...

  def dealt(self, number: int, rows: int, begin: int) -> 'TaskFeed':
    """The documents dealt over other rows, in another order for each `number`; 0 is the first deal.

    Its position 0 is token `begin` of each row of the run.
    """
    ...

  def unfinished(self, position: int) -> int:
    """Tokens before a position that belong to unfinished epochs, over all rows."""
    ...

  def describe(self, position: int, length: int) -> str:
    """Names the documents of the tokens [position, position + length) of all rows."""
    ...


def leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
  """{`leaf_path`: leaf} of a pytree."""
  leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
  return {leaf_path(path): leaf for path, leaf in leaves}


def leaf_path(key_path: Sequence[Any]) -> str:
  """'params/model/embedding' for the key path of a leaf, as `jax.tree_util` gives it."""
  return jax.tree_util.keystr(tuple(key_path), simple=True, separator='/')
