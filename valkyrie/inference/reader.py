"""Rows of tokens, read in chunks by a trained model: their scores, and the carry after them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.config import ranges
from valkyrie.errors import ConfigurationError, UsageError, check_choice
from valkyrie.inference.checked import check_finite
from valkyrie.models.carry_cuts import CUTS, cut_carry
from valkyrie.models.features import ACTIVATIONS, Features
from valkyrie.models.language_model import Model
from valkyrie.training.losses import logits, token_scores
from valkyrie.types import Array, Carry, Params, position_of

_SMALLEST = 16  # tokens of a chunk that is not a single token; each size is compiled once


class TextCarry(NamedTuple):
  """All that a model keeps of the texts that it has read, for B rows.

  position: int32 [B], the position of the next token: the tokens read, up to 2^30; see
    `types.Batch`.
  hidden: [B, D], the features of the last token, which predict the next one.
  """

  carry: Carry
  position: Array
  hidden: Array


class TextScore(NamedTuple):
  """How well a model predicts a text.

  tokens: the ids of the text, int32 [T].
  log_probs: log p(token | earlier tokens) in nats, float32 [T]; NaN for the first token of a
    document, which has no context.
  greedy: bool [T], whether the token is the most likely one.
  """

  tokens: np.ndarray
  log_probs: np.ndarray
  greedy: np.ndarray

  @property
  def log_prob(self) -> float:
    """The sum of the log-probabilities of all tokens but a document's first, in nats."""
    return float(np.nansum(self.log_probs, dtype=np.float64))


