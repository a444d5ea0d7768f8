"""Softmax attention of a slice of queries, over keys in several parts.

The keys of a part are scored in one way: a window at its true distances, or global tokens, all at
one distance. All parts of a query share one softmax. The backward pass is written out: it keeps
only the outputs of a slice, and draws dropout again from its key.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from valkyrie.models.precision import wide
from valkyrie.types import Array

MASKED = -1e30  # finite, so that a masked logit has a gradient of zero and not of NaN


class Dropout(NamedTuple):
  """Zeroes each attention weight with probability `rate`, after the softmax."""

  key: Array
  rate: float

  def of(self, part: Array | int) -> 'Dropout':
    """The dropout of one part of the keys, or of one slice: independent of the others."""
    key = jax.random.fold_in(self.key, part)
    return Dropout(key, self.rate)

  def __call__(self, weights: Array) -> Array:
    kept_share = 1 - self.rate
    is_kept = jax.random.bernoulli(self.key, kept_share, weights.shape)
    scaled = weights / kept_share
    return jnp.where(is_kept, scaled, 0)


class Part(NamedTuple):
  """Queries [B, J, Q, K], keys and values [B, J, N, K], and the mask [B, S, N] of visible keys.

  The Q queries of a head group belong to its first head, then to the next. One mask of S tokens
  serves all, or S is Q, and each has its own.
  """

  q: Array
  k: Array
  v: Array
  mask: Any  # bool; None in a cotangent

  @classmethod
  def of(
    cls,
    q: Array,
    k: Array,
    v: Array,
    mask: Any,
  ) -> 'Part':
    """The part of queries [B, S, H, K] and of keys and values [B, N, J, K]."""
    queries = group_queries(q, k.shape[2])
    keys = jnp.swapaxes(k, 1, 2)
    values = jnp.swapaxes(v, 1, 2)
    return cls(queries, keys, values, mask)


def same_document(queries: Array, keys: Array) -> Array:
  """Whether each of the queries, segment_ids [B, S], and each of the keys [B, N] share a document.

  bool [B, S, N].
  """
  query_documents = queries[:, :, None]
  key_documents = keys[:, None]
  return query_documents == key_documents


def group_queries(q: Array, kv_heads: int) -> Array:
  """[B, S, H, K] -> [B, J, H/J · S, K]: the layout of queries in a `Part`."""
  batch, size, heads, width = q.shape
  by_token = q.reshape(batch, size, kv_heads, heads // kv_heads, width)
  by_group = jnp.einsum('bsjgk->bjgsk', by_token)
  return by_group.reshape(batch, kv_heads, -1, width)


def ungroup_queries(out: Array, heads: int) -> Array:
  """[B, J, H/J · S, K] -> [B, S, H, K]: the inverse of `group_queries`."""
  batch, kv_heads, queries, width = out.shape
  group = heads // kv_heads
  size = queries // group
  grouped = out.reshape(batch, kv_heads, group, size, width)
  by_token = jnp.einsum('bjgsk->bsjgk', grouped)
  return by_token.reshape(batch, size, heads, width)


def _logits(part: Part) -> Array:
  """The masked scores of a part: [B, J, Q, N] in the wide dtype."""
  dtype = wide(part.q.dtype)
  scores = jnp.einsum('bjqk,bjnk->bjqn', part.q, part.k, preferred_element_type=dtype)
  batch, kv_heads, _, keys = scores.shape
  _, tokens, _ = part.mask.shape
  by_group = scores.reshape(batch, kv_heads, -1, tokens, keys)
  mask = part.mask[:, None, None]
  masked = jnp.where(mask, by_group, MASKED)
  return masked.reshape(scores.shape)


def _dropped(weights: Array, dropout: Dropout | None, part: int) -> Array:
  if dropout is None:
    return weights
  part_dropout = dropout.of(part)
  return part_dropout(weights)


@jax.custom_vjp
def attend(parts: tuple[Part, ...], dropout: Dropout | None = None) -> tuple[Array, Array]:
  """One softmax over the keys of all parts.

  Returns:
    (the weighted values [B, J, Q, K], the logarithm of the softmax's denominator [B, J, Q, 1]),
    both wide. The second joins the outputs of several slices of keys. For a query that sees no key
    the first is finite and meaningless, and the second is about `MASKED`.
  """
  results, _ = _attend_forward(parts, dropout)
  return results


def _attend_forward(parts, dropout):
  logits = [_logits(part) for part in parts]
  largest_of_parts = [jnp.max(scores, axis=-1, keepdims=True) for scores in logits]
  largest = functools.reduce(jnp.maximum, largest_of_parts)
  total = jnp.zeros_like(largest)
  out = jnp.zeros_like(parts[0].q, largest.dtype)
  for number, (part, scores) in enumerate(zip(parts, logits, strict=True)):
    weights = jnp.exp(scores - largest)
    total += jnp.sum(weights, axis=-1, keepdims=True)
    dropped = _dropped(weights, dropout, number)
    narrow = dropped.astype(part.v.dtype)
    out += jnp.einsum('bjqn,bjnk->bjqk', narrow, part.v, preferred_element_type=out.dtype)
  # Dividing the sum [Q, K] instead of the weights [Q, N] saves a pass over the latter.
  out = out / total
  out = checkpoint_name(out, 'attention')
  log_total = largest + jnp.log(total)
  log_total = checkpoint_name(log_total, 'attention')
  residuals = (parts, dropout, out, log_total)
  return (out, log_total), residuals


def attend_backward(residuals, gradients):
  """Recomputes the weights from `log_total` (Dao et al. 2022, FlashAttention, algorithm 4)."""
  # The derivative of the softmax p = exp(s - log_total) with o = Σ p v:
  # ds = p (do·v - do·o + d log_total), where all keys share the last two terms.
  parts, dropout, out, log_total = residuals
  gradient, d_log_total = gradients
  d_out_out = jnp.sum(gradient * out, axis=-1, keepdims=True)
  shared = d_out_out - d_log_total
  dtype = gradient.dtype
  cotangents = []
  for number, part in enumerate(parts):
    narrow = part.v.dtype
    narrow_gradient = gradient.astype(narrow)
    # A logit that is computed again may be rounded above the logarithm of the sum.
    log_weights = jnp.minimum(_logits(part) - log_total, 0)
    weights = jnp.exp(log_weights)
    d_weights = jnp.einsum('bjqk,bjnk->bjqn', narrow_gradient, part.v, preferred_element_type=dtype)
    d_kept_weights = _dropped(d_weights, dropout, number)
    d_scores = weights * (d_kept_weights - shared)
    d_scores = d_scores.astype(narrow)
    kept_weights = _dropped(weights, dropout, number)
    d_q = jnp.einsum('bjqn,bjnk->bjqk', d_scores, part.k)
    d_k = _sum_over_queries(part.q, d_scores)
    d_v = _sum_over_queries(narrow_gradient, kept_weights.astype(narrow))
    cotangent = Part(d_q, d_k, d_v, None)
    cotangents.append(cotangent)
  return tuple(cotangents), None


attend.defvjp(_attend_forward, attend_backward)


def _sum_over_queries(x: Array, weights: Array) -> Array:
  # As [K, Q] @ [Q, N], so that a CPU transposes the small operand and not the weights.
  x_by_channel = jnp.swapaxes(x, 2, 3)
  sums = jnp.einsum('bjkq,bjqn->bjkn', x_by_channel, weights)
  return jnp.swapaxes(sums, 2, 3)
