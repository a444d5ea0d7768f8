"""The gradient of an answer's log-odds by each token of a document: what mattered for it.

The gradient is by what the first layer reads of a token: its embedding and, in a model with
n-grams, those that end with it.

The log-odds of a token are log p / (1 - p): their gradient points where the gradient of log p does,
and does not vanish where the model is certain. It is exact through all chunks, see `segments`.
"""

from collections.abc import Sequence
import os
import pathlib
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import NonNegativeInt, check
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.inference import segments
from valkyrie.inference.reader import Reader, TextCarry, check_finite, predicting_hidden
from valkyrie.models.precision import wide
from valkyrie.monitoring import pictures
from valkyrie.training.losses import logits
from valkyrie.training.tbptt import floats_of
from valkyrie.types import Array, Params


class Passage(NamedTuple):
  """The tokens [begin, end), their text, and the sum of their strengths."""

  begin: int
  end: int
  strength: float
  text: str


class Attribution(NamedTuple):
  """How an answer depends on the text before it.

  tokens: int32 [N], of document, question and answer.
  effects: float32 [N], the first-order effect of each token's embedding on the log-odds of the
    answer's tokens, in nats: the gradient times the embedding, with the n-grams that end there.
  strengths: float32 [N], the size of the gradient times the size of the embedding: a rough upper
    bound on the effect of replacing the token.
  log_prob: the log-probability of the answer, in nats.
  tokenizer: the vocabulary of the tokens.
  document: the number of tokens before the question; None if all tokens belong to the document.
  """

  tokens: np.ndarray
  effects: np.ndarray
  strengths: np.ndarray
  log_prob: float
  tokenizer: Vocabulary
  document: int | None = None

  def passages(
    self,
    count: int = 10,
    width: int = 16,
    *,
    everywhere: bool = False,
  ) -> list[Passage]:
    """The `count` strongest passages of `width` tokens, apart from one another, strongest first.

    They are parts of the document: question and answer, on which the answer always depends most,
    are left out, unless `everywhere`.
    """
    check('passages.count', count, NonNegativeInt)
    check('passages.width', width, NonNegativeInt)
    strengths = self.strengths
    if not everywhere:
      strengths = strengths[: self.document]
    width = min(width, len(strengths))
    if not width:
      return []
    sums = np.convolve(strengths, np.ones(width), 'valid')
    passages: list[Passage] = []
    while len(passages) < count and sums.max(initial=0) > 0:
      begin = int(np.argmax(sums))
      end = begin + width
      sums[max(0, begin - width + 1) : end] = 0
      tokens = self.tokens[begin:end].tolist()
      text = self.tokenizer.decode(tokens)
      strength = float(strengths[begin:end].sum())
      passages.append(Passage(begin, end, strength, text))
    return passages

  def save_picture(self, path: str | os.PathLike) -> None:
    """Draws the strengths over the places of the tokens to a .png file."""
    pictures.write_spikes(pathlib.Path(path), self.strengths, 'token', 'strength, nats')


class _Chunk(NamedTuple):
  """A chunk of one row.

  tokens: int32 [1, T], padded; lengths: int32 [1], its tokens without padding.
  weights: float32 [1, T], 1 for the tokens of the answer.
  """

  tokens: Any  # arrays of numpy, or of jax while a function is traced
  lengths: Any
  weights: Any