class Reader:
  """Reads documents. Rows may have different lengths: padding changes no carry."""

  def __init__(self, model: Model, chunk_size: int):
    """A reader for the pure functions of a model; one call reads up to `chunk_size` tokens a row.

    Raises a ConfigurationError if the model carries nothing from chunk to chunk.
    """
    ranges.check('open_run', chunk_size=chunk_size)
    if not model.about.carried:
      raise ConfigurationError(
        'FullAttention.carried is False: the model reads each chunk alone, and cannot continue a '
        'text. Bind FullAttention.carried = True; the parameters stay the same.'
      )
    self._model = model
    self._chunk_size = chunk_size
    self._read = jax.jit(self.advance, static_argnums=4, donate_argnums=1)
    self._score = jax.jit(self._scored, donate_argnums=1)
    self._predict = jax.jit(self._predicted)  # not donated: users take gradients through it
    self._show = jax.jit(self._apply, static_argnums=4, donate_argnums=1)

  def fresh(self, rows: int) -> TextCarry:
    """Rows before their first token."""
    width = self._model.about.width
    hidden = jnp.zeros((rows, width), self._model.about.compute_dtype)
    carry = TextCarry(self._model.initial_carry(rows), jnp.zeros(rows, jnp.int32), hidden)
    return jax.tree.map(jnp.copy, carry)  # no buffer twice, for the calls that overwrite them

  def read(
    self, params: Params, carry: TextCarry, rows: Sequence[np.ndarray], cut: str | None = None
  ) -> TextCarry:
    """Reads more tokens of every row, int [T of the row] each, and overwrites the carry.

    `cut` names a part of the carry to reset before every chunk, see `models.carry_cuts`. This and
    the next two raise a ConfigurationError if a row is longer than the model can read.
    """
    check_choice('cut', cut, (None, *CUTS))
    for tokens, lengths in self._chunks(carry, rows):
      carry = self._read(params, carry, tokens, lengths, cut)
    return carry

  def score(self, params: Params, carry: TextCarry, rows: Sequence[np.ndarray]) -> list[TextScore]:
    """Like `read`, but returns the scores of the tokens of each row.

    Raises a Diverged error if one is not finite.
    """
    is_first = np.asarray(carry.position) == 0
    found = [(np.zeros((len(rows), 0), np.float32), np.zeros((len(rows), 0), bool))]
    for tokens, lengths in self._chunks(carry, rows):
      (log_probs, greedy), carry = self._score(params, carry, tokens, lengths)
      found.append((np.asarray(log_probs), np.asarray(greedy)))
    log_probs, greedy = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    scores = [
      TextScore(row, log_probs[number, : len(row)], greedy[number, : len(row)])
      for number, row in enumerate(rows)
    ]
    for score, first in zip(scores, is_first, strict=True):
      check_finite(np.isfinite(score.log_probs[int(first) :]))
      score.log_probs[: int(first)] = np.nan
    return scores

  def logits(self, params: Params, carry: TextCarry, tokens: np.ndarray) -> Array:
    """Reads a row and returns the logits after each of its tokens, float32 [T, vocabulary size]."""
    found = [jnp.zeros((0, self._model.about.vocabulary_size))]
    for piece, lengths in self._chunks(carry, [tokens]):
      scores, carry = self._predict(params, carry, piece, lengths)
      found.append(scores[0, : lengths[0]])
    return jnp.concatenate(found)

  def activations(
    self, params: Params, carry: TextCarry, tokens: np.ndarray, kinds: Sequence[str]
  ) -> dict[str, np.ndarray]:
    """Reads a row and returns {kind: [layers, T, D]}; see `features.ACTIVATIONS`."""
    if not len(tokens):
      raise UsageError('The text is empty, and has no activations.')
    if unknown := [kind for kind in kinds if kind not in ACTIVATIONS]:
      raise ConfigurationError(
        f'There are no activations of the kind {unknown[0]!r}. Use {", ".join(ACTIVATIONS)}.'
      )
    parts: list[dict[str, np.ndarray]] = []
    for piece, lengths in self._chunks(carry, [tokens]):
      features, carry = self._show(params, carry, piece, lengths, tuple(kinds))
      found = features.activations
      parts.append({kind: np.asarray(found[kind][:, 0, : lengths[0]]) for kind in kinds})
    return {kind: np.concatenate([p[kind] for p in parts], axis=1) for kind in kinds}

  def advance(
    self, params: Params, carry: TextCarry, tokens: Array, lengths: Array, cut: str | None = None
  ) -> TextCarry:
    """Reads the first `lengths` [B] of the tokens [B, T], after a cut of the carry; pure."""
    before = cut_carry(carry.carry, self._model.initial_carry(len(tokens)), cut)
    return self._apply(params, carry._replace(carry=before), tokens, lengths)[1]

  def next_logits(self, params: Params, carry: TextCarry) -> Array:
    """The logits of the next token, float32 [B, vocabulary size]; pure."""
    tables = params['model']
    features = Features(carry.hidden[:, None], tables.get('unembedding', tables['embedding']))
    size = self._model.about.vocabulary_size
    return logits(features, size)[:, 0, :size]

  def check_length(self, tokens: int) -> None:
    """Raises a ConfigurationError if a text is longer than the model can read."""
    longest = self._model.about.max_context
    if longest is not None and tokens > longest:
      raise ConfigurationError(
        f'The text of {tokens} tokens, with those to be generated, exceeds the {longest} that '
        'this model can read (FullAttention.max_context). Shorten it.'
      )

  def _apply(
    self,
    params: Params,
    carry: TextCarry,
    tokens: Array,
    lengths: Array,
    activations: Sequence[str] = (),
  ) -> tuple[Features, TextCarry]:
    index = jnp.arange(tokens.shape[1])[None]
    real = index < lengths[:, None]
    features, after = self._model.apply(
      params,
      carry.carry,
      tokens,
      jnp.where(real, position_of(carry.position[:, None] + index), 0),
      real.astype(jnp.int32),
      activations=activations,
    )
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(features.hidden, last, axis=1)[:, 0]
    hidden = jnp.where(lengths[:, None] > 0, hidden, carry.hidden)
    return features, TextCarry(after, position_of(carry.position + lengths), hidden)

  def _scored(
    self, params: Params, carry: TextCarry, tokens: Array, lengths: Array
  ) -> tuple[tuple[Array, Array], TextCarry]:
    features, after = self._apply(params, carry, tokens, lengths)
    before = jnp.concatenate([carry.hidden[:, None], features.hidden[:, :-1]], axis=1)
    size = self._model.about.vocabulary_size
    found = token_scores(Features(before, features.unembedding), tokens, size)
    return (-found.loss, found.right), after

  def _predicted(
    self, params: Params, carry: TextCarry, tokens: Array, lengths: Array
  ) -> tuple[Array, TextCarry]:
    features, after = self._apply(params, carry, tokens, lengths)
    size = self._model.about.vocabulary_size
    return logits(features, size)[..., :size], after

  def _chunks(
    self, carry: TextCarry, rows: Sequence[np.ndarray]
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens [B, T], real tokens of each row [B]) of each chunk."""
    lengths = np.array([len(row) for row in rows])
    self.check_length(int((np.asarray(carry.position) + lengths).max(initial=0)))
    longest = int(lengths.max(initial=0))
    for start in range(0, longest, self._chunk_size):
      here = np.clip(lengths - start, 0, self._chunk_size).astype(np.int32)
      size = min(self._chunk_size, max(_SMALLEST, 1 << int(here.max() - 1).bit_length()))
      tokens = np.zeros((len(rows), size), np.int32)
      for row, (whole, real) in enumerate(zip(rows, here, strict=True)):
        tokens[row, :real] = whole[start : start + real]
      yield tokens, here
