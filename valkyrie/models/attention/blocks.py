"""Softmax attention to many keys, one block of keys after the other.

A slice of queries reads the blocks in their order, and joins what it reads by the logarithms of the
denominators (Milakov and Gimelshein 2018; Dao et al. 2022, FlashAttention). So memory does not grow
with queries x keys. A block in which no query of a slice sees a key costs only its mask: packed
documents, and a cache that is still empty, are cheap.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from valkyrie.models import slices
from valkyrie.models.attention import cudnn, softmax
from valkyrie.models.attention.kernels import LANES
from valkyrie.models.attention.softmax import MASKED, Dropout, Part
from valkyrie.models.precision import wide
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array

# The scope of a conditional whose larger branch is the usual one; certificates count that one.
LARGER_BRANCH = 'larger_branch'


class Form(NamedTuple):
  """A query sees a key of its document that is `reach` - 1 tokens or less before it.

  S = `slice_size` queries are read at once, or as many as suit cuDNN's kernel if `by_kernel`.
  """

  reach: int
  slice_size: int
  by_kernel: bool = False


class Marks(NamedTuple):
  """The documents of tokens, and their places in the row from any origin: int32 [B, N] each."""

  segment_ids: Array
  places: Array


class Keys(NamedTuple):
  """Keys and values [B, N, J, K], and what is known of their tokens."""

  k: Array
  v: Array
  marks: Any  # None in a cotangent


class _Block(NamedTuple):
  number: Array
  keys: Array  # [B, J, size, K]
  values: Array
  marks: Marks


class _Slice(NamedTuple):
  number: Array
  q: Array  # [B, J, H/J · S, K]
  marks: Marks


def attend(
  form: Form,
  q: Array,
  queries: Marks,
  keys: Keys,
  dropout: Dropout | None,
) -> tuple[Array, Array]:
  """Attention of q [B, T, H, K] to the keys; q is scaled, and both are rotated.

  Returns:
    (out [B, T, H, K], the logarithm of the softmax's denominator [B, T, H, 1]), both wide. For a
    query that sees no key the first is finite and meaningless, and the second is about `MASKED`.
  """
  return _attend(form, q, queries, keys, dropout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form, *arrays):
  results, _ = _forward(form, *arrays)
  return results


def _forward(
  form,
  q,
  queries,
  keys,
  dropout,
):
  blocks = _blocks_of(form, q, keys)
  read = functools.partial(_read_blocks, form, blocks, dropout)
  by_slice = _slices_of(form, q, keys, queries)
  out, log_total = lax.map(read, by_slice)
  out = checkpoint_name(out, 'attention')
  log_total = checkpoint_name(log_total, 'attention')
  joined = (_joined(out, q), _joined(log_total, q))
  residuals = (q, queries, keys, dropout, out, log_total)
  return joined, residuals


def _backward(form, residuals, gradients):
  q, queries, keys, dropout, *results = residuals
  blocks = _blocks_of(form, q, keys)
  by_slice = tuple(_grouped(form, gradient, keys) for gradient in gradients)
  dtype = wide(q.dtype)
  nothing = jnp.zeros(blocks.keys.shape, dtype)

  def of_slice(sums, given):
    one, of_forward, of_results = given

    def of_block(d_q, given):
      block, *so_far = given
      part = _part(form, one, block)
      draws = _draws(dropout, one, block)

      def add(sums):
        of_parts = ((part,), draws, *of_forward)
        (more,), _ = _rule(form).attend_backward(of_parts, of_results)
        d_q, d_k, d_v, _ = more
        cotangents = (d_q, d_k, d_v)
        return tuple(total + x.astype(dtype) for total, x in zip(sums, cotangents, strict=True))

      d_q, *d_block = _if_any(part.mask, add, (d_q, *so_far))
      return d_q, d_block

    no_gradient = jnp.zeros(one.q.shape, dtype)
    d_q, sums = lax.scan(of_block, no_gradient, (blocks, *sums))
    return sums, d_q

  inputs = (_slices_of(form, q, keys, queries), tuple(results), by_slice)
  d_blocks, d_q = lax.scan(of_slice, [nothing, nothing], inputs)
  key_count = keys.k.shape[1]

  def by_token(d_block):
    by_head = jnp.swapaxes(d_block, 2, 3)
    return slices.join(by_head, key_count)

  d_k, d_v = map(by_token, d_blocks)
  d_keys = Keys(d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype), None)
  return _joined(d_q, q).astype(q.dtype), None, d_keys, None


_attend.defvjp(_forward, _backward)


def _read_blocks(form: Form, blocks: _Block, dropout: Dropout | None, one: _Slice) -> Any:
  """A slice of queries over all blocks -> (out, the logarithm of the denominator)."""

  def read(so_far, block):
    part = _part(form, one, block)
    draws = _draws(dropout, one, block)

    def join(so_far):
      out, log_total = so_far
      more, log_more = _rule(form).attend((part,), draws)
      log_both = jnp.logaddexp(log_total, log_more)
      share = jnp.exp(log_total - log_both)
      share_of_more = jnp.exp(log_more - log_both)
      both = share * out + share_of_more * more
      return both, log_both

    return _if_any(part.mask, join, so_far), None

  dtype = wide(one.q.dtype)
  *leading, _ = one.q.shape
  no_value = jnp.zeros(one.q.shape, dtype)
  no_key = jnp.full((*leading, 1), MASKED, dtype)
  so_far, _ = lax.scan(read, (no_value, no_key), blocks)
  return so_far


def _rule(form: Form) -> Any:
  """The module that attends to a block."""
  return cudnn if form.by_kernel else softmax


def _if_any(mask: Array, add: Any, so_far: Any) -> Any:
  """`add` of what was read so far, if a query sees a key."""
  with jax.named_scope(LARGER_BRANCH):
    return lax.cond(jnp.any(mask), add, lambda unchanged: unchanged, so_far)


def _part(form: Form, one: _Slice, block: _Block) -> Part:
  """What a slice of queries reads of a block."""
  marks = one.marks
  if platform() == 'tpu':
    # One mask serves the heads of a group, but a TPU would write it for each of them, which is 40%
    # of the time of attention: it compares the marks of each instead.
    heads = one.q.shape[2] // marks.places.shape[1]
    marks = jax.tree.map(lambda x: jnp.tile(x, (1, heads)), marks)
  mask = _visible(form, marks, block.marks)
  return Part(one.q, block.keys, block.values, mask)


def _visible(form: Form, queries: Marks, keys: Marks) -> Array:
  distance = queries.places[:, :, None] - keys.places[:, None]
  inside = (distance >= 0) & (distance < form.reach)
  return inside & softmax.same_document(queries.segment_ids, keys.segment_ids)


def _draws(dropout: Dropout | None, one: _Slice, block: _Block) -> Dropout | None:
  if dropout is None:
    return None
  of_slice = dropout.of(one.number)
  return of_slice.of(block.number)


def _sizes(form: Form, q: Array, total: int) -> tuple[int, int]:
  """(queries of a slice, keys of a block) of so many keys."""
  batch, time, heads, _ = q.shape
  if not form.by_kernel:
    queries = min(form.slice_size, time)
    logits = slices.LOGITS_AT_ONCE
    if platform() == 'tpu':
      logits *= 2  # a core's memory holds them, and each block reads and writes the results so far
    return queries, _size(total, logits // (batch * queries * heads))
  # A kernel writes no logits, but for each block it reads a mask, all queries, and their results so
  # far: squares need the fewest bytes.
  pairs = cudnn.PAIRS_AT_ONCE // batch
  queries = _size(time, math.isqrt(pairs), LANES)
  return queries, _size(total, pairs // queries, LANES)


def _size(total: int, most: int, multiple: int = 1) -> int:
  """The size of the fewest equal parts of `most` or less, rounded up to a multiple."""
  count = -(-total // max(1, most))
  size = -(-total // count)
  return -(-size // multiple) * multiple


def _blocks_of(form: Form, q: Array, keys: Keys) -> _Block:
  total = keys.k.shape[1]
  _, size = _sizes(form, q, total)
  count = -(-total // size)
  k, v, marks = jax.tree.map(lambda x: slices.cut(x, size), keys)
  by_head = (jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3))
  return _Block(jnp.arange(count), *by_head, marks)


def _slices_of(form: Form, q: Array, keys: Keys, queries: Marks) -> _Slice:
  size, _ = _sizes(form, q, keys.k.shape[1])
  marks = jax.tree.map(lambda x: slices.cut(x, size), queries)
  numbers = jnp.arange(len(marks.places))
  return _Slice(numbers, _grouped(form, q, keys), marks)


def _grouped(form: Form, x: Array, keys: Keys) -> Array:
  """[B, T, H, ...] -> slices [N, B, J, H/J · S, ...]."""
  _, total, kv_heads, _ = keys.k.shape
  group = functools.partial(softmax.group_queries, kv_heads=kv_heads)
  size, _ = _sizes(form, x, total)
  by_slice = slices.cut(x, size)
  return jax.vmap(group)(by_slice)


def _joined(x: Array, q: Array) -> Array:
  """The inverse of `_grouped`, for the heads and the tokens of q."""
  ungroup = functools.partial(softmax.ungroup_queries, heads=q.shape[2])
  by_slice = jax.vmap(ungroup)(x)
  return slices.join(by_slice, q.shape[1])
