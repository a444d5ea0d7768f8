"""Random tokens, computed from their places: for runs that measure speed, without a store.

`TaskFeed.options` has three numbers: `documents`, `tokens` of each, its EOS included, and the
documents of `validation`: few, since the last step of a run evaluates all of them.
"""

import zlib

import numpy as np

from valkyrie.data.selection import Selection
from valkyrie.data.token_store import content_hash
from valkyrie.errors import ConfigurationError

_DEFAULTS = {'documents': '4096', 'tokens': '1024', 'validation': '64'}
_MOST = 2**24


class RandomTokens:
  """Has the members of a `TokenStore` that feeds use; nothing is read, and nothing can be damaged.

  Every token is uniform in the vocabulary, but for the EOS at the end of its document.
  """

  tokens_per_byte = None

  def __init__(self, selection: Selection):
    """Raises a ConfigurationError if an option is unknown, or no number in its range."""
    options = {**_DEFAULTS, **selection.options}
    self.path = 'random tokens'
    if selection.source is not None or options.keys() != _DEFAULTS.keys():
      raise ConfigurationError(
        f'The task synthetic got TaskFeed.source={selection.source!r} and the options '
        f'{", ".join(options)}. Its only options are {", ".join(_DEFAULTS)}; it has no source.'
      )
    for name, value in options.items():
      least = 2 if name == 'tokens' else 1
      if not value.isascii() or not value.isdigit() or not least <= int(value) <= _MOST:
        raise ConfigurationError(
          f'TaskFeed.options has {name!r}: {value} of the task synthetic. Use {least} to {_MOST}.'
        )
    documents = int(options['documents' if selection.split == 'train' else 'validation'])
    self._length = int(options['tokens'])
    self.lengths = np.full(documents, self._length)
    self.sequence_keys = np.arange(documents, dtype=np.uint64)
    self.prompts = np.zeros(documents, np.int64)
    self.later_prompts = np.zeros(0, np.int64)
    self.tokens = documents * self._length
    self.information = {'text_bytes': self.tokens}
    self._vocabulary = selection.vocabulary
    self._seed = zlib.crc32(selection.split.encode())
    self.fingerprint = content_hash(selection.recorded() | {'options': options})

  def read(self, documents: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """As `TokenStore.read`: int32 [sum(lengths)], by SplitMix64 (Steele, Lea & Flood 2014)."""
    before = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
    z = np.repeat(documents, lengths).astype(np.uint64) << np.uint64(31) | places.astype(np.uint64)
    z = (z + np.uint64(self._seed << 8)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
      z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    tokens = ((z >> np.uint64(32)) * np.uint64(self._vocabulary.size)) >> np.uint64(32)
    return np.where(places == self._length - 1, self._vocabulary.eos_id, tokens.astype(np.int32))

  def damaged(self, documents: np.ndarray) -> np.ndarray:
    """No document is."""
    return np.zeros(len(documents), bool)
