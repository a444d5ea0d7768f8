"""The keys and values of a document, in slots that the devices of a chunk share.

Token number t of a row, without padding, has slot t modulo the number of slots: a ring, in which
each token replaces the oldest one. So no key moves, and the carry is the same under every layout.
Under sequence parallelism each device holds a run of the slots. The keys are many, so the queries
of a chunk go to them: every device reads all queries of the chunk with the keys that it holds, its
slots and its own piece, and the results are added where the queries came from. These messages grow
with the chunk, and not with the document.

Keys are carried unrotated, and rotated by their places before the chunk, so that no angle grows
with a document.
"""

import functools
from typing import NamedTuple, TypeVar

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from valkyrie.models.attention import blocks
from valkyrie.models.attention.blocks import Keys, Marks
from valkyrie.models.attention.kv_cache import KVCache
from valkyrie.models.attention.rotary import Rotary, rotate
from valkyrie.models.attention.softmax import Dropout
from valkyrie.models.precision import wide
from valkyrie.sharding import messages, sequence_parallel
from valkyrie.sharding.sequence_parallel import OverTime
from valkyrie.types import Array, DType

T = TypeVar('T')

_TABLE = 1024  # the places of a table of angles; two tables give all angles


class DocumentCache(NamedTuple):
  """The last tokens of a row, and the slot int32 [B] of its next token.

  In a model its arrays are stacked over layers. It is `rewinding.Rewindable`, and on one device
  `kept_carries.TokenSlots`.
  """

  slots: OverTime  # of a KVCache
  following: Array

  def replaced_by(self, tokens: int) -> 'DocumentCache':
    """The next slots, of so many tokens; each device holds its share."""
    at = _slots_of_chunk(self.slots, self.following, tokens)
    axis = at.ndim - 1

    def read(held):
      by_slot = jnp.expand_dims(at, range(at.ndim, held.ndim))
      found = jnp.take_along_axis(held, by_slot, axis, mode='fill', fill_value=0)
      return _share(found, axis)

    return DocumentCache(jax.tree.map(read, self.slots), self.following)

  def put_back(self, replaced: 'DocumentCache') -> 'DocumentCache':
    """The cache before the tokens for which `replaced_by` gave these slots."""
    tokens = replaced.slots.content.segment_ids.shape[-1]
    at = _slots_of_chunk(self.slots, replaced.following, tokens)

    def write(held, share):
      return _written(held, at, _of_chunk(share, at.ndim - 1))

    slots = jax.tree.map(write, self.slots, replaced.slots)
    return DocumentCache(slots, replaced.following)

  @property
  def capacity(self) -> int:
    return self.slots.content.segment_ids.shape[-1]

  def after_first(self, tokens: Array) -> 'DocumentCache':
    """The cache after the first tokens [B] of the rows, if it has replaced none of them."""
    slots = self.capacity
    is_kept = jnp.arange(slots)[None] < tokens[:, None]

    def first(held):
      others = range(is_kept.ndim, held.ndim - self.following.ndim + 1)
      by_slot = jnp.expand_dims(is_kept, others)
      return jnp.where(by_slot, held, jnp.zeros_like(held))

    following = jnp.broadcast_to(tokens % slots, self.following.shape)
    return DocumentCache(jax.tree.map(first, self.slots), following)


def empty_cache(
  batch_size: int,
  slots: int,
  kv_heads: int,
  head_width: int,
  dtype: DType,
) -> DocumentCache:
  """The cache before a row's first token."""
  zeros = jnp.zeros((batch_size, slots, kv_heads, head_width), dtype)
  no_documents = jnp.zeros((batch_size, slots), jnp.int32)
  tokens = KVCache(zeros, zeros, no_documents)
  first_slot = jnp.zeros((batch_size,), jnp.int32)
  return DocumentCache(OverTime(tokens), first_slot)


