"""The plain layers: parameters in float32, arithmetic in the dtype of what comes in."""

from collections.abc import Sequence

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from valkyrie.sharding import sequence_parallel
from valkyrie.types import Array, DType


def matmul(x: Array, w: Array, out_dtype: DType | None = None) -> Array:
  """x [..., D_in] @ w [D_in, D_out] in x's dtype, accumulated in float32 -> `out_dtype` or x's.

  Leading axes are merged into one first: the gradient of w then contracts a single axis, which a
  CPU's matrix product takes as it lies in memory, where it would first transpose the activations.
  """
  rows = x.reshape(-1, x.shape[-1])
  out = jnp.matmul(rows, w.astype(x.dtype), preferred_element_type=out_dtype or x.dtype)
  return out.reshape(*x.shape[:-1], w.shape[-1])


def products(x: Array, weights: Sequence[Array]) -> list[Array]:
  """x [..., D_in] @ w for each of the float32 weights w [D_in, width], in one matrix product.

  Weights are cast to x's dtype where they are used. Side by side they make one wide product, and in
  the backward pass one sum over all of them, where a product each would read x again and write its
  gradient again.
  """
  ends = np.cumsum([w.shape[1] for w in weights])[:-1]
  return jnp.split(matmul(x, jnp.concatenate(weights, axis=1)), ends, axis=-1)


def projections(fan_in: int, **widths: int) -> list[Array]:
  """Parameters w [D_in, width] of the calling module, by name, float32."""
  init = hk.initializers.TruncatedNormal(fan_in**-0.5)
  return [
    hk.get_parameter(name, (fan_in, width), jnp.float32, init) for name, width in widths.items()
  ]


def project(x: Array, **widths: int) -> list[Array]:
  """`products` of x and the calling module's `projections`."""
  return products(x, projections(x.shape[-1], **widths))


def dropout(x: Array, rate: float, shared: Sequence[int] = ()) -> Array:
  """x with a share `rate` of its values zeroed, the others scaled up (Srivastava et al. 2014).

  Only where the transform was given an rng: in training. A step has a key, which each chunk of it
  folds its number into, and each layer and each call of this split: what is drawn depends on the
  seed, the step and where chunks are cut, between chunks and between devices, and on nothing else.

  Args:
    x: [B, T, ...].
    rate: in [0, 1); at 0 no key is asked for.
    shared: axes along which one draw counts for all.
  """
  rng = hk.maybe_next_rng_key() if rate else None
  if rng is None:
    return x
  return hk.dropout(
    rng if 1 in shared else sequence_parallel.apart(rng), rate, x, broadcast_dims=shared
  )


class RMSNorm(hk.Module):
  """Root-mean-square normalisation (Zhang & Sennrich 2019, eq. 4), of [B, T, D] in float32."""

  def __call__(self, x: Array) -> Array:
    scale = hk.get_parameter('scale', (x.shape[-1],), jnp.float32, jnp.ones)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6) * scale[None, None]).astype(x.dtype)


class GatedMLP(hk.Module):
  """(silu(x w_gate) * x w_hidden) w_out (Shazeer 2020, SwiGLU)."""

  def __init__(self, width: int, name: str | None = None):
    super().__init__(name)
    self.width = width

  def __call__(self, x: Array) -> Array:
    gate, hidden = project(x, gate=self.width, hidden=self.width)
    (out,) = project(jax.nn.silu(gate) * hidden, out=x.shape[-1])
    return out

  def forward_flops(self, width: int) -> int:
    """Three matrix products of width x self.width a token."""
    return 6 * width * self.width
