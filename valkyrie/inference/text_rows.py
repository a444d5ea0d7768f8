"""Texts as rows of tokens, and the carry that each row begins with."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.data.vocabularies import ANY_TEXT, Vocabulary, as_utf8, following
from valkyrie.errors import ConfigurationError, UsageError
from valkyrie.inference import documents
from valkyrie.inference.documents import AnyCarry
from valkyrie.inference.reader import Reader, TextCarry
from valkyrie.models.model import Model

Text = str | np.ndarray  # or its tokens


def batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
  """The items in their order, at most `size` at once."""
  firsts = range(0, len(items), size)
  return [items[first : first + size] for first in firsts]


class TextRows:
  """Turns texts into what a reader of a model reads."""

  def __init__(self, model: Model, tokenizer: Vocabulary, reader: Reader):
    """Takes the parts of a `LoadedModel`."""
    self.model = model
    self.tokenizer = tokenizer
    self.reader = reader

  def tokens(self, texts: Text | Sequence[Text], carry: AnyCarry | None) -> list[np.ndarray]:
    """The tokens int32 [T] of each text, which begins a document unless the carry has read some.

    A document begins with its BOS, if the vocabulary has one; tokens are taken as they are.

    Raises:
      UsageError: there is neither a text nor a list.
      DataError: a text is not Unicode.
      ConfigurationError: there are tokens that the model does not have.
    """
    begins = carry is None or not np.any(carry.position)
    if not isinstance(texts, Iterable):
      raise UsageError(f'Found {texts!r:.80}, expected a text, its tokens, or a list of these.')
    several = texts
    if isinstance(texts, str | np.ndarray):
      several = [texts]
    return [self.tokens_of(text, begins) for text in several]

  def tokens_of(self, text: Text, begins: bool) -> np.ndarray:
    """The tokens int32 [T] of a text, which begins a document or follows one; see `tokens`."""
    size = self.model.about.vocabulary_size
    if isinstance(text, str):
      as_utf8(text, 'A text')
      codec = self.tokenizer
      found = codec.begun(text) if begins else following(codec.ids, ANY_TEXT, text)
    else:
      found = np.asarray(text)
    are_integers = not found.size or found.dtype.kind in 'iu'
    if found.ndim != 1 or not are_integers:
      raise ConfigurationError(
        f'A text is an array {list(found.shape)} of {found.dtype}. Pass strings, or one row '
        'of integers for each text.'
      )
    is_unknown = (found < 0) | (found >= size)  # jax would clamp, fill or wrap it
    if is_unknown.any():
      wrong = found[is_unknown][0]
      raise ConfigurationError(
        f'A text has the token {wrong}, but the model has the tokens 0 to {size - 1:,}. Encode the '
        'text with the tokenizer of this run.'
      )
    return found.astype(np.int32)

  def begun(
    self,
    carry: AnyCarry | None,
    texts: int,
    numbers: Sequence[int] | None = None,
  ) -> TextCarry:
    """The carry with which texts begin: empty, or copies of the rows of a carry.

    Args:
      carry: one row for all texts, or one for each; None is an empty one.
      texts: the number of texts.
      numbers: the numbers of the texts that are read now; None means all.
    """
    if numbers is None:
      numbers = range(texts)
    if carry is None:
      return self.reader.fresh(len(numbers))
    carry_rows = len(carry.position)
    if carry_rows not in (1, texts):
      raise ConfigurationError(
        f'The carry has {carry_rows} rows, but {texts} texts follow. Use a carry of one '
        'row, or of a row for each text; `rows` chooses some.'
      )
    if carry_rows == 1:
      numbers = [0] * len(numbers)
    return self.chosen(carry, numbers)

  def chosen(self, carry: AnyCarry, numbers: Sequence[int]) -> TextCarry:
    """The rows of a carry with these numbers; an IndexError if there is no such row."""
    documents.check(carry, self.reader)
    rows = len(carry.position)
    index = np.asarray(numbers)
    are_integers = index.ndim == 1 and index.size > 0 and index.dtype.kind in 'iu'
    if not are_integers or index.min() < -rows or index.max() >= rows:
      raise IndexError(
        f'The carry has no rows {numbers!r:.80}. Use a list of numbers from 0 to {rows - 1}, or '
        'from -1 for those from the last.'
      )
    index = np.arange(rows)[index]

    def take(x, axes):
      return jnp.take(x, index, axes.index('batch'))

    axes = self.model.carry_axes(carry.carry)
    model_carry = jax.tree.map(take, carry.carry, axes)
    return TextCarry(model_carry, carry.position[index], carry.hidden[index])
