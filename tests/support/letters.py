"""Tiny untrained models of texts of letters."""

import functools

import jax
import numpy as np
import tiny

from valkyrie.data.vocabularies import Vocabulary
from valkyrie.inference.loaded import LoadedModel
from valkyrie.models.attention.document_cache import DocumentCache
from valkyrie.models.attention.full import FullAttention

full = functools.partial(FullAttention, heads=2, head_width=8, max_context=48)
MIXERS = {
  'hybrid': (tiny.attention, tiny.s5),
  'full': (full,),
}


# For long texts: every key has a slot of its own, or the last ones have.
LONG_MIXERS = {
  'long': (tiny.s5, functools.partial(full, max_context=192)),
  'sliding': (tiny.s5, functools.partial(full, max_context=40, slides=True)),
}


class Letters(Vocabulary):
  """Token n is a letter; the last token is EOS."""

  size, eos_id, fingerprint = tiny.VOCABULARY, tiny.VOCABULARY - 1, 'letters'
  file = None

  def encode(self, text):
    return [ord(letter) - ord('A') for letter in text]

  def ids(self, text):
    return np.array(self.encode(text), np.int32)

  def decode(self, ids):
    return ''.join(chr(int(number) + ord('A')) for number in ids)


def text(length, seed=0):
  return Letters().decode(np.random.default_rng(seed).integers(0, tiny.VOCABULARY - 1, length))


@functools.cache
def built(mixers='hybrid', **options):
  model = tiny.model((MIXERS | LONG_MIXERS)[mixers], **options)
  params, _ = tiny.init(model, 1)
  place = {'model_dir': '', 'steps': (1,), 'chunk_size': 16}
  return LoadedModel(model, params, Letters(), **place)


def has_slots(carry):
  """Whether a carry has the keys of full attention."""
  parts = jax.tree.leaves(carry, is_leaf=lambda part: isinstance(part, DocumentCache))
  return any(isinstance(part, DocumentCache) for part in parts)