class Attributor:
  """Computes attributions by a reader's model."""

  def __init__(self, reader: Reader):
    self._reader = reader
    self._forwards = jax.jit(self._read, static_argnums=3)
    self._backwards = jax.jit(self._pulled_back, static_argnums=3)

  def __call__(
    self,
    params: Params,
    tokens: np.ndarray,
    answer: int,
    since: int,
  ) -> tuple[np.ndarray, float]:
    """(effects and strengths [2, N], the log-probability of the last `answer` tokens in nats).

    Chunks that end before token `since` are only read forwards, and have zeros.
    """
    chunks = self._chunks(tokens, answer)
    size = self._reader.chunk_size
    first = since // size
    log_probs = []

    def noted(carry, chunk):
      (_, log_prob, _), carry = self._forwards(params, carry, chunk, answer)
      log_probs.append(log_prob)
      return carry

    def again(carry, chunk):
      _, carry = self._forwards(params, carry, chunk, answer)
      return carry

    longest = self._reader.model.about.max_context
    read = segments.read(noted, self._reader.fresh(1), chunks, longest, first)
    last_floats, _ = floats_of(read.last)
    gradient = [jnp.zeros_like(leaf) for leaf in last_floats]
    parts: list[np.ndarray] = []  # effects and strengths of the chunks, the last one first
    for carry, chunk in segments.reversed_chunks(again, read):
      gradient, effects = self._backwards(params, carry, chunk, answer, gradient)
      length = chunk.lengths[0]
      row_effects = np.asarray(effects)[:, 0]
      parts.append(row_effects[:, :length])
    only_read = np.zeros((2, first * size), np.float32)
    parts.append(only_read)
    parts.reverse()
    all_effects = np.concatenate(parts, axis=1)
    check_finite(np.isfinite(all_effects))
    log_prob = sum(log_probs)
    return all_effects, float(log_prob)

  def _chunks(self, tokens: np.ndarray, answer: int) -> list[_Chunk]:
    """The chunks of a text, whose last `answer` tokens have weight."""
    answer_begin = max(len(tokens) - answer, 1)  # a document's first token has no context
    weights = np.zeros((1, len(tokens)), np.float32)
    weights[:, answer_begin:] = 1
    chunks = []
    begin = 0
    fresh = self._reader.fresh(1)
    for padded, lengths in self._reader.chunks(fresh, [tokens]):
      length = lengths[0]
      chunk_weights = np.zeros(padded.shape, np.float32)
      weights_of_chunk = weights[:, begin : begin + length]
      chunk_weights[:, :length] = weights_of_chunk
      chunk = _Chunk(padded, lengths, chunk_weights)
      chunks.append(chunk)
      begin += self._reader.chunk_size
    return chunks

  def _read(
    self,
    params: Params,
    carry: TextCarry,
    chunk: _Chunk,
    count: int,
    shift: Array | None = None,
  ) -> tuple[tuple[Array, Array, Array | None], TextCarry]:
    """((log-odds, log-probability) of at most `count` weighted tokens, the carry after the chunk).

    With a shift, the third number is the input of the first layer.
    """
    features, next_carry = self._reader.apply(
      params, carry, chunk.tokens, chunk.lengths, shift=shift
    )
    hidden = predicting_hidden(carry, features)
    chunk_weights = chunk.weights[0]
    most = min(count, len(chunk_weights))
    weights, places = lax.top_k(chunk_weights, most)
    chosen = features._replace(hidden=hidden[:, places])
    row_scores = logits(chosen, self._reader.model.about.vocabulary_size)
    scores = row_scores[0]
    targets = chunk.tokens[0, places, None]
    odds = _log_odds(scores, targets)
    log_probs = jax.nn.log_sigmoid(odds)
    log_prob = jnp.sum(weights * log_probs)
    weighted_odds = jnp.sum(weights * odds)
    results = (weighted_odds, log_prob, features.embedded)
    return results, next_carry

  def _pulled_back(
    self,
    params: Params,
    carry: TextCarry,
    chunk: _Chunk,
    count: int,
    gradient: Sequence[Array],
  ) -> tuple[Sequence[Array], Array]:
    """(The gradient of the carry before a chunk, effects and strengths), from that after it."""
    floats, rebuild = floats_of(carry)
    about = self._reader.model.about

    def read(shift, floats):
      carry = rebuild(floats)
      (odds, _, embedded), next_carry = self._read(params, carry, chunk, count, shift)
      next_floats, _ = floats_of(next_carry)
      return (odds, next_floats), embedded

    shape = (*chunk.tokens.shape, about.width)
    shift = jnp.zeros(shape, about.compute_dtype)
    (odds, _), pull_back, embedded = jax.vjp(read, shift, floats, has_aux=True)
    cotangents = (jnp.ones_like(odds), gradient)
    by_embedded, by_carry = pull_back(cotangents)
    assert embedded is not None  # since it was shifted
    embedded = embedded.astype(wide(embedded.dtype))
    by_embedded = by_embedded.astype(embedded.dtype)
    products = embedded * by_embedded
    effects = jnp.sum(products, axis=-1)
    norms = jnp.linalg.norm(embedded, axis=-1)
    gradient_norms = jnp.linalg.norm(by_embedded, axis=-1)
    strengths = norms * gradient_norms
    return by_carry, jnp.stack([effects, strengths])


def _log_odds(scores: Array, targets: Array) -> Array:
  """log p / (1 - p) of the targets [N, 1] by the logits [N, V], [N]."""
  vocabulary = jnp.arange(scores.shape[-1])
  is_target = vocabulary[None] == targets
  target_scores = jnp.where(is_target, scores, 0)
  other_scores = jnp.where(is_target, -jnp.inf, scores)
  target = jnp.sum(target_scores, axis=-1)
  others = jax.nn.logsumexp(other_scores, axis=-1)
  return target - others
