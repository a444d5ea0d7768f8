"""Rotary positions (Su et al. 2021, RoFormer) at coordinates local to a slice.

A score depends only on the distance of two tokens, so coordinates may start anywhere: no angle
grows with the length of a document, and none loses precision.
"""

import dataclasses

import gin
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import Factor, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from valkyrie.errors import ConfigurationError
from valkyrie.models.precision import wide
from valkyrie.types import Array


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Rotary:
  """The frequencies of the pairs of channels.

  Attributes:
    base: pair number i of R/2 turns by base^(-2i / R) radians a token. Llama 3 has 500,000.
    share: R / K, of the first channels of a head, which turn, in whole pairs; the others tell no
      position. Qwen3.5 has 0.25; 0 is no rotary.
    factor: how much more slowly the slowest pairs turn, to read longer documents than in training
      (Llama 3.1, rope_type 'llama3'); 1 for none.
    original_context: tokens of the documents in training.
    low_turns, high_turns: low_freq_factor and high_freq_factor of the published configuration:
      pairs that turn at most `low_turns` times in the original context are slowed by the whole
      factor, those that turn `high_turns` times or more by none.
  """

  base: PositiveFloat = 10_000.0
  share: Fraction = 1.0
  factor: Factor = 1.0
  original_context: PositiveInt = 8192
  low_turns: NonNegativeFloat = 1.0
  high_turns: NonNegativeFloat = 4.0

  def __post_init__(self):
    is_ordered = 0 < self.low_turns < self.high_turns
    is_base = self.base > 1 and self.factor >= 1
    if not is_base or not is_ordered:
      raise ConfigurationError(
        f'Rotary has base={self.base:g}, factor={self.factor:g}, low_turns={self.low_turns:g} and '
        f'high_turns={self.high_turns:g}. Use a base above 1, a factor of 1 or more, and low_turns '
        'above 0 and below high_turns.'
      )

  def frequencies(self, width: int) -> np.ndarray:
    """Radians a token of heads of K = `width`, [R/2] in float64."""
    pairs = int(self.share * width) // 2
    exponents = np.arange(pairs) / pairs
    plain = self.base**-exponents
    turns = self.original_context * plain / (2 * np.pi)
    kept = (turns - self.low_turns) / (self.high_turns - self.low_turns)
    kept = np.clip(kept, 0, 1)  # the share of the plain frequency; the factor slows the rest
    slowed = (1 - kept) / self.factor
    return plain * (kept + slowed)

  def angles(self, length: int, width: int, step: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, R/2] of the angles at coordinates 0, step, 2 step, ..., in float64."""
    coordinates = step * np.arange(length)
    frequencies = self.frequencies(width)
    angle = coordinates[:, None] * frequencies
    return np.cos(angle), np.sin(angle)


def rotate(x: Array, cos: Array | np.ndarray, sin: Array | np.ndarray) -> Array:
  """Rotates the first R channels of x [B, S, ..., K] by angles [S, R/2], or [B, S, R/2].

  A single row of angles, S = 1, puts all of x at one coordinate.
  """
  count = 2 * cos.shape[-1]
  if count < x.shape[-1]:
    channels, others = jnp.split(x, [count], axis=-1)
    turned = rotate(channels, cos, sin)
    return jnp.concatenate([turned, others], axis=-1)
  # Pair i is the channels i and R/2 + i, turned as (a + ib) e^(i angle).
  dtype = wide(x.dtype)
  first, second = jnp.split(x.astype(dtype), 2, axis=-1)

  def broadcast(angle):
    size, pairs = angle.shape[-2:]
    rows = angle.shape[:-2] or (1,)
    heads = (1,) * (x.ndim - 3)
    shape = (*rows, size, *heads, pairs)
    return jnp.asarray(angle, dtype).reshape(shape)

  c = broadcast(cos)
  s = broadcast(sin)
  real = first * c - second * s
  imaginary = second * c + first * s
  turned = jnp.concatenate([real, imaginary], axis=-1)
  return turned.astype(x.dtype)
