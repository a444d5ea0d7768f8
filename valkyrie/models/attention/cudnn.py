"""Softmax attention under any mask by cuDNN's kernel, for NVIDIA GPUs, in bfloat16 and float16.

Its logits stay out of memory. A mask goes in as a bias, once for all heads, which each head reads;
where every query sees every key, as most keys of a long document are seen, there is none.
"""

from collections.abc import Callable
import importlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from valkyrie.models.attention.softmax import MASKED, Part
from valkyrie.models.precision import wide
from valkyrie.types import Array

SCOPE = 'cudnn'  # its name tells `certificates.work` what is computed
# The pairs of queries and keys of a mask, which are 128 MiB as a bias.
PAIRS_AT_ONCE = 2**26


def forward(q: Array, k: Array, v: Array, seen: Array | None) -> tuple[Array, Array]:
  """Queries [R, H, S, K], keys and values [R, J, N, K] and a mask [R, S, N], without a gradient.

  Without a mask, every query sees every key.

  Returns:
    (out [R, H, S, K], the logarithm of the softmax's denominator [R, H, S]).
  """
  primitive = _cudnn()._dot_product_attention_fwd_p_wrapper
  out, log_total = _call(primitive, q, k, v, seen, is_training=True)
  return out, log_total


def backward(
  q: Array,
  k: Array,
  v: Array,
  seen: Array | None,
  out: Array,
  log_total: Array,
  gradient: Array,
) -> tuple[Array, Array, Array]:
  """The gradients of q, k and v, from the results of a softmax to which these keys belong."""
  primitive = _cudnn()._dot_product_attention_bwd_p_wrapper
  results = out.astype(q.dtype), gradient.astype(q.dtype)
  return _call(primitive, q, k, v, seen, log_total, *results)


def attend(parts: tuple[Part, ...], dropout: None = None) -> tuple[Array, Array]:
  """As `softmax.attend`, of one part, without a gradient of its own."""
  del dropout
  (part,) = parts
  dtype = wide(part.q.dtype)

  def read(seen):
    return forward(_by_head(part.q, part), part.k, part.v, seen)

  out, log_total = _masked_if_needed(read, part.mask)
  by_group = (*part.q.shape[:-1], -1)
  return out.reshape(by_group).astype(dtype), log_total.reshape(by_group).astype(dtype)


def attend_backward(residuals: Any, gradients: Any) -> tuple[tuple[Part, ...], None]:
  """As `softmax.attend_backward`, of one part."""
  parts, _, out, log_total = residuals
  gradient, d_log_total = gradients
  (part,) = parts
  # The kernel takes no gradient of the logarithm. It computes ds = p (do·v - do·o), and ours is
  # p (do·v - do·o + d log_total): with another o, whose product with do is smaller by that.
  square = jnp.sum(gradient**2, axis=-1, keepdims=True)
  share = jnp.where(square > 0, d_log_total / jnp.where(square > 0, square, 1), 0)
  moved = out - share * gradient
  # A query that sees no key has the logarithm of masked logits, and would give them weights.
  log_total = jnp.where(log_total > MASKED / 2, log_total, 0)

  def read(seen):
    return backward(
      _by_head(part.q, part),
      part.k,
      part.v,
      seen,
      _by_head(moved, part),
      _by_head(log_total, part)[..., 0],
      _by_head(gradient, part),
    )

  d_q, d_k, d_v = _masked_if_needed(read, part.mask)
  return (Part(d_q.reshape(part.q.shape), d_k, d_v, None),), None


def _masked_if_needed(read: Callable[[Array | None], Any], seen: Array) -> Any:
  """`read` of a mask, or of None where it masks nothing."""
  with jax.named_scope(SCOPE):
    return lax.cond(jnp.all(seen), lambda: read(None), lambda: read(seen))


def _by_head(x: Array, part: Part) -> Array:
  """[B, J, H/J · S, ...] -> [B, H, S, ...]."""
  batch, _, _, width = x.shape
  _, queries, _ = part.mask.shape
  return x.reshape(batch, -1, queries, width)


def _cudnn() -> Any:
  """The primitives of jax, whose public function returns no logarithm."""
  return importlib.import_module('jax._src.cudnn.fused_attention_stablehlo')


def _call(
  primitive: Any,
  q: Array,
  k: Array,
  v: Array,
  seen: Array | None,
  *more: Array,
  **options: Any,
):
  """Binds a primitive as `jax.nn.dot_product_attention` does."""
  cudnn = _cudnn()
  none = jnp.zeros(0, q.dtype)
  bias = none
  if seen is not None:
    bias = jnp.where(seen, 0, MASKED)
    bias = bias.astype(q.dtype)[:, None]
  unused = 6 * [none]
  return primitive.bind(
    q,
    k,
    v,
    bias,
    *unused,
    *more,
    scale=1.0,
    seed=0,
    dropout_rate=0.0,
    variadic_args=(seen is not None, False),  # whether there is a bias; it has no gradient
    mask_type=cudnn.MaskType.NO_MASK,
    layout=cudnn.AttentionLayout.BNTH.value,
    sliding_window_length=None,
    **options,
  )
