"""The tokens of a text after a text: how each is chosen, and what they decode to."""

from collections.abc import Sequence
import dataclasses
from typing import Annotated

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import Fraction, NonNegativeFloat, PositiveInt, Range, check_fields
from valkyrie.data.vocabularies import Vocabulary
from valkyrie.errors import ConfigurationError
from valkyrie.types import Array

# Reasons why a text is complete.
EOS = 'eos'
STOP = 'stop'
LENGTH = 'length'
_UNFINISHED = '\N{REPLACEMENT CHARACTER}'
_FIRST_MARK = 0xD800  # half of a character, which no text has
_LONGEST_CHARACTER = 8  # tokens; later an incomplete character is taken as it is
_REACHED = 1 - 1e-6  # a share is reached from this part of it on: sums are rounded to float32
_SMALLEST = float(np.finfo(np.float32).tiny)  # devices take smaller numbers for 0

Penalty = Annotated[float, Range('[1e-30, 1e30]')]
PositiveFraction = Annotated[float, Range('(0, 1]')]


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Rules for the choice of the next token, applied in this order; greedy by default.

  Of tokens that are equally likely, top_k and top_p keep those with the smaller numbers.

  Attributes:
    repetition_penalty: divides the positive logits of tokens in the prompt and its continuation,
      and multiplies the negative ones (CTRL, Keskar et al. 2019); 1 changes nothing. What a carry
      has read is not known and does not count.
    temperature: divides the logits; 0 takes the largest.
    top_k: keeps the k largest logits; None keeps all.
    top_p: keeps the smallest set of the most likely tokens whose probabilities sum to at least p
      (nucleus sampling, Holtzman et al. 2020).
    min_p: keeps tokens at least this likely, relative to the most likely one (Nguyen et al. 2024).
  """

  repetition_penalty: Penalty = 1.0
  temperature: NonNegativeFloat = 0.0
  top_k: PositiveInt | None = None
  top_p: PositiveFraction = 1.0
  min_p: Fraction = 0.0

  def choose(self, logits: Array, seen: Array, keys: Array) -> Array:
    """The next tokens, int32 [B], from logits float32 [B, V] and random keys [B].

    `seen`, bool [B, V], marks the tokens of the text so far; any shape without a penalty.
    """
    if self.repetition_penalty != 1:
      logits = self._penalized(logits, seen)
    if self.temperature == 0:
      greedy = jnp.argmax(logits, axis=-1)
      return greedy.astype(jnp.int32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    logits = logits - largest  # the quotient may exceed float32
    logits = logits / max(self.temperature, _SMALLEST)
    vocabulary_size = logits.shape[-1]
    if self.top_k is not None and self.top_k < vocabulary_size:
      _, likeliest = lax.top_k(logits, self.top_k)
      logits = _kept(logits, likeliest, jnp.bool(True))
    if self.top_p < 1:
      logits = self._nucleus(logits)
    if self.min_p > 0:
      logits = self._likely(logits)
    draw = jax.vmap(jax.random.categorical)
    drawn = draw(keys, logits)
    return drawn.astype(jnp.int32)

  def _likely(self, logits: Array) -> Array:
    """The logits of tokens at least `min_p` as likely as the likeliest one, and -inf for others."""
    most = jnp.max(logits, axis=-1, keepdims=True)
    least = most + jnp.log(self.min_p)
    return jnp.where(logits < least, -jnp.inf, logits)

  def _penalized(self, logits: Array, seen: Array) -> Array:
    """The logits with the repetition penalty on tokens that were `seen`."""
    factor = self.repetition_penalty
    divided = logits / factor
    multiplied = logits * factor
    penalized = jnp.where(logits > 0, divided, multiplied)
    return jnp.where(seen, penalized, logits)

  def _nucleus(self, logits: Array) -> Array:
    """The logits of the likeliest tokens that have `top_p` together, and -inf for all others."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    descending = jnp.take_along_axis(logits, order, axis=-1)
    shares = jax.nn.softmax(descending, axis=-1)
    until_each = jnp.cumsum(shares, axis=-1)
    likelier = until_each - shares  # the sum of the shares before each
    reached = max(self.top_p * _REACHED, _SMALLEST)
    return _kept(logits, order, likelier < reached)

  def __post_init__(self):
    check_fields(self)


def _kept(logits: Array, tokens: Array, keep: Array) -> Array:
  """The logits [B, V] of the `tokens` [B, N] to keep, and -inf for all others."""
  none = jnp.zeros(logits.shape, bool)
  is_kept = jnp.put_along_axis(none, tokens, keep, axis=-1, inplace=False)
  return jnp.where(is_kept, logits, -jnp.inf)


