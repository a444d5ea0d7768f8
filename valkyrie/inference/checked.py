"""Texts and numbers that people pass to a model, checked: jax would clamp, fill or wrap them."""

from typing import Any

import numpy as np

from valkyrie.data.vocabularies import ANY_TEXT, Vocabulary, as_utf8, following
from valkyrie.errors import ConfigurationError, Diverged

Text = str | np.ndarray  # or its tokens


def check_finite(finite: Any) -> None:
  """Raises a Diverged error unless all numbers of a model are finite."""
  if not np.all(finite):
    raise Diverged(
      'The model gives NaN or infinite numbers: its weights have diverged or are damaged, or the '
      'carry that it continues is. Load an earlier step, and read the text again.'
    )


def tokens_of(text: Text, vocabulary: Vocabulary, size: int, *, begins: bool) -> np.ndarray:
  """The tokens int32 [T] of a text, which begins a document or not, for a model of `size` tokens.

  A document begins with its BOS, if the vocabulary has one; tokens are taken as they are.

  Raises:
    DataError: the text is no Unicode.
    ConfigurationError: there are tokens that the model does not have.
  """
  if isinstance(text, str):
    as_utf8(text, 'A text')
    ids = vocabulary.ids
    found = vocabulary.begun(text) if begins else following(ids, ANY_TEXT, text)
  else:
    found = np.asarray(text)
  if found.ndim != 1 or (found.size and found.dtype.kind not in 'iu'):
    raise ConfigurationError(
      f'A text is an array {list(found.shape)} of {found.dtype}. Pass strings, or one row '
      'of integers for each text.'
    )
  if found.size and not 0 <= found.min() <= found.max() < size:
    wrong = found[(found < 0) | (found >= size)][0]
    raise ConfigurationError(
      f'A text has the token {wrong}, but the model has the tokens 0 to {size - 1:,}. Encode the '
      'text with the tokenizer of this run.'
    )
  return found.astype(np.int32)
