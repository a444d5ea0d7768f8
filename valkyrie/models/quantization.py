"""Products in 8 bits: each token of activations and each output feature of weights has its scale.

    y = (x8 w8) s_x s_w    x [T, D_in] ~ x8 s_x and w [D_in, D_out] ~ w8 s_w
    dx = (g8 w8^T) s_g     g s_w ~ g8 s_g: the same w8 serves all passes
    dw = x^T g             in the dtype of x

One scale for all tokens would tell a token how large later ones are. Where layers gather their
weights (`layer_weights`), each device rounds its part, and sends 8 bits a number.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import re
from typing import Any

import gin
import haiku as hk
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError, check_choice
from valkyrie.models.declarations import Declared
from valkyrie.models.matrices import Matrix
from valkyrie.models.precision import wide
from valkyrie.sharding import ambient, layer_weights, messages
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, Axes, DType

# The largest number of each. Sums of int8 in int32 are exact up to 133,152 features. E4M3 serves in
# all passes, as in DeepSeek-AI 2024 (section 3.3.2).
_LARGEST = {'int8': 127, 'float8_e4m3fn': 448}


@dataclasses.dataclass(frozen=True)
class Quantized(Matrix):
  """A matrix in 8 bits; only the gradient needs it `whole`."""

  w8: Array  # [D_in, D_out]
  scale: Array  # [1, D_out]

  @classmethod
  def multiply(
    cls,
    x: Array,
    groups: Sequence[Sequence[Any]],
    axes: Axes,
    dtype: DType,
  ) -> list[Array]:
    """See `Matrix.multiply`; no layout splits these products."""
    matrices = list(itertools.chain.from_iterable(groups))
    y = product(x, matrices, dtype)
    widths = []
    for group in groups:
      width = sum(w.shape[1] for w in group)
      widths.append(width)
    group_ends = np.cumsum(widths)
    return jnp.split(y, group_ends[:-1], axis=-1)


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Quantization:
  """The products of attention and MLPs in 8 bits; recurrences, whose errors add up, stay wide.

  dtype: 'int8' or 'float8_e4m3fn'.
  bfloat16_gradients: devices send the gradients of weights that layers gather in bfloat16, which
    also rounds their sum over devices, otherwise in float32.
  """

  dtype: str = 'int8'
  bfloat16_gradients: bool = False

  def __post_init__(self):
    check_choice('Quantization.dtype', self.dtype, _LARGEST)
    if self.dtype != 'int8' and platform() == 'tpu':
      raise ConfigurationError(
        f"Quantization.dtype={self.dtype!r} is slower than bfloat16 on TPUs up to v6e. Use 'int8'."
      )

  def getter(self, following: Callable, part: Array, context: hk.GetterContext) -> Any:
    """A Haiku getter of `Quantized`; it precedes `layer_weights.getter`, which gathers the rest."""
    declared = context.original_init
    is_named = re.search(r'(attention|mlp)(_\d+)?$', context.module_name) is not None
    if not (is_named and isinstance(declared, Declared) and declared.in_products):
      return following(part)
    mesh_axes = ambient.current().weights
    split = layer_weights.split_dimension(part, context.original_shape)
    cast = part.astype(declared.cast)  # first, so that all layouts round the same numbers
    # Devices that hold parts of one column share its scale.
    sharing = mesh_axes if split == 0 else ()
    values = lax.stop_gradient(cast)
    w8, scale = _rounded(values, 0, self.dtype, sharing)
    whole = cast
    if split is not None:
      w8 = messages.all_gather(w8, mesh_axes, split)
      sent = jnp.bfloat16 if self.bfloat16_gradients else None
      whole = layer_weights.gather(part, mesh_axes, split, declared.cast, sent)
    if split == 1:
      scale = messages.all_gather(scale, mesh_axes, 1)
    w8 = checkpoint_name(w8, 'weights')
    scale = checkpoint_name(scale, 'weights')
    return Quantized(whole, w8, scale)


def product(x: Array, weights: Sequence[Quantized], out_dtype: DType) -> Array:
  """x [..., D_in] @ the weights [D_in, D_out], side by side -> [..., the sum of D_out]."""
  wholes = [w.whole for w in weights]
  rounded = [w.w8 for w in weights]
  scales = [w.scale for w in weights]
  whole = jnp.concatenate(wholes, axis=1)
  w8 = jnp.concatenate(rounded, axis=1)
  scale = jnp.concatenate(scales, axis=1)
  *leading, d_in = x.shape
  rows = x.reshape(-1, d_in)
  y = _product(out_dtype, rows, whole, w8, scale)
  y = checkpoint_name(y, 'product')
  d_out = y.shape[-1]
  return y.reshape(*leading, d_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
  out_dtype,
  x,
  whole,
  w8,
  scale,
):
  y, _ = _forward(out_dtype, x, whole, w8, scale)
  return y


def _forward(
  out_dtype,
  x,
  _,
  w8,
  scale,
):
  y = _by_rows(x, w8, 0) * scale
  return y.astype(out_dtype), (x, w8, scale)


def _backward(_, residuals, g):
  x, w8, scale = residuals
  narrow = g.astype(x.dtype)
  dw = _dot(x, narrow, 0, 0)
  dx = _by_rows(g * scale, w8, 1)
  return dx.astype(x.dtype), dw, None, None


_product.defvjp(_forward, _backward)


def _by_rows(x, w8, summed):
  """The sums over this dimension of w8, with x in its dtype and a scale for each row; wide."""
  x8, scale = _rounded(x, 1, w8.dtype.name)
  sum_dtype = scale.dtype
  if w8.dtype == jnp.int8:
    sum_dtype = jnp.int32
  sums = _dot(x8, w8, 1, summed, sum_dtype)
  return sums.astype(scale.dtype) * scale


def _dot(
  a,
  b,
  a_axis,
  b_axis,
  dtype=None,
):
  """The sums of the products of two matrices over an axis of each."""
  contracted = ((a_axis,), (b_axis,))
  batched = ((), ())
  return lax.dot_general(a, b, (contracted, batched), preferred_element_type=dtype)


def _rounded(x, axis, dtype, sharing=()):
  """x in 8 bits, and its wide scale along an axis, which devices along mesh axes may share."""
  x = x.astype(wide(x.dtype))
  magnitudes = jnp.abs(x)
  largest = jnp.max(magnitudes, axis, keepdims=True)
  largest = jnp.maximum(largest, 1e-30)
  if sharing:
    largest = lax.pmax(largest, sharing)
  largest_of_dtype = _LARGEST[dtype]
  scaled = x * (largest_of_dtype / largest)
  scale = largest / largest_of_dtype
  if dtype == 'int8':
    scaled = jnp.round(scaled)
  return scaled.astype(dtype), scale