@jax.named_scope('attention')
def attend(
  form: blocks.Form,
  rotary: Rotary,
  q: Array,
  tokens: KVCache,
  cache: DocumentCache | tuple[()],
  dropout: Dropout | None = None,
) -> tuple[Array, DocumentCache | tuple[()]]:
  """Causal attention of a token to its document, in the cache and in the chunk.

  Args:
    q: [B, T, H, K], unrotated; of this device's piece, as the tokens.
    tokens: the keys and values of the queries' tokens.
    cache: of the chunk before; () for chunks that are read alone.

  Returns:
    (out [B, T, H, K], the cache after the last token that is not padding).
  """
  devices, device = _place()
  slots = 0
  if cache:
    slots = cache.slots.content.segment_ids.shape[1] * devices
  # Places count from the oldest token that the slots can hold.
  time, _, width = q.shape[1:]
  piece = slots + device * time + jnp.arange(time)[None]
  places_of_rows = jnp.broadcast_to(piece, tokens.segment_ids.shape)
  marks = Marks(tokens.segment_ids, places_of_rows)
  turned = functools.partial(_turned, rotary, slots + devices * time)
  scaled = q * width**-0.5
  queries = _of_chunk((turned(scaled, piece), marks))
  keys = Keys(turned(tokens.keys, piece), tokens.values, marks)
  after = ()
  if cache:
    held = cache.slots.content
    held_count = held.segment_ids.shape[1]
    number = device * held_count + jnp.arange(held_count)[None]
    following = _of_first_device(cache.following)
    places = (number - following[:, None]) % slots
    old_keys = held.keys.astype(q.dtype)
    old_values = held.values.astype(q.dtype)
    marks = Marks(held.segment_ids, places)
    before = Keys(turned(old_keys, places), old_values, marks)
    keys = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), before, keys)
    after = _advanced(held, tokens, following, number[0, 0], slots)
  out, log_total = blocks.attend(form, *queries, keys, dropout)
  joined = _over_devices(out, log_total)
  return joined.astype(q.dtype), after


def in_order(
  cache: DocumentCache | tuple[()], tokens: KVCache
) -> tuple[KVCache, KVCache, Array | int]:
  """What the tokens of this device's piece of a chunk may read, on every device.

  Returns:
    (the carried tokens, the oldest first; the tokens of the chunk; the place of the piece in it).
  """
  _, device = _place()
  first = device * tokens.segment_ids.shape[1]
  chunk = _of_chunk(tokens)
  if not cache:
    return tokens.first(0), chunk, first
  held = _of_chunk(cache.slots.content)
  slots = held.segment_ids.shape[1]
  oldest_first = (_of_first_device(cache.following)[:, None] + jnp.arange(slots)[None]) % slots
  take = jax.vmap(lambda of_row, order: of_row[order])
  before = jax.tree.map(lambda leaf: take(leaf, oldest_first), held)
  return before, chunk, first


def _slots_of_chunk(slots: OverTime, following: Array, tokens: int) -> Array:
  """Where this device has the slots of a chunk whose first one is `following`, [..., B, N].

  The places are beyond the end of `slots` where another device has them.
  """
  devices, device = _place()
  held = slots.content.segment_ids.shape[-1]
  first = _of_first_device(following)
  count = min(tokens, held) * devices
  token = jnp.expand_dims(jnp.arange(count), range(first.ndim))
  slot = (first[..., None] + token) % (held * devices)
  at = slot - device * held
  is_held = (at >= 0) & (at < held)
  return jnp.where(is_held, at, held + token)


def _place() -> tuple[int, Array | int]:
  """(how many devices share a chunk, the number of this one)."""
  if not sequence_parallel.axes():
    return 1, 0
  return sequence_parallel.size(), sequence_parallel.index()


def _of_first_device(following: Array) -> Array:
  """The next slot, whose carry counts on the first device."""
  if not sequence_parallel.axes():
    return following
  is_first = sequence_parallel.index() == 0
  return sequence_parallel.broadcast_from(following, is_first)


