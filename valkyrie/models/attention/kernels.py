"""Window attention by a library's kernel: jax's splash attention, for TPUs.

The kernel computes the softmax of a window, forwards and backwards, and writes no logits to memory.
Registers and document starts, which it does not know, are read beside it by `softmax.attend`. The
logarithms of both denominators join the results, and backwards both recompute their weights from
the joint one (Dao et al. 2022, FlashAttention, algorithm 4).
"""

from collections.abc import Callable, Sequence
import functools
import importlib
from typing import Any, NamedTuple

import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from valkyrie.models.attention import softmax
from valkyrie.models.attention.softmax import Part
from valkyrie.models.layers import wide
from valkyrie.sharding import ambient
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, DType, SequenceMixer

# Of `LongformerAttention.kernels`: where it can, always, or always in Pallas's interpreter.
CHOICES = (None, 'prefer', 'require', 'interpret')
LANES = 128  # the queries and keys of a block are a multiple
_BLOCKS = ('q', 'kv', 'kv_compute', 'q_dkv', 'kv_dkv', 'kv_dkv_compute', 'q_dq', 'kv_dq')


def why_not(choice: str, time: int) -> str | None:
  """Why no kernel reads a chunk, or a device's piece, of `time` tokens; None if one does."""
  partitioner = ambient.current().partitioner
  if choice != 'interpret' and platform() != 'tpu':
    return f'the kernel is for TPUs, and this program for a {platform().upper()}'
  if time % LANES:
    return f'a device reads {time} tokens of a chunk at once, no multiple of {LANES}'
  if partitioner is not None and partitioner.mesh.size > 1:
    return "XLA's partitioner cannot split a kernel; a layout with Partitioner.manual = True can"
  return None


def used(choice: str | None, time: int) -> bool:
  """Whether a kernel reads a piece; only where it was compared, see `Ambient.kernels`."""
  return choice is not None and time in ambient.current().kernels and not why_not(choice, time)


