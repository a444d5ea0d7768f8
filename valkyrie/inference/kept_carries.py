"""Carries on the way through a text, which share the keys that the carry after the text holds.

Full attention carries the keys of all tokens so far, and the carry after the first tokens of a text
has the first of them. So a carry is kept without its keys, and gets them back from the last one. A
mixer that slides has replaced them by then: its keys are kept.
"""

from typing import Protocol, Self, runtime_checkable

import jax

from valkyrie.inference.reader import TextCarry
from valkyrie.types import Array


@runtime_checkable
class TokenSlots(Protocol):
  """A part of a carry with a slot for each token of a row."""

  @property
  def capacity(self) -> int:
    """The tokens for which a row has slots; further ones replace the oldest."""
    ...

  def after_first(self, tokens: Array) -> Self:
    """The part after the first tokens [B] of the rows, from a later one that has replaced none."""
    ...


def kept(carry: TextCarry, longest: int | None) -> TextCarry:
  """What is kept of a carry: () in place of what the carry after the text holds as well.

  Texts have at most `longest` tokens (`Description.max_context`); None means any number.
  """

  def of_part(part):
    if longest is not None and _has_slots(part) and part.capacity >= longest:
      return ()
    return part

  return jax.tree.map(of_part, carry, is_leaf=_has_slots)


def whole(kept: TextCarry, last: TextCarry) -> TextCarry:
  """The carry that this was kept from, bit for bit; `last` is the carry after the text."""

  def of_part(part, kept_part):
    if _has_slots(part) and kept_part == ():
      return part.after_first(kept.position)
    return kept_part

  return jax.tree.map(of_part, last, kept, is_leaf=_has_slots)


def _has_slots(part: object) -> bool:
  return isinstance(part, TokenSlots)
