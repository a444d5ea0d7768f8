"""Documents that were read, with the carries from which a changed document is read on."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.types import Array, Carry, Params


class Document(NamedTuple):
  """A text that was read from its start, and all that a `TextCarry` has; it stands for one.

  Carries are kept after 1, 2, 4, 8, ... chunks, as many before the last whole one, and after it:
  about 2 log2 of their number. So whatever shares its first p of N tokens with this document reads
  at most p / 2, or N - p and a chunk, of them again, in the same chunks as if it were read anew.
  """

  carry: Carry
  position: Array
  hidden: Array
  tokens: np.ndarray  # int32 [N]
  kept: Mapping[int, TextCarry]  # by the number of tokens read, a multiple of the chunk size


def read(
  reader: Reader, params: Params, tokens: np.ndarray, like: Document | None = None
) -> Document:
  """Reads the tokens [N] of a document, from the nearest carry that it shares with another one."""
  size, old = reader.chunk_size, {} if like is None else like.kept
  shared = 0
  if like is not None:
    length = min(len(tokens), len(like.tokens))
    differs = np.flatnonzero(tokens[:length] != like.tokens[:length])
    shared = int(differs[0]) if len(differs) else length
  kept = {place: carry for place, carry in old.items() if place <= shared}
  place = max(kept, default=0)
  carry = _copy(kept[place]) if kept else reader.fresh(1)
  last = len(tokens) // size * size
  steps = {size << power for power in range((last // size).bit_length())}
  marks = steps | {last - step for step in steps} | {last}
  for end in sorted(mark for mark in marks if place < mark <= last):
    carry = reader.read(params, carry, [tokens[place:end]])
    kept[end], place = _copy(carry), end
  carry = reader.read(params, carry, [tokens[place:]])
  # Some marks lie where the other document was read without one: the carry before stands for it.
  near = {max((at for at in kept if at <= mark), default=0) for mark in marks} - {0}
  return Document(*carry, tokens, {at: kept[at] for at in sorted(near)})


def _copy(carry: TextCarry) -> TextCarry:
  """The reader overwrites what it is given."""
  return jax.tree.map(jnp.copy, carry)
