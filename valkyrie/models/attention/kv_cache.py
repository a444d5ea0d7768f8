"""What causal attention remembers of a row from chunk to chunk: bounded, and unrotated."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.types import Array, DType


class Memory(NamedTuple):
  """Keys and values [B, N, J, K] of tokens, unrotated, and the documents that they belong to.

  segment_ids: int32 [B, N]; 0 where there is no token yet.
  """

  keys: Array
  values: Array
  segment_ids: Array

  def of(self, heads: slice) -> 'Memory':
    """What some of the heads remember."""
    return Memory(self.keys[:, :, heads], self.values[:, :, heads], self.segment_ids)


class AttentionCarry(NamedTuple):
  """What attention remembers of a row.

  window: its last tokens, oldest first: W times the largest dilation of them.
  starts: in slot j of g, token j of a document.
  """

  window: Memory
  starts: Memory


def empty_carry(
  batch_size: int, window: int, starts: int, kv_heads: int, head_width: int, dtype: DType
) -> AttentionCarry:
  """The carry before a row's first token."""

  def empty(slots: int) -> Memory:
    nothing = jnp.zeros((batch_size, slots, kv_heads, head_width), dtype)
    return Memory(nothing, nothing, jnp.zeros((batch_size, slots), jnp.int32))

  return AttentionCarry(empty(window), empty(starts))


def slide(window: Memory, tokens: Memory, length: Array) -> Memory:
  """The window after the first `length` [B] of the tokens."""
  slots = window.segment_ids.shape[1]

  def move(old, new):
    both = jnp.concatenate([old, new], axis=1)
    return jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, slots))(both, length)

  return jax.tree.map(move, window, tokens)


def starts_before(starts: Memory, tokens: Memory, positions: Array, ends: Array) -> Memory:
  """The document starts as they stand before each of the tokens `ends` [B, N]: [B, N, g, ...].

  The document of the token before stands `position` further back: its first tokens are among the
  tokens given, or, where it is older than they are, in what was carried.
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
  """Which slots stand before each of the tokens `ends` [B, N] as they were carried: [B, N, g]."""
  at, _ = _first_tokens(positions, ends, slots)
  return (at < 0) | (ends == 0)[..., None]


def _first_tokens(positions: Array, ends: Array, slots: int) -> tuple[Array, Array]:
  """Of the document before each `ends`: where its first tokens are [B, N, g], and how far it is."""
  last = jnp.maximum(ends - 1, 0)
  position = jnp.take_along_axis(positions, last, axis=1)
  return (last - position)[..., None] + np.arange(slots)[None, None], position
