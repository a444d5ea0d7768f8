"""Carries before each chunk: the forward pass keeps them, for the backward pass to have them again.

Most of a carry changes with every chunk, and is kept. The keys of a document do not: a chunk
replaces as many as it has tokens. Only what it replaces is kept, and is put back into the carry
after the chunk. So N chunks keep the keys of a document about twice, and not N times.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import jax

from valkyrie.types import Carry


@runtime_checkable
class Rewindable(Protocol):
  """A part of a carry; a chunk replaces only some of it."""

  def replaced_by(self, tokens: int) -> Any:
    """What the next tokens replace at most, as a pytree; `tokens` counts those of this device."""
    ...

  def put_back(self, replaced: Any) -> Self:
    """The part before the tokens that `replaced` was taken for, from the part after them."""
    ...


class Replaced(NamedTuple):
  """What is kept of a part that is rewindable, in its place."""

  content: Any


def kept(carry: Carry, tokens: int) -> Carry:
  """The carry before so many tokens, with `Replaced` in place of each part that is rewindable."""

  def of_part(part):
    if isinstance(part, Rewindable):
      return Replaced(part.replaced_by(tokens))
    return part

  return jax.tree.map(of_part, carry, is_leaf=_is_rewindable)


def rewindable(carry: Carry) -> list[Rewindable]:
  """The parts of a carry that are rewindable, in order."""
  parts = jax.tree.leaves(carry, is_leaf=_is_rewindable)
  return [part for part in parts if isinstance(part, Rewindable)]


def rewound(after: Sequence[Rewindable], kept: Carry) -> Carry:
  """The carry before a chunk, from what was kept of it and the rewindable parts after the chunk."""
  parts = iter(after)

  def of_part(part):
    if isinstance(part, Replaced):
      return next(parts).put_back(part.content)
    return part

  return jax.tree.map(of_part, kept, is_leaf=lambda part: isinstance(part, Replaced))


def _is_rewindable(part: Any) -> bool:
  return isinstance(part, Rewindable)
