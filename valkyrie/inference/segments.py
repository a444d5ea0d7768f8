"""Chunks of a text from the last one to the first, with the carries of about 2 sqrt(n) of n chunks.

Read forwards, n chunks leave the carry before each segment of about sqrt(n) of them. Backwards, a
segment is read again, and then each of its chunks, whose carry passes its gradient to the chunk
before it, as in `tbptt`. Keys of full attention are kept once, see `kept_carries`.
"""

from collections.abc import Callable, Iterator, Sequence
import math
from typing import Any, NamedTuple

from valkyrie.inference import kept_carries
from valkyrie.inference.reader import TextCarry

Advance = Callable[[TextCarry, Any], TextCarry]  # (carry, chunk) -> the carry after the chunk


class Segments(NamedTuple):
  """The chunks of a text, and some carries.

  size: chunks of a segment.
  longest: the most tokens of a text (`Description.max_context`).
  carries: what is kept of the carry before each segment, by the number of its first chunk.
  last: the carry after the text.
  """

  chunks: Sequence[Any]
  size: int
  longest: int | None
  carries: dict[int, TextCarry]
  last: TextCarry


def read(
  advance: Advance,
  carry: TextCarry,
  chunks: Sequence[Any],
  longest: int | None,
  first: int = 0,
) -> Segments:
  """Reads chunks forwards from a carry; segments begin with chunk `first`."""
  size = math.isqrt(len(chunks) - first)
  carries = {}
  for number, chunk in enumerate(chunks):
    if number >= first and (number - first) % size == 0:
      carries[number] = kept_carries.kept(carry, longest)
    carry = advance(carry, chunk)
  return Segments(chunks, size, longest, carries, carry)


def reversed_chunks(advance: Advance, segments: Segments) -> Iterator[tuple[TextCarry, Any]]:
  """(the carry before a chunk, the chunk), from the last chunk to the first of the segments."""
  for begin, first_carry in reversed(segments.carries.items()):
    end = begin + segments.size
    chunks = segments.chunks[begin:end]
    carry = kept_carries.whole(first_carry, segments.last)
    carries = [first_carry]
    for chunk in chunks[:-1]:
      carry = advance(carry, chunk)
      carries.append(kept_carries.kept(carry, segments.longest))
    for kept, chunk in zip(reversed(carries), reversed(chunks), strict=True):
      yield kept_carries.whole(kept, segments.last), chunk