GREEDY = Sampling()


class Continuation:
  """A growing text: the decoded prompt and tokens, without the decoded prompt.

  Each token is decoded with a few neighbors, never with the whole text.

  Attributes:
    tokens: all tokens.
    text: the certain part, without an incomplete character or the beginning of a stop string.
    ended: the reason why the text is complete, 'eos', 'stop' or 'length'; None while it grows.
  """

  def __init__(
    self,
    vocabulary: Vocabulary,
    stop: str | Sequence[str] = (),
    prompt: Sequence[int] | np.ndarray = (),
  ):
    """A text after the tokens of a prompt, which ends before the first of the strings `stop`.

    Raises a ConfigurationError if a stop string is empty.
    """
    stops = list(stop)
    if isinstance(stop, str):
      stops = [stop]
    are_texts = [isinstance(string, str) and bool(string) for string in stops]
    if not all(are_texts):
      raise ConfigurationError(
        f'stop={stop!r:.80} has what is not a text, or is empty. Use strings of one letter or more.'
      )
    # Decoders leave special tokens out. So a mark, which no text has, replaces each in stop strings
    # and in the held text.
    self._marks: dict[int, str] = {}
    self._stop = set(stops)
    self._stop.update(self._marked(stops, vocabulary))
    self._vocabulary = vocabulary
    self._begin = vocabulary.encode('a')  # decoders drop the first space of a text
    last_of_prompt = prompt[-_LONGEST_CHARACTER:]
    self._ids = [int(token) for token in last_of_prompt]
    self._context = 0  # the first token that is decoded again
    self._decoded = len(self._ids)  # the first token that was not decoded
    self._held = ''  # decoded, but perhaps the beginning of a stop string
    self.tokens: list[int] = []
    self.text = ''
    self.ended: str | None = None

  def _marked(self, stops: list[str], vocabulary: Vocabulary) -> list[str]:
    """The stop strings with marks in place of special tokens; fills the table of marks."""
    if not stops:
      return []
    names = []
    for name in vocabulary.specials:
      if any(name in string for string in stops):
        names.append(name)
    marked = stops
    for name in sorted(names, key=len, reverse=True):  # since one name may contain another
      mark = chr(_FIRST_MARK + len(self._marks))
      self._marks[vocabulary.specials[name]] = mark
      marked = [string.replace(name, mark) for string in marked]
    return marked

  def add(self, token: int) -> str:
    """Adds a token; returns the text that becomes certain."""
    if token == self._vocabulary.eos_id:
      return self.end(EOS)
    self.tokens.append(token)
    self._ids.append(token)
    mark = self._marks.get(token, '')
    characters = self._decode(last=bool(mark))
    return self._certain(characters + mark, last=False)

  def end(self, reason: str = LENGTH) -> str:
    """Completes the text; returns the part that was held back."""
    characters = self._decode(last=True)
    certain = self._certain(characters, last=True)
    self.ended = self.ended or reason
    return certain

  def _decode(self, last: bool) -> str:
    """The new characters."""
    known = self._decoded_until(self._decoded)
    text = self._decoded_until(len(self._ids))
    undecoded = len(self._ids) - self._decoded
    waits = undecoded < _LONGEST_CHARACTER
    if not last and waits and text.endswith(_UNFINISHED):
      return ''
    self._context = self._decoded
    self._decoded = len(self._ids)
    return text[len(known) :]

  def _decoded_until(self, end: int) -> str:
    """The text of the context and the tokens after it up to `end`."""
    ids = self._ids[self._context : end]
    return self._vocabulary.decode([*self._begin, *ids])

  def _certain(self, characters: str, last: bool) -> str:
    """Holds new characters; returns the part that cannot be the beginning of a stop string."""
    self._held += characters
    places = [self._held.find(stop) for stop in self._stop]
    stops = [place for place in places if place >= 0]
    if stops:
      first_stop = min(stops)
      certain = self._held[:first_stop]
      self._held = ''
      self.ended = STOP
    else:
      split = len(self._held)
      if not last:
        split -= self._begun()
      certain = self._held[:split]
      self._held = self._held[split:]
    for mark in self._marks.values():
      certain = certain.replace(mark, '')
    self.text += certain
    return certain

  def _begun(self) -> int:
    """The characters at the end of the held text that may begin a stop string."""
    most = 0
    for stop in self._stop:
      for length in range(len(stop)):
        if self._held.endswith(stop[:length]):
          most = max(most, length)
    return most
