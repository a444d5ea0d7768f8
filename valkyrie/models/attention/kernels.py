"""Window attention by a library's kernel: jax's splash attention on TPUs, cuDNN's on NVIDIA GPUs.

The kernel computes the softmax of a window, forwards and backwards, and writes no logits to memory.
It knows neither registers nor document starts: `softmax.attend` reads these. The logarithms of both
denominators join the results. Backwards, both recompute their weights from the logarithm of the
joint denominator (Dao et al. 2022, FlashAttention, algorithm 4).
"""

from collections.abc import Callable, Sequence
import functools
import importlib
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from valkyrie.models.attention import cudnn, softmax
from valkyrie.models.kernel_choice import Limits
from valkyrie.models.precision import wide
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array

LANES = 128  # the queries and keys of a block are a multiple


def limits(*, dropout: float, dilation: int, document_start: int, window: int) -> Limits:
  """Where the kernels run, for a mixer of these options and the largest dilation."""
  misfit = None
  if dropout or dilation > 1 or (document_start and window < LANES):
    misfit = (
      'the kernels have no dropout, no dilations, and no document_start with a window below '
      f'{LANES}'
    )
  return Limits(('tpu', 'gpu'), LANES, misfit)


class Form(NamedTuple):
  """The last S = `queries` of N = `keys` tokens see the W = `window` tokens before themselves."""

  queries: int
  keys: int
  window: int
  choice: str | None


class Kernel(NamedTuple):
  """An attention of rows.

  scope: a context in which it is traced, whose name tells `certificates.work` what is computed.
  forward: (q, k, v, segments) -> (out, (the logarithm of the denominator,)).
  backward: (q, k, v, segments, out, that logarithm, the gradient of out) -> gradients of q, k, v.
  """

  scope: Any
  forward: Callable[..., Any]
  backward: Callable[..., Any]


def _splash(form: Form, rows: int, heads: int) -> Kernel:
  """Splash attention; the scope has the number of logits and the size of blocks."""
  # Pallas takes a second to import, for which runs without kernels do not wait.
  splash = importlib.import_module('jax.experimental.pallas.ops.tpu.splash_attention')
  queries, keys, window, choice = form
  sizes = (4 * LANES, 2 * LANES, LANES)
  size = next(size for size in sizes if queries % size == 0)
  mask = splash.LocalMask((queries, keys), (window, 0), offset=keys - queries)
  masks_of_heads = splash.MultiHeadMask([mask] * heads)
  block_sizes = splash.BlockSizes(*8 * [size])
  kernel = splash.make_splash_mha_single_device(
    masks_of_heads,
    block_sizes=block_sizes,
    save_residuals=True,
    interpret=choice == 'interpret',
  )

  def forward(q, k, v, segments):
    segment_ids = splash.SegmentIds(*segments)
    return kernel(q, k, v, segment_ids)

  # The public gradient takes no cotangent of the logarithm. A joint softmax needs none:
  # the rule reads the outputs and the logarithm of the forward pass, here the joint ones.
  def backward(
    q,
    k,
    v,
    segments,
    out,
    log_total,
    gradient,
  ):
    segment_ids = splash.SegmentIds(*segments)
    masks = (kernel.dq_mask_info, kernel.dkv_mask_info)
    saved = (q, k, v, segment_ids, None, out, log_total, *masks)
    rule = splash.splash_attention_kernel._splash_attention_bwd
    gradients = rule(**kernel.kwargs, res=saved, do=gradient)
    return gradients[3:6]

  blocks = rows * heads * _seen_blocks(form, size)
  logits = blocks * size**2
  scope = jax.named_scope(f'splash_{logits}_{size}')
  return Kernel(scope, jax.vmap(forward), jax.vmap(backward))


def _seen_blocks(form: Form, size: int) -> int:
  """The blocks of size x size logits of a head in which some query sees a key."""
  count = 0
  for begin in range(form.keys - form.queries, form.keys, size):
    first = max(0, begin - form.window) // size
    last = begin // size
    count += last - first + 1
  return count


