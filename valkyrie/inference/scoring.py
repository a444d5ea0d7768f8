"""Log-probabilities, features, logits and activations of given texts.

`LoadedModel` documents the arguments and errors.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from valkyrie.config import ranges
from valkyrie.errors import UsageError, check_choice
from valkyrie.inference.documents import AnyCarry
from valkyrie.inference.text_rows import Text, TextRows, batches
from valkyrie.models.features import ACTIVATIONS
from valkyrie.types import Array, Params


def of_each(
  rows: TextRows,
  find: Callable,
  params: Params,
  texts: Text | Sequence[Text],
  carry: AnyCarry | None,
  batch_size: int,
) -> list:
  """What a function of the reader returns for each text; `batch_size` texts are read at once."""
  ranges.check(f'{find.__name__}.batch_size', batch_size, ranges.PositiveInt)
  tokens = rows.tokens(texts, carry)
  results = []
  for batch in batches(range(len(tokens)), batch_size):
    begun = rows.begun(carry, len(tokens), batch)
    batch_tokens = [tokens[number] for number in batch]
    results += [*find(params, begun, batch_tokens)]
  return results


def logits(rows: TextRows, params: Params, text: Text, carry: AnyCarry | None) -> Array:
  """The logits of the token after each token of a text, float32 [T, vocabulary size]."""
  tokens = rows.tokens([text], carry)
  carry = rows.begun(carry, 1)
  vocabulary_size = rows.model.about.vocabulary_size
  nothing = jnp.zeros((0, vocabulary_size))
  parts = [nothing]
  for chunk, lengths in rows.reader.chunks(carry, tokens):
    chunk_logits, carry = rows.reader.predict(params, carry, chunk, lengths)
    length = lengths[0]
    parts.append(chunk_logits[0, :length])
  return jnp.concatenate(parts)


def activations(
  rows: TextRows,
  params: Params,
  text: Text,
  kinds: Sequence[str],
  carry: AnyCarry | None,
) -> dict[str, np.ndarray]:
  """Intermediate values of each token: {kind: [layers, T, D]}."""
  tokens = rows.tokens([text], carry)
  carry = rows.begun(carry, 1)
  (row,) = tokens
  if not len(row):
    raise UsageError('The text is empty, and has no activations. Pass a text of a token or more.')
  for kind in kinds:
    check_choice('kind', kind, ACTIVATIONS)
  parts: dict[str, list[np.ndarray]] = {kind: [] for kind in kinds}
  wanted = tuple(kinds)
  for chunk, lengths in rows.reader.chunks(carry, tokens):
    features, carry = rows.reader.show(params, carry, chunk, lengths, wanted)
    length = lengths[0]
    for kind in kinds:
      values = features.activations[kind]
      row_values = values[:, 0, :length]
      parts[kind].append(np.asarray(row_values))
  return {kind: np.concatenate(parts[kind], axis=1) for kind in kinds}
