"""The choice of the next token from its logits."""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.errors import ConfigurationError
from valkyrie.types import Array


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Rules for a choice, applied in this order. Those by default are greedy.

  Attributes:
    repetition_penalty: logits of tokens in the text are divided by it if they are above 0, else
      multiplied (CTRL, Keskar et al. 2019); 1 changes nothing.
    temperature: divides the logits; 0 takes the largest.
    top_k: only the k largest count; None takes all.
    top_p: only the most likely tokens count whose probabilities, with the last of them, reach p
      (nucleus sampling, Holtzman et al. 2020).
    min_p: only tokens count that are at least so likely, relative to the most likely one (Nguyen et
      al. 2024).
  """

  repetition_penalty: float = 1.0
  temperature: float = 0.0
  top_k: int | None = None
  top_p: float = 1.0
  min_p: float = 0.0

  def __post_init__(self):
    for name, fits, wanted in (
      ('repetition_penalty', self.repetition_penalty > 0, 'a number above 0'),
      ('temperature', self.temperature >= 0, 'a number of 0 or more'),
      ('top_k', self.top_k is None or self.top_k >= 1, '1 or more, or None'),
      ('top_p', 0 < self.top_p <= 1, 'a number above 0 and at most 1'),
      ('min_p', 0 <= self.min_p <= 1, 'a number from 0 to 1'),
    ):
      if not fits:
        raise ConfigurationError(f'{name}={getattr(self, name)} must be {wanted}.')

  def choose(self, logits: Array, seen: Array, keys: Array) -> Array:
    """The next tokens, int32 [B].

    Args:
      logits: float32 [B, V].
      seen: bool [B, V], the tokens of the text so far; any shape without a penalty.
      keys: of random numbers [B].
    """
    if self.repetition_penalty != 1:
      factor = self.repetition_penalty
      logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    if self.temperature == 0:
      return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / self.temperature
    if self.top_k is not None and self.top_k < logits.shape[-1]:
      least = lax.top_k(logits, self.top_k)[0][:, -1:]
      logits = jnp.where(logits < least, -jnp.inf, logits)
    if self.top_p < 1:
      ordered = jnp.sort(logits, axis=-1, descending=True)
      shares = jax.nn.softmax(ordered, axis=-1)
      counts = jnp.cumsum(shares, axis=-1) - shares < self.top_p
      least = jnp.min(jnp.where(counts, ordered, jnp.inf), axis=-1, keepdims=True)
      logits = jnp.where(logits < least, -jnp.inf, logits)
    if self.min_p > 0:
      most = jnp.max(logits, axis=-1, keepdims=True)
      logits = jnp.where(logits < most + jnp.log(self.min_p), -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


GREEDY = Sampling()
