"""Parameters with declared axes, and the plain layers that use them.

Parameters are float32, unless the model stores those that every use casts in bfloat16; arithmetic
is in the dtype of the input. `parameter` declares logical axes and casts, so that neither a layout
nor a cast copy needs a table of paths. A parameter made by plain `hk.get_parameter` is never split
and never cast.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import gin
import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from valkyrie.errors import ConfigurationError
from valkyrie.models.declarations import Adapted, Declared, Decomposed
from valkyrie.sharding import sequence_parallel
from valkyrie.sharding.split_products import split_product
from valkyrie.types import Array, Axes, DType


def parameter(
  name: str,
  shape: tuple[int, ...],
  init: Callable,
  *,
  axes: Axes,
  cast: DType | None = None,
  matrix: Callable | None = None,
) -> Any:
  """A parameter of the calling module; see `Declared` for the arguments.

  With `matrix` it may be `Decomposed`, which `behind` takes.
  """
  return hk.get_parameter(name, shape, init=Declared(init, axes, cast, matrix=matrix))


def matmul(x: Array, w: Array, out_dtype: DType | None = None) -> Array:
  """x [..., D_in] @ w [D_in, D_out] in x's dtype, accumulated in float32 -> `out_dtype` or x's.

  Leading axes are merged first: the gradient of w then contracts a single axis, for which a CPU
  does not transpose the activations.
  """
  rows = x.reshape(-1, x.shape[-1])
  out = jnp.matmul(rows, w.astype(x.dtype), preferred_element_type=out_dtype or x.dtype)
  return out.reshape(*x.shape[:-1], w.shape[-1])


Matrix = Array | Adapted | Decomposed


def whole(w: Matrix) -> Array:
  """The matrix as stored."""
  return w.whole if isinstance(w, Adapted | Decomposed) else w


def behind(
  w: Matrix, x: Array, y: Array, axes: Axes, scale: Callable[[Array], Array] | None = None
) -> Array:
  """y = x W [..., d_out] as the masks of a site replace it; y itself if w is none.

  Every matrix that multiplies activations passes here. `scale` is what y has besides x W, linear
  and from the left; the delta is applied to activations, so no matrix is formed for it.
  """
  if not isinstance(w, Decomposed):
    return y
  w.note(x)
  if w.masks is None:
    return y
  components, delta, route = w.masks
  delta = delta[..., None].astype(y.dtype)
  inner = split_product(matmul, x, w.v, (axes[0], component_axis(axes[0])))
  # ((x V) m) U + d (x W - (x V) U) with one product by U.
  inner = inner * (components - delta).astype(inner.dtype)
  low = split_product(
    functools.partial(matmul, out_dtype=y.dtype), inner, w.u, (component_axis(axes[1]), axes[1])
  )
  return jnp.where(route[..., None], delta * y + (low if scale is None else scale(low)), y)


def component_axis(other: str | None) -> str:
  """The logical axis of a factor's components, which layouts split as no matrix's `other` one."""
  return 'mlp' if other == 'embed' else 'embed'


def products(
  x: Array,
  weights: Sequence[Matrix | Sequence[Matrix]],
  axes: Axes = (None, None),
  out_dtype: DType | None = None,
) -> list[Array]:
  """x [..., D_in] @ w for each weight w [D_in, width], cast to x's dtype, in one matrix product.

  Side by side the weights make one wide product, with one sum in the backward pass; a product for
  each would read x again and write its gradient again.

  Args:
    x: the activations.
    weights: matrices, or several whose results stand side by side in one.
    axes: the logical axes of the weights, by which `split_product` splits their product.
    out_dtype: of the results; None for x's.
  """
  groups = [w if isinstance(w, Sequence) else [w] for w in weights]
  adapted = any(isinstance(w, Adapted) for group in groups for w in group)
  own: DType = x.dtype if out_dtype is None else out_dtype
  wide = jnp.promote_types(own, jnp.float32) if adapted else own

  def side_by_side(x, weights):
    ends = np.cumsum([w.shape[1] for w in weights])[:-1]
    return jnp.split(matmul(x, jnp.concatenate(weights, axis=1), wide), ends, axis=-1)

  def joined(group, axis=1):
    return group[0] if len(group) == 1 else jnp.concatenate(group, axis=axis)

  results = split_product(
    side_by_side, x, [joined([whole(w) for w in group]) for group in groups], axes
  )
  if any(isinstance(w, Decomposed) for group in groups for w in group):

    def replaced(group, y):
      parts = jnp.split(y, np.cumsum([w.shape[1] for w in group])[:-1], axis=-1)
      return joined([behind(w, x, part, axes) for w, part in zip(group, parts, strict=True)], -1)

    return [replaced(group, y) for group, y in zip(groups, results, strict=True)]
  if not adapted:
    return results

  def added(w):
    if not isinstance(w, Adapted):
      return jnp.zeros((*x.shape[:-1], w.shape[1]), wide)
    low = split_product(matmul, x, w.down, (axes[0], None))
    return split_product(functools.partial(matmul, out_dtype=wide), low, w.up, (None, axes[1]))

  # The sum is rounded once, so that an adapter's effect is as exact as the products are.
  return [
    (result + jnp.concatenate([added(w) for w in group], axis=-1)).astype(own)
    for result, group in zip(results, groups, strict=True)
  ]


def projections(
  x: Array, axes: Axes, init: Callable | None = None, /, **widths: int
) -> list[Matrix]:
  """Matrices [D_in, width] of the calling module, by name, for `products` with x."""
  fan_in = x.shape[-1]
  init = init or hk.initializers.TruncatedNormal(fan_in**-0.5)
  declared = Declared(init, axes, x.dtype, in_products=True, matrix=_itself)
  return [hk.get_parameter(name, (fan_in, width), init=declared) for name, width in widths.items()]


def _itself(matrix: Array) -> Array:
  return matrix


def project(x: Array, axes: Axes, **widths: int) -> list[Array]:
  """`products` of x and the calling module's `projections`."""
  return products(x, projections(x, axes, **widths), axes)