def _of_chunk(tree: T, axis: int = 1) -> T:
  """The arrays of all pieces of the chunk, joined along time."""
  axes = sequence_parallel.axes()
  if not axes:
    return tree
  return jax.tree.map(lambda x: messages.all_gather(x, axes, axis), tree)


def _share(x: Array, axis: int) -> Array:
  """This device's piece, bit for bit, of slots: one device has each slot, and the others 0."""
  axes = sequence_parallel.axes()
  if not axes:
    return x
  return messages.bit_for_bit(lambda bits: messages.reduce_scatter(bits, axes, axis), x)


def _over_devices(out: Array, log_total: Array) -> Array:
  """The softmax over the keys of all devices, for the queries of this device's piece."""
  axes = sequence_parallel.axes()
  if not axes:
    return out
  largest = lax.pmax(lax.stop_gradient(log_total), axes)
  share = jnp.exp(log_total - largest)
  total = messages.reduce_scatter(share, axes, 1)
  weighted = messages.reduce_scatter(share * out, axes, 1)
  return weighted / total


def _advanced(
  held: KVCache,
  tokens: KVCache,
  following: Array,
  first: Array,
  slots: int,
) -> DocumentCache:
  """The cache after the chunk; this device holds its slots from `first` on."""
  size = held.segment_ids.shape[1]
  chunk = _of_chunk(tokens)
  is_token = chunk.segment_ids > 0
  length = jnp.sum(is_token, axis=1, dtype=jnp.int32)[:, None]
  token = np.arange(chunk.segment_ids.shape[1], dtype=np.int32)[None]
  at = (following[:, None] + token) % slots - first
  is_last = (token < length) & (token >= length - slots)
  is_held = (at >= 0) & (at < size)
  kept = is_last & is_held
  at = jnp.where(kept, at, size + token)  # beyond the end, and different

  def write(old, new):
    return _written(old, at, new)

  after = jax.tree.map(write, held, chunk)
  next_slot = (following + length[:, 0]) % slots
  return DocumentCache(OverTime(after), next_slot)


def _written(held: Array, at: Array, new: Array) -> Array:
  """held [..., N, *], with new [..., M, *] at different places [..., M]; beyond N, none is kept."""

  def write(held, at, new):
    narrow = new.astype(held.dtype)
    return held.at[at].set(narrow, mode='drop', unique_indices=True)

  for _ in range(at.ndim - 1):
    write = jax.vmap(write)
  return write(held, at, new)


def _turned(rotary: Rotary, most: int, x: Array, places: Array) -> Array:
  """x [B, N, ..., K], rotated by places int32 [B, N], or [1, N], below `most`."""
  cos, sin = angles_at(rotary, most, x.shape[-1], x.dtype, places)
  return rotate(x, cos, sin)


def angles_at(
  rotary: Rotary,
  most: int,
  width: int,
  dtype: DType,
  places: Array,
) -> tuple[Array, Array]:
  """cos and sin [B, N, K/2] at these places, each below `most`.

  From two tables in float64: an angle of a product in float32 would be wrong by 0.06 at a million.
  """
  coarse, fine = jnp.divmod(places, _TABLE)

  def rows(table, at):
    return jnp.asarray(table, wide(dtype))[at]

  coarse_count = -(-most // _TABLE)
  coarse_cos_table, coarse_sin_table = rotary.angles(coarse_count, width, _TABLE)
  coarse_cos = rows(coarse_cos_table, coarse)
  coarse_sin = rows(coarse_sin_table, coarse)
  fine_cos_table, fine_sin_table = rotary.angles(_TABLE, width)
  fine_cos = rows(fine_cos_table, fine)
  fine_sin = rows(fine_sin_table, fine)
  cos = coarse_cos * fine_cos - coarse_sin * fine_sin
  sin = coarse_sin * fine_cos + coarse_cos * fine_sin
  return cos, sin
