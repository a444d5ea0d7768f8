"""Chunks of a text from the last one to the first, with the carries before them."""

import jax
from letters import LONG_MIXERS, built, has_slots, text
import numpy as np
import pytest

from valkyrie.inference import segments


@pytest.mark.parametrize('first', [0, 3])
@pytest.mark.parametrize('mixers', ['hybrid', *LONG_MIXERS])
def test_carries_are_those_of_the_way_forwards_and_keys_are_kept_once(mixers, first):
  loaded = built(mixers)
  reader = loaded._reader
  tokens = np.asarray(loaded.tokenizer.encode(text(150)))
  chunks = list(reader.chunks(reader.fresh(1), [tokens]))
  forwards = []

  def advance(carry, chunk):
    forwards.append(carry)
    _, after = apply(loaded.params, carry, *chunk)
    return after

  apply = jax.jit(reader.apply)
  longest = loaded.model.about.max_context
  read = segments.read(advance, reader.fresh(1), chunks, longest, first)
  for carry in read.carries.values():
    assert has_slots(carry) == (mixers == 'sliding')
  expected = forwards[first : len(chunks)]
  found = list(segments.reversed_chunks(advance, read))
  for before, (carry, _) in zip(reversed(expected), found, strict=True):
    jax.tree.map(np.testing.assert_array_equal, carry, before)
  for chunk, (_, again) in zip(reversed(chunks[first:]), found, strict=True):
    assert again is chunk
