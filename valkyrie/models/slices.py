"""Slices of time of one length, for loops that process a few slices at once."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.types import Array

# The logits computed at once: 2^22 float32 are 16 MiB. Fewer would cost more dispatches of small
# operations; more would not fit in caches.
LOGITS_AT_ONCE = 2**22


def cut(x: Array, size: int) -> Array:
  """[B, T, ...] -> [N, B, size, ...] with N x size at least T; zeros fill the last slice."""
  padded = _padded(x, size)
  batch, time, *rest = padded.shape
  by_slice = padded.reshape(batch, time // size, size, *rest)
  return jnp.moveaxis(by_slice, 1, 0)


def overlapping(x: Array, size: int, width: int) -> Array:
  """[B, (N + width - 1) x size, ...] -> [N, B, width x size, ...], each `size` after the last."""
  padded = _padded(x, size)
  count = padded.shape[1] // size - width + 1
  if count < width:  # the fewer slices to trace
    begins = [n * size for n in range(count)]
    return jnp.stack([padded[:, begin : begin + width * size] for begin in begins])
  # The slices overlap in memory of their own, so that their reader needs no sequential loop.
  one = cut(padded, size)
  return jnp.concatenate([one[j : j + count] for j in range(width)], axis=2)


def _padded(x: Array, size: int) -> Array:
  """Zeros after the last time step, to a multiple of `size`."""
  missing = -x.shape[1] % size
  whole = [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, [(0, 0), (0, missing), *whole])


def join(slices: Array, time: int) -> Array:
  """[N, B, size, ...] -> [B, time, ...]: the inverse of `cut`, without the padding."""
  count, batch, size, *rest = slices.shape
  by_row = jnp.moveaxis(slices, 0, 1)
  return by_row.reshape(batch, count * size, *rest)[:, :time]


def split_residues(x: Array, dilation: int) -> Array:
  """[B, T, ...] -> [B · d, ceil(T / d), ...]: a row for each residue of time modulo d, zero-padded.

  Tokens at distances that d divides share a residue: a dilated window is undilated in these rows.
  """
  steps = cut(x, dilation)
  by_residue = jnp.moveaxis(steps, 0, 2)
  return by_residue.reshape(-1, len(steps), *x.shape[2:])


def merge_residues(x: Array, dilation: int, time: int) -> Array:
  """[B · d, ceil(T / d), ...] -> [B, T, ...]: the inverse of `split_residues`."""
  by_residue = x.reshape(-1, dilation, *x.shape[1:])
  return join(jnp.moveaxis(by_residue, 2, 0), time)


def for_each(fn: Callable[[Any], Any], slices: Any, logits: int) -> Any:
  """`fn` of each slice, leaves [N, ...] -> [N, ...]; one slice needs `logits` logits."""
  count = jax.tree.leaves(slices)[0].shape[0]
  at_once = max(1, LOGITS_AT_ONCE // logits)
  return lax.map(fn, slices, batch_size=min(at_once, count))
