"""Rotary positions (Su et al. 2021, RoFormer) at coordinates local to a slice.

A score depends on the distance of two tokens alone, so coordinates may count from anywhere. No
angle grows with the length of a document, and none loses precision.
"""

import jax.numpy as jnp
import numpy as np

from valkyrie.types import Array, DType


def wide(x: Array) -> DType:
  """The dtype of rotation, logits and softmax: float32, or x's own if that is wider."""
  return jnp.promote_types(x.dtype, jnp.float32)


def angles(length: int, width: int, step: int = 1) -> tuple[np.ndarray, np.ndarray]:
  """cos and sin [length, K/2] of the angles at coordinates 0, step, 2 step, ..., in float64."""
  frequency = 10_000.0 ** -(np.arange(width // 2) / (width // 2))
  angle = step * np.arange(length)[:, None] * frequency
  return np.cos(angle), np.sin(angle)


def rotate(x: Array, cos: Array | np.ndarray, sin: Array | np.ndarray) -> Array:
  """Rotates the halves of x [B, S, ..., K] by the angles of each position [S, K/2], or [B, S, K/2].

  A single row of angles, S = 1, puts all of x at one coordinate.
  """
  first, second = jnp.split(x.astype(wide(x)), 2, axis=-1)

  def broadcast(angle):
    rows = angle.shape[0] if angle.ndim == 3 else 1
    heads = (1,) * (x.ndim - 3)
    return jnp.asarray(angle, first.dtype).reshape(rows, angle.shape[-2], *heads, angle.shape[-1])

  c, s = broadcast(cos), broadcast(sin)
  rotated = jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)
  return rotated.astype(x.dtype)