def _cudnn(form: Form) -> Kernel:
  """cuDNN's attention, in bfloat16 and float16."""
  queries, keys, window, _ = form
  query = np.arange(keys - queries, keys)
  key = np.arange(keys)
  steps = query[:, None] - key
  inside = (steps >= 0) & (steps <= window)

  def seen(segments) -> Any:
    return inside[None] & softmax.same_document(*segments)

  def forward(q, k, v, segments):
    out, log_total = cudnn.forward(q, k, v, seen(segments))
    return out, (log_total,)

  def backward(
    q,
    k,
    v,
    segments,
    *of_results,
  ):
    return cudnn.backward(q, k, v, seen(segments), *of_results)

  return Kernel(jax.named_scope(cudnn.SCOPE), forward, backward)


def _by_cudnn(choice: str | None) -> bool:
  return platform() == 'gpu' and choice != 'interpret'


def _kernel(form: Form, rows: int, heads: int) -> Kernel:
  if _by_cudnn(form.choice):
    return _cudnn(form)
  return _splash(form, rows, heads)


def slice_size(choice: str | None, most: int, plain: int) -> int:
  """The queries of a slice, about `most`; a slice of the plain form has `plain` queries.

  cuDNN computes all logits of a slice, so it gets slices as short as the plain form's. Splash
  attention skips the blocks in which no query sees a key.
  """
  queries = most
  if _by_cudnn(choice):
    queries = min(most, plain)
  blocks = max(1, queries // LANES)
  return blocks * LANES


def attend(
  form: Form,
  q: Array,
  k: Array,
  v: Array,
  segments: Any,
  parts: Sequence,
) -> Array:
  """One softmax over a window and the parts, as `softmax.attend` -> [R, S, H, K].

  q [R, S, H, K], and k and v [R, N, J, K], are scaled and rotated; `segments` are of both.
  """
  q_heads = jnp.swapaxes(q, 1, 2)
  k_heads = jnp.swapaxes(k, 1, 2)
  v_heads = jnp.swapaxes(v, 1, 2)
  out: Any = _attend(form, q_heads, k_heads, v_heads, segments, tuple(parts))
  return jnp.swapaxes(out, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form, *arrays):
  out, _ = _forward(form, *arrays)
  return out


def _forward(
  form,
  q,
  k,
  v,
  segments,
  parts,
):
  rows, heads = q.shape[:2]
  kernel = _kernel(form, rows, heads)
  with kernel.scope:
    out, (log_total,) = kernel.forward(q, k, v, segments)
  out = out.astype(wide(q.dtype))
  log_total = log_total[..., None]
  if parts:
    parts_out, parts_log_total = softmax.attend(parts)
    _, _, time, _ = q.shape
    others = parts_out.reshape(rows, heads, time, -1)
    log_others = parts_log_total.reshape(rows, heads, time, -1)
    log_window = log_total
    log_total = jnp.logaddexp(log_total, log_others)
    window_share = jnp.exp(log_window - log_total)
    others_share = jnp.exp(log_others - log_total)
    out = window_share * out + others_share * others
  out = checkpoint_name(out, 'attention')
  log_total = checkpoint_name(log_total, 'attention')
  residuals = (q, k, v, segments, parts, out, log_total)
  return out.astype(q.dtype), residuals


def _backward(form, residuals, gradient):
  q, k, v, segments, parts, out, log_total = residuals
  rows, heads = q.shape[:2]
  kernel = _kernel(form, rows, heads)
  with kernel.scope:
    d_window = kernel.backward(q, k, v, segments, out, log_total[..., 0], gradient)
  if not parts:
    return *d_window, None, ()

  _, kv_heads, _, _ = k.shape

  def by_kv_head(x):
    width = x.shape[-1]
    return x.reshape(rows, kv_heads, -1, width)

  residuals = (parts, None, by_kv_head(out), by_kv_head(log_total))
  wide_gradient = gradient.astype(out.dtype)
  parts_gradient = by_kv_head(wide_gradient)
  d_parts, _ = softmax.attend_backward(residuals, (parts_gradient, 0.0))
  return *d_window, None, d_parts


_attend.defvjp(_forward, _backward)