def dropout(x: Array, rate: float, shared: Sequence[int] = ()) -> Array:
  """x [B, T, ...] with a share `rate` zeroed, the others scaled up (Srivastava et al. 2014).

  It acts only if the transform has an rng, in training. A draw depends on the seed, the step, and
  the cuts between chunks and between devices. One draw serves all along the axes `shared`.
  """
  rng = hk.maybe_next_rng_key() if rate else None
  if rng is None:
    return x
  if 1 not in shared:
    rng = sequence_parallel.fold_in_shard(rng)
  return hk.dropout(rng, rate, x, broadcast_dims=shared)


@gin.configurable
class RMSNorm(hk.Module):
  """Root-mean-square normalization (Zhang & Sennrich 2019, eq. 4), of [B, T, D] in float32."""

  def __init__(self, epsilon: float = 1e-6, name: str | None = None):
    super().__init__(name)
    self.epsilon = epsilon

  def __call__(self, x: Array) -> Array:
    scale = parameter('scale', (x.shape[-1],), jnp.ones, axes=('norm',))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale[None, None]).astype(x.dtype)


class GatedMLP(hk.Module):
  """(silu(x w_gate) * x w_hidden) w_out (Shazeer 2020, SwiGLU)."""

  def __init__(self, width: int, name: str | None = None):
    super().__init__(name)
    self.width = width

  def __call__(self, x: Array) -> Array:
    wide = project(x, ('embed', 'mlp'), gate=self.width, hidden=self.width)
    gate, hidden = (checkpoint_name(product, 'mlp') for product in wide)
    (out,) = project(jax.nn.silu(gate) * hidden, ('mlp', 'embed'), out=x.shape[-1])
    return out

  def forward_flops(self, width: int) -> int:
    """Three matrix products of width x self.width for each token."""
    return 6 * width * self.width


def check_sizes(owner: str, least: int = 1, /, **sizes: int) -> None:
  """Raises a ConfigurationError, naming the module `owner`, for a size smaller than `least`."""
  for name, size in sizes.items():
    if size < least:
      raise ConfigurationError(f'{owner}.{name}={size} must be at least {least}.')
