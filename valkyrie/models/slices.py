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
  count = time // size
  by_slice = padded.reshape(batch, count, size, *rest)
  return jnp.moveaxis(by_slice, 1, 0)


def overlapping(x: Array, size: int, width: int) -> Array:
  """[B, (N + width - 1) x size, ...] -> [N, B, width x size, ...], each `size` after the last."""
  padded = _padded(x, size)
  steps = padded.shape[1] // size
  count = steps - width + 1
  if count < width:  # the fewer slices to trace
    length = width * size
    wide_slices = []
    for number in range(count):
      begin = number * size
      end = begin + length
      wide_slices.append(padded[:, begin:end])
    return jnp.stack(wide_slices)
  # The slices overlap in memory of their own, so that their reader needs no sequential loop.
  narrow_slices = cut(padded, size)
  parts = []
  for first in range(width):
    last = first + count
    parts.append(narrow_slices[first:last])
  return jnp.concatenate(parts, axis=2)


def _padded(x: Array, size: int) -> Array:
  """Zeros after the last time step, to a multiple of `size`."""
  missing = -x.shape[1] % size
  padding = [(0, 0)] * x.ndim
  padding[1] = (0, missing)
  return jnp.pad(x, padding)


def join(slices: Array, time: int) -> Array:
  """[N, B, size, ...] -> [B, time, ...]: the inverse of `cut`, without the padding."""
  count, batch, size, *rest = slices.shape
  by_row = jnp.moveaxis(slices, 0, 1)
  padded_time = count * size
  joined = by_row.reshape(batch, padded_time, *rest)
  return joined[:, :time]


def split_residues(x: Array, dilation: int) -> Array:
  """[B, T, ...] -> [B · d, ceil(T / d), ...]: a row for each residue of time modulo d, zero-padded.

  Tokens at distances that d divides share a residue: a dilated window is undilated in these rows.
  """
  steps = cut(x, dilation)
  count = len(steps)
  by_residue = jnp.moveaxis(steps, 0, 2)
  rest = x.shape[2:]
  return by_residue.reshape(-1, count, *rest)


def merge_residues(x: Array, dilation: int, time: int) -> Array:
  """[B · d, ceil(T / d), ...] -> [B, T, ...]: the inverse of `split_residues`."""
  _, *steps_and_rest = x.shape
  by_residue = x.reshape(-1, dilation, *steps_and_rest)
  steps = jnp.moveaxis(by_residue, 2, 0)
  return join(steps, time)


def for_each(fn: Callable[[Any], Any], slices: Any, logits: int) -> Any:
  """`fn` of each slice, leaves [N, ...] -> [N, ...]; one slice needs `logits` logits."""
  leaves = jax.tree.leaves(slices)
  count = len(leaves[0])
  at_once = max(1, LOGITS_AT_ONCE // logits)
  batch_size = min(at_once, count)
  return lax.map(fn, slices, batch_size=batch_size)
