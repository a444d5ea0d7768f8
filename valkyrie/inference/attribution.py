"""The gradient of an answer's log-odds by each token of a document: what mattered for it.

The gradient is by what the first layer reads of a token: its embedding and, in a model with
n-grams, those that end with it.

The log-odds of a token are log p / (1 - p): their gradient points where the gradient of log p does,
and does not vanish where the model is certain. It is exact through all chunks: read forwards, they
leave the carry before each segment of about sqrt(n) of n chunks. Backwards, a segment is read
again, then each of its chunks, whose carry passes its gradient to the chunk before it, as in
`tbptt`.
"""

from collections.abc import Sequence
import math
import os
import pathlib
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.data.vocabularies import Vocabulary
from valkyrie.inference.reader import Reader, TextCarry, check_finite
from valkyrie.models.layers import wide
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
  """How an answer depends on what precedes it.

  tokens: int32 [N], of document, question and answer.
  effects: float32 [N], the first-order effect of each token's embedding on the log-odds of the
    answer's tokens, in nats: the gradient times the embedding, with the n-grams that end there.
  strengths: float32 [N], the size of the gradient times the size of the embedding. To first order,
    another token in its place hardly has a larger effect.
  log_prob: of the answer, in nats.
  tokenizer: of the tokens.
  document: the number of tokens before the question; None if all are of the document.
  """

  tokens: np.ndarray
  effects: np.ndarray
  strengths: np.ndarray
  log_prob: float
  tokenizer: Vocabulary
  document: int | None = None

  def passages(
    self, count: int = 10, width: int = 16, *, everywhere: bool = False
  ) -> list[Passage]:
    """The `count` strongest passages of `width` tokens, apart from one another, strongest first.

    They are of the document: question and answer, on which the answer always depends most, are
    left out, unless `everywhere`.
    """
    strengths = self.strengths if everywhere else self.strengths[: self.document]
    width = min(width, len(strengths))
    found: list[Passage] = []
    if not width:
      return found
    strength = np.convolve(strengths, np.ones(width), 'valid')
    while len(found) < count and strength.max(initial=0) > 0:
      begin = int(np.argmax(strength))
      strength[max(0, begin - width + 1) : begin + width] = 0
      span = slice(begin, begin + width)
      text = self.tokenizer.decode(self.tokens[span].tolist())
      found.append(Passage(begin, begin + width, float(strengths[span].sum()), text))
    return found

  def save_picture(self, path: str | os.PathLike) -> None:
    """Draws the strengths over the places of the tokens to a .png file."""
    pictures.write_spikes(pathlib.Path(path), self.strengths, 'token', 'strength, nats')


class Attributor:
  """Computes attributions by a reader's model."""

  def __init__(self, reader: Reader):
    self._reader = reader
    self._forwards = jax.jit(self._read, static_argnums=3)
    self._backwards = jax.jit(self._pulled_back, static_argnums=3)

  def __call__(
    self, params: Params, tokens: np.ndarray, answer: int, since: int
  ) -> tuple[np.ndarray, float]:
    """(effects and strengths [2, N], the log-probability of the last `answer` tokens in nats).

    Chunks that end before token `since` are only read forwards, and have zeros.
    """
    weights = np.zeros((1, len(tokens)), np.float32)
    weights[:, max(len(tokens) - answer, 1) :] = 1  # a document's first token has no context
    carry, size, chunks = self._reader.fresh(1), self._reader.chunk_size, []
    for number, (padded, lengths) in enumerate(self._reader.chunks(carry, [tokens])):
      now = weights[:, number * size :][:, : lengths[0]]
      now = np.pad(now, ((0, 0), (0, padded.shape[1] - lengths[0])))
      chunks.append((padded, lengths, now))
    first, log_probs = since // size, []
    per_segment = math.isqrt(len(chunks) - first)
    begins: dict[int, TextCarry] = {}
    for number, chunk in enumerate(chunks):
      if number >= first and (number - first) % per_segment == 0:
        begins[number] = carry
      (_, log_prob, _), carry = self._forwards(params, carry, chunk, answer)
      log_probs.append(log_prob)
    later, found = [jnp.zeros_like(leaf) for leaf in floats_of(carry)[0]], []
    for begin, carry in reversed(begins.items()):
      befores, segment = [carry], chunks[begin : begin + per_segment]
      for chunk in segment[:-1]:
        befores.append(self._forwards(params, befores[-1], chunk, answer)[1])
      for before, chunk in zip(reversed(befores), reversed(segment), strict=True):
        later, effects = self._backwards(params, before, chunk, answer, later)
        found.append(np.asarray(effects)[:, 0, : chunk[1][0]])
    effects = np.concatenate([np.zeros((2, first * size), np.float32), *reversed(found)], axis=1)
    check_finite(np.isfinite(effects))
    return effects, float(sum(log_probs))

  def _read(
    self, params: Params, carry: TextCarry, chunk: Any, count: int, shift: Array | None = None
  ) -> tuple[tuple[Array, Array, Array | None], TextCarry]:
    """((log-odds, log-probability) of at most `count` weighted tokens, the carry after it).

    With a shift, what the first layer reads is the third number.
    """
    tokens, lengths, weights = chunk
    features, after = self._reader.apply(params, carry, tokens, lengths, shift=shift)
    before = jnp.concatenate([carry.hidden[:, None], features.hidden[:, :-1]], axis=1)
    weights, places = lax.top_k(weights[0], min(count, weights.shape[1]))
    chosen = features._replace(hidden=before[:, places])
    scores = logits(chosen, self._reader.model.about.vocabulary_size)[0]
    is_target = jnp.arange(scores.shape[-1])[None] == tokens[0, places, None]
    target = jnp.sum(jnp.where(is_target, scores, 0), axis=-1)
    odds = target - jax.nn.logsumexp(jnp.where(is_target, -jnp.inf, scores), axis=-1)
    log_prob = jnp.sum(weights * jax.nn.log_sigmoid(odds))
    return (jnp.sum(weights * odds), log_prob, features.embedded), after

  def _pulled_back(
    self, params: Params, carry: TextCarry, chunk: Any, count: int, later: Sequence[Array]
  ) -> tuple[Sequence[Array], Array]:
    """(The gradient of the carry before a chunk, effects and strengths), from that after it."""
    floats, rebuild = floats_of(carry)
    about = self._reader.model.about

    def of(shift, floats):
      (odds, _, embedded), after = self._read(params, rebuild(floats), chunk, count, shift)
      return (odds, floats_of(after)[0]), embedded

    shift = jnp.zeros((*chunk[0].shape, about.width), about.compute_dtype)
    (odds, _), pull_back, embedded = jax.vjp(of, shift, floats, has_aux=True)
    by_embedded, before = pull_back((jnp.ones_like(odds), later))
    assert embedded is not None  # since it was shifted
    embedded = embedded.astype(wide(embedded.dtype))
    by_embedded = by_embedded.astype(embedded.dtype)
    sizes = jnp.linalg.norm(embedded, axis=-1) * jnp.linalg.norm(by_embedded, axis=-1)
    return before, jnp.stack([jnp.sum(embedded * by_embedded, axis=-1), sizes])
