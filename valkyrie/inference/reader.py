"""Rows of tokens, read in chunks by a trained model: their scores, and the tokens after them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.config import ranges
from valkyrie.errors import ConfigurationError, Diverged, UsageError, check_choice
from valkyrie.inference.generation import Sampling
from valkyrie.models.carry_cuts import CUTS, cut_carry
from valkyrie.models.features import Description, Features, Kind
from valkyrie.models.matrices import Masks
from valkyrie.models.model import Model
from valkyrie.training.losses import logits, token_scores
from valkyrie.types import Array, Carry, Params, position_of

_SMALLEST = 16  # tokens of a chunk that is not a single token; each size is compiled once


class TextCarry(NamedTuple):
  """The memory of a model after the texts that it has read, for B rows.

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


def check_finite(finite: Any) -> None:
  """Raises a Diverged error unless all numbers of a model are finite."""
  if not np.all(finite):
    raise Diverged(
      'The model gives NaN or infinite numbers: its weights have diverged or are damaged, or the '
      'carry that it continues is. Load an earlier step, and read the text again.'
    )


def predicting_hidden(carry: TextCarry, features: Features) -> Array:
  """The features that predict each token of a chunk, [B, T, D]: those of the token before it."""
  last_of_carry = carry.hidden[:, None]
  but_last = features.hidden[:, :-1]
  return jnp.concatenate([last_of_carry, but_last], axis=1)


def places(carry: TextCarry, tokens: Array, lengths: Array) -> tuple[Array, Array]:
  """The positions and the segments, see `types.Batch`, of a chunk's first `lengths` tokens."""
  index = jnp.arange(tokens.shape[1])[None]
  is_real = index < lengths[:, None]
  distances = carry.position[:, None] + index
  positions = jnp.where(is_real, position_of(distances), 0)
  return positions, is_real.astype(jnp.int32)


def check_length(about: Description, tokens: int) -> None:
  """Raises a ConfigurationError if a text is longer than a model can read."""
  longest = about.max_context
  if longest is not None and tokens > longest:
    raise ConfigurationError(
      f'The text of {tokens} tokens, with those to be generated, exceeds the {longest} that '
      'this model can read (FullAttention.max_context). Shorten it, or let each token see the '
      'last tokens by FullAttention.slides = True.'
    )


