"""Time cut into slices of one length, for loops that hold one slice at once."""

import jax.numpy as jnp

from valkyrie.types import Array


def cut(x: Array, size: int) -> Array:
  """[B, T, ...] -> [N, B, size, ...] with N x size at least T; zeros fill the last slice."""
  batch, time, *rest = x.shape
  count = -(-time // size)
  padded = jnp.pad(x, ((0, 0), (0, count * size - time)) + ((0, 0),) * len(rest))
  return jnp.moveaxis(padded.reshape(batch, count, size, *rest), 1, 0)


def join(slices: Array, time: int) -> Array:
  """[N, B, size, ...] -> [B, time, ...]: the inverse of `cut`, without what filled the end."""
  count, batch, size, *rest = slices.shape
  return jnp.moveaxis(slices, 0, 1).reshape(batch, count * size, *rest)[:, :time]
