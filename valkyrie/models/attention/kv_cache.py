"""The carry of causal attention: bounded KV caches of unrotated keys."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.types import Array, DType


class KVCache(NamedTuple):
  """Keys and values [B, N, J, K] of N tokens, unrotated, and the documents that they belong to.

  segment_ids: int32 [B, N]; 0 in an empty slot.
  """

  keys: Array
  values: Array
  segment_ids: Array

  def of_heads(self, heads: slice) -> 'KVCache':
    """The cache of some of the heads."""
    return KVCache(self.keys[:, :, heads], self.values[:, :, heads], self.segment_ids)


class AttentionCarry(NamedTuple):
  """The carry of a row.

  window: its last W times the largest dilation tokens, oldest first.
  starts: slot j of g holds token j of the current document.
  """

  window: KVCache
  starts: KVCache


def empty_carry(
  batch_size: int, window: int, starts: int, kv_heads: int, head_width: int, dtype: DType
) -> AttentionCarry:
  """The carry before a row's first token."""

  def empty(slots: int) -> KVCache:
    zeros = jnp.zeros((batch_size, slots, kv_heads, head_width), dtype)
    return KVCache(zeros, zeros, jnp.zeros((batch_size, slots), jnp.int32))

  return AttentionCarry(empty(window), empty(starts))


def slide_window(window: KVCache, tokens: KVCache, length: Array) -> KVCache:
  """The window after the first `length` [B] of the tokens."""
  slots = window.segment_ids.shape[1]

  def slide(old, new):
    both = jnp.concatenate([old, new], axis=1)
    return jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, slots))(both, length)

  return jax.tree.map(slide, window, tokens)


def starts_before(starts: KVCache, tokens: KVCache, positions: Array, ends: Array) -> KVCache:
  """The document starts as they stand before each of the tokens `ends` [B, N]: [B, N, g, ...].

  The document of the token before starts `position` tokens further back. Its first tokens are
  among the given tokens, or in the carried starts if the document is older than the chunk.
  """
  slots = starts.segment_ids.shape[1]
  at, position = _first_tokens(positions, ends, slots)
  carried = starts_carried(positions, ends, slots)
  reached = np.arange(slots)[None, None] <= position[..., None]

  def pick(old, new):
    found = jax.vmap(lambda row, tokens: jnp.take(row, tokens, axis=0, mode='clip'))(new, at)
    shape = (*at.shape, *(1,) * (new.ndim - 2))
    found = jnp.where(reached.reshape(shape), found, jnp.zeros_like(found))
    return jnp.where(carried.reshape(shape), old[:, None], found)

  return jax.tree.map(pick, starts, tokens)


def starts_carried(positions: Array, ends: Array, slots: int) -> Array:
  """The slots that are still the carried ones before each of the tokens `ends`: bool [B, N, g]."""
  at, _ = _first_tokens(positions, ends, slots)
  return (at < 0) | (ends == 0)[..., None]


def _first_tokens(positions: Array, ends: Array, slots: int) -> tuple[Array, Array]:
  """(indices [B, N, g] of the first tokens of the document before each of `ends`, its position)."""
  last = jnp.maximum(ends - 1, 0)
  position = jnp.take_along_axis(positions, last, axis=1)
  return (last - position)[..., None] + np.arange(slots)[None, None], position