class Reader:
  """Reads documents. Rows may have different lengths: padding changes no carry."""

  def __init__(self, model: Model, chunk_size: int):
    """A reader for the pure functions of a model; one call reads up to `chunk_size` tokens a row.

    Raises a ConfigurationError if the model carries nothing from chunk to chunk.
    """
    ranges.check('open_run.chunk_size', chunk_size, ranges.PositiveInt)
    if not model.about.carried:
      raise ConfigurationError(
        'FullAttention.carried is False: the model reads each chunk alone, and cannot continue a '
        'text. Bind FullAttention.carried = True; the parameters stay the same.'
      )
    self.model = model
    self.chunk_size = chunk_size
    self.progress: Callable[[int, int], Any] | None = None  # see `LoadedModel.progress`
    self._read = jax.jit(self._advance, static_argnums=4, donate_argnums=1)
    self._score = jax.jit(self._scored, donate_argnums=1)
    self._next = jax.jit(self._chosen, static_argnums=0, donate_argnums=(2, 3))
    # These return (..., the carry after the chunk), as `_score`. Users take gradients of `predict`.
    self.predict = jax.jit(self._predicted)
    self.show = jax.jit(self.apply, static_argnums=4, donate_argnums=1)

  def fresh(self, rows: int) -> TextCarry:
    """Rows before their first token."""
    about = self.model.about
    hidden = jnp.zeros((rows, about.width), about.compute_dtype)
    position = jnp.zeros(rows, jnp.int32)
    carry = TextCarry(self.model.initial_carry(rows), position, hidden)
    return jax.tree.map(jnp.copy, carry)  # no buffer twice, for the calls that overwrite them

  def read(
    self,
    params: Params,
    carry: TextCarry,
    rows: Sequence[np.ndarray],
    cut: str | None = None,
    *,
    begin: int = 0,
    passed: Callable[[int, TextCarry], None] | None = None,
  ) -> TextCarry:
    """Reads more tokens of every row, int [T of the row] each, and overwrites the carry.

    Args:
      params: the parameters of the model.
      carry: the rows before these tokens.
      rows: the tokens.
      cut: a part of the carry to reset before every chunk, see `models.carry_cuts`.
      begin: the tokens of the text before these, which `progress` and `passed` count as well.
      passed: called after each chunk with the tokens so far and the carry, which it must copy.
    """
    check_choice('cut', cut, (None, *CUTS))
    previous = ()
    place = begin
    for tokens, lengths in self.chunks(carry, rows, begin):
      carry = self._read(params, carry, tokens, lengths, cut)
      place += int(lengths.max())
      if passed is not None:
        passed(place, carry)
      if self.progress is not None:  # otherwise calls run ahead of a device by dozens of chunks
        jax.block_until_ready(previous)
        previous = jnp.copy(carry.position)
    return carry

  def score(self, params: Params, carry: TextCarry, rows: Sequence[np.ndarray]) -> list[TextScore]:
    """Like `read`, but returns the scores of the tokens of each row."""
    is_fresh = np.asarray(carry.position) == 0
    without_context = is_fresh.astype(int)  # tokens of each row
    log_prob_parts = [np.zeros((len(rows), 0), np.float32)]
    greedy_parts = [np.zeros((len(rows), 0), bool)]
    for tokens, lengths in self.chunks(carry, rows):
      (log_probs, greedy), carry = self._score(params, carry, tokens, lengths)
      log_prob_parts.append(np.asarray(log_probs))
      greedy_parts.append(np.asarray(greedy))
    all_log_probs = np.concatenate(log_prob_parts, axis=1)
    all_greedy = np.concatenate(greedy_parts, axis=1)
    scores = []
    for number, row in enumerate(rows):
      length = len(row)
      log_probs = all_log_probs[number, :length]
      greedy = all_greedy[number, :length]
      first = without_context[number]
      with_context = log_probs[first:]
      check_finite(np.isfinite(with_context))
      log_probs[:first] = np.nan
      score = TextScore(row, log_probs, greedy)
      scores.append(score)
    return scores

  def embed(self, params: Params, carry: TextCarry, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Like `read`, but returns the mean of the features of each row, float32 [B, D]."""
    lengths = np.array([len(row) for row in rows])
    if not lengths.all():
      raise UsageError('A text is empty, and has no features. Leave it out.')
    width = self.model.about.width
    sums = np.zeros((len(rows), width))
    for tokens, real_tokens in self.chunks(carry, rows):
      features, carry = self.show(params, carry, tokens, real_tokens, ())
      places = np.arange(tokens.shape[1])
      is_real = places[None] < real_tokens[:, None]
      of_channels = is_real[..., None]
      sums += jnp.sum(features.hidden, axis=1, dtype=jnp.float32, where=of_channels)
    check_finite(np.isfinite(sums))
    means = sums / lengths[:, None]
    return means.astype(np.float32)

  def generate(
    self,
    params: Params,
    carry: TextCarry,
    texts: Sequence[np.ndarray],
    sampling: Sampling,
    *,
    seed: int,
    numbers: Sequence[tuple[int, int]],
    count: int,
  ) -> Iterator[np.ndarray]:
    """Yields the next tokens int32 [B], `count` times; the first step deletes the carry.

    `texts` are the tokens of each row so far, for a repetition penalty. A choice depends on the
    seed, the numbers of its row, its position, and the text before it, not on the other rows. It is
    -1 if the logits are not finite.
    """
    seen = np.zeros((), bool)
    if sampling.repetition_penalty != 1:
      shape = (len(texts), self.model.about.vocabulary_size)
      seen = np.zeros(shape, bool)
      for row, text in enumerate(texts):
        seen[row, text] = True
    seen = jnp.asarray(seen)
    key = jax.random.key(seed)
    keys = jnp.repeat(key, len(numbers))
    fold_in = jax.vmap(jax.random.fold_in)
    numbers_by_kind = np.asarray(numbers, np.uint32).T
    for number in numbers_by_kind:
      keys = fold_in(keys, number)
    pending = []
    for _ in range(count):
      tokens, carry, seen = self._next(sampling, params, carry, seen, keys)
      yield from map(np.asarray, pending)  # while the device computes the next one
      pending = [tokens]
    yield from map(np.asarray, pending)

  def _chosen(
    self,
    sampling: Sampling,
    params: Params,
    carry: TextCarry,
    seen: Array,
    keys: Array,
  ) -> tuple[Array, TextCarry, Array]:
    tables = params['model']
    size = self.model.about.vocabulary_size
    unembedding = tables.get('unembedding', tables['embedding'])
    features = Features(carry.hidden[:, None], unembedding)
    padded_scores = logits(features, size)
    scores = padded_scores[:, 0, :size]
    fold_in = jax.vmap(jax.random.fold_in)
    token_keys = fold_in(keys, carry.position)
    tokens = sampling.choose(scores, seen, token_keys)
    is_finite = jnp.isfinite(scores).all(axis=-1)
    tokens = jnp.where(is_finite, tokens, -1)
    if seen.ndim:
      rows = jnp.arange(len(tokens))
      seen = seen.at[rows, tokens].set(True)
    one_token = jnp.ones_like(tokens)
    next_carry = self._advance(params, carry, tokens[:, None], one_token)
    return tokens, next_carry, seen

  def _advance(
    self,
    params: Params,
    carry: TextCarry,
    tokens: Array,
    lengths: Array,
    cut: str | None = None,
  ) -> TextCarry:
    """Reads the first `lengths` [B] of the tokens [B, T], after a cut of the carry."""
    empty = self.model.initial_carry(len(tokens))
    model_carry = cut_carry(carry.carry, empty, cut)
    carry = carry._replace(carry=model_carry)
    _, next_carry = self.apply(params, carry, tokens, lengths)
    return next_carry

  def check_length(self, tokens: int) -> None:
    """As `check_length`, of this model."""
    check_length(self.model.about, tokens)

  def apply(
    self,
    params: Params,
    carry: TextCarry,
    tokens: Array,
    lengths: Array,
    activations: Sequence[Kind] = (),
    shift: Array | None = None,
    masks: Mapping[str, Masks] | None = None,
  ) -> tuple[Features, TextCarry]:
    """Reads a chunk; `shift` is added to the input of the first layer, see `LanguageModel`."""
    positions, segment_ids = places(carry, tokens, lengths)
    features, model_carry = self.model.apply(
      params,
      carry.carry,
      tokens,
      positions,
      segment_ids,
      activations=activations,
      shift=shift,
      masks=masks,
    )
    last = jnp.maximum(lengths - 1, 0)
    last_place = last[:, None, None]
    last_hidden = jnp.take_along_axis(features.hidden, last_place, axis=1)
    has_tokens = lengths[:, None] > 0
    hidden = jnp.where(has_tokens, last_hidden[:, 0], carry.hidden)
    next_position = position_of(carry.position + lengths)
    return features, TextCarry(model_carry, next_position, hidden)

  def _scored(
    self,
    params: Params,
    carry: TextCarry,
    tokens: Array,
    lengths: Array,
  ) -> tuple[tuple[Array, Array], TextCarry]:
    features, next_carry = self.apply(params, carry, tokens, lengths)
    hidden = predicting_hidden(carry, features)
    size = self.model.about.vocabulary_size
    predicting = Features(hidden, features.unembedding)
    scores = token_scores(predicting, tokens, size)
    return (-scores.loss, scores.right), next_carry

  def _predicted(
    self,
    params: Params,
    carry: TextCarry,
    tokens: Array,
    lengths: Array,
  ) -> tuple[Array, TextCarry]:
    features, next_carry = self.apply(params, carry, tokens, lengths)
    size = self.model.about.vocabulary_size
    padded_logits = logits(features, size)
    return padded_logits[..., :size], next_carry

  def chunks(
    self,
    carry: TextCarry,
    rows: Sequence[np.ndarray],
    begin: int = 0,
  ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens [B, T], real tokens of each row [B]) of each chunk; raises as `check_length`.

    `progress` counts from `begin`.
    """
    lengths = np.array([len(row) for row in rows])
    ends = np.asarray(carry.position) + lengths
    last_end = int(ends.max(initial=0))
    self.check_length(last_end)
    longest = int(lengths.max(initial=0))
    for start in range(0, longest, self.chunk_size):
      if self.progress is not None:
        self.progress(begin + start, begin + longest)
      left = lengths - start
      real_tokens = np.clip(left, 0, self.chunk_size)
      most = int(real_tokens.max())
      size = self._size(most)
      tokens = np.zeros((len(rows), size), np.int32)
      for row, text in enumerate(rows):
        count = real_tokens[row]
        end = start + count
        tokens[row, :count] = text[start:end]
      yield tokens, real_tokens.astype(np.int32)
    if self.progress is not None:
      end = begin + longest
      self.progress(end, end)

  def _size(self, tokens: int) -> int:
    """The size of the chunk in which so many tokens are read: each size is compiled once."""
    power_of_two = 1 << (tokens - 1).bit_length()
    size = max(_SMALLEST, power_of_two)
    return min(self.chunk_size, size)