class Form(NamedTuple):
  """Static sizes: the last `queries` of `keys` tokens see `window` tokens before themselves."""

  queries: int
  keys: int
  window: int
  interpret: bool

  @property
  def block(self) -> int:
    """Queries, and keys, of a block of logits."""
    return next(size for size in (4 * LANES, 2 * LANES, LANES) if self.queries % size == 0)

  def scope(self, rows_and_heads: int) -> Any:
    """Tells `certificates.work` the logits that a kernel computes."""
    begins = range(self.keys - self.queries, self.keys, self.block)
    first = (max(0, begin - self.window) // self.block for begin in begins)
    blocks = sum(begin // self.block - at + 1 for begin, at in zip(begins, first, strict=True))
    return jax.named_scope(f'splash_{rows_and_heads * blocks * self.block**2}_{self.block}')

  def make(self, heads: int) -> tuple[Callable, Callable]:
    """The kernel of a row, and the rule of its gradient, of arrays."""
    # Not at the head: Pallas takes a second to import, for which runs without kernels do not wait.
    splash = importlib.import_module('jax.experimental.pallas.ops.tpu.splash_attention')
    before = self.keys - self.queries
    mask = splash.LocalMask((self.queries, self.keys), (self.window, 0), before)
    kernel = splash.make_splash_mha(
      splash.MultiHeadMask([mask] * heads),
      block_sizes=splash.BlockSizes(**{f'block_{name}': self.block for name in _BLOCKS}),
      save_residuals=True,
      head_shards=1,
      q_seq_shards=1,
      interpret=self.interpret,
    )

    def forward(q, k, v, segments):
      return kernel(q, k, v, splash.SegmentIds(*segments))

    # The public gradient takes no cotangent of the logarithm. That of a joint softmax needs none:
    # the rule reads the outputs and the logarithm of the forward pass, here the joint ones.
    def backward(q, k, v, segments, out, log_total, gradient):
      information = kernel.dq_mask_info, kernel.dkv_mask_info
      saved = q, k, v, splash.SegmentIds(*segments), None, out, log_total, *information
      rule = splash.splash_attention_kernel._splash_attention_bwd
      return rule(**kernel.kwargs, res=saved, do=gradient)[3:6]

    return forward, backward


def attend(
  form: Form, q: Array, k: Array, v: Array, segments: tuple[Array, Array], parts: Sequence[Part]
) -> Array:
  """One softmax over the window and the parts, as `softmax.attend` -> [R, S, H, K].

  q [R, S, H, K], k and v [R, N, J, K] are scaled and rotated; `segments` are their documents.
  """
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  return jnp.swapaxes(_attend(form, q, k, v, segments, tuple(parts)), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(form, q, k, v, segments, parts):
  return _forward(form, q, k, v, segments, parts)[0]


def _forward(form, q, k, v, segments, parts):
  rows, heads, time, _ = q.shape
  with form.scope(rows * heads):
    out, (log_total,) = jax.vmap(form.make(heads)[0])(q, k, v, segments)
  out, log_total = out.astype(wide(q.dtype)), log_total[..., None]
  if parts:
    others, log_others = (x.reshape(rows, heads, time, -1) for x in softmax.attend(parts))
    log_window, log_total = log_total, jnp.logaddexp(log_total, log_others)
    out = jnp.exp(log_window - log_total) * out + jnp.exp(log_others - log_total) * others
  out, log_total = (checkpoint_name(x, 'attention') for x in (out, log_total))
  return out.astype(q.dtype), (q, k, v, segments, parts, out, log_total)


def _backward(form, residuals, gradient):
  q, k, v, segments, parts, out, log_total = residuals
  with form.scope(q.shape[0] * q.shape[1]):
    backward = jax.vmap(form.make(q.shape[1])[1])
    d_window = backward(q, k, v, segments, out, log_total[..., 0], gradient)
  d_parts = ()
  if parts:
    out, log_total, gradient = (
      x.reshape(*k.shape[:2], -1, x.shape[3]) for x in (out, log_total, gradient.astype(out.dtype))
    )
    d_parts, _ = softmax.attend_backward((parts, None, out, log_total), (gradient, 0.0))
  return *d_window, None, d_parts


_attend.defvjp(_forward, _backward)


class Compared(NamedTuple):
  """A mixer that `make` makes, on what one device reads of a chunk: x [B, T, D] = `shape`."""

  make: Callable[[], SequenceMixer]
  shape: tuple[int, int, int]
  dtype: DType

  def results(self, by_kernel: bool) -> list[Array]:
    """Outputs and gradients of rows that go on, begin a document, and end with padding."""
    (rows, time, _), keys = self.shape, jax.random.split(jax.random.key(0), 3)
    at = np.tile(np.arange(time, dtype=np.int32), (rows, 1))
    begun = at >= time // 3
    segments = np.where(at < time - time // 9, 1 + begun, 0).astype(np.int32)
    where = {'positions': np.where(begun, at - time // 3, at + 10**6), 'segment_ids': segments}
    mixer = hk.transform(lambda x, carry: self.make()(x, carry, **where)[0])
    fresh = hk.transform(lambda: self.make().initial_carry(rows, self.dtype)).apply({}, None)
    carry = jax.tree.map(lambda x: jax.random.normal(keys[0], x.shape).astype(x.dtype), fresh)
    carry = jax.tree.map(lambda x: jnp.ones_like(x) if x.dtype == jnp.int32 else x, carry)
    x, weights = (jax.random.normal(key, self.shape, self.dtype) for key in keys[1:])
    weights = jnp.where(segments[..., None] > 0, weights, 0)
    with ambient.within(kernels=(time,) if by_kernel else ()):
      params = mixer.init(keys[0], x, carry)
      out, pull = jax.vjp(lambda *given: mixer.apply(given[0], None, given[1], carry), params, x)
      found = jax.tree.leaves((jnp.where(weights == 0, 0, out), pull(weights)))
    return [leaf.astype(jnp.float32) for leaf in found]

  def difference(self) -> float:
    """The largest norm of a difference, over the norm of the plain form's result."""
    kernel, plain = (jax.jit(functools.partial(self.results, by))() for by in (True, False))
    norm, pairs = jnp.linalg.norm, zip(kernel, plain, strict=True)
    return max(float(norm(x - y) / jnp.maximum(norm(y), 1e-30)) for x, y in pairs)
