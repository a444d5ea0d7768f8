"""Resets parts of a carry between chunks, to measure what memory is worth."""

import jax

from valkyrie.models.attention.document_cache import DocumentCache
from valkyrie.models.attention.kv_cache import AttentionCarry
from valkyrie.models.recurrence.convolution import Tail
from valkyrie.types import Carry

CUTS = ('state', 'all')


def cut_carry(carry: Carry, initial: Carry, cut: str | None) -> Carry:
  """The carry with its recurrent 'state', 'all' of it or none of it (None) reset to `initial`.

  'state' keeps the caches of attention and the tails of convolutions, which hold a bounded number
  of tokens.
  """

  def holds_tokens(part: Carry) -> bool:
    return isinstance(part, AttentionCarry | DocumentCache | Tail)

  def without_state(part: Carry, start: Carry) -> Carry:
    return part if holds_tokens(part) else start

  if cut == 'state':
    return jax.tree.map(without_state, carry, initial, is_leaf=holds_tokens)
  if cut == 'all':
    return initial
  return carry
