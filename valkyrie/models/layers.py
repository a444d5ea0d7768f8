"""Parameters with declared axes, and the plain layers that use them.

Parameters are float32, unless the model stores those that every use casts in bfloat16; arithmetic
is in the dtype of the input. `parameter` declares logical axes and casts, so that neither a layout
nor a cast copy needs a table of paths. A parameter made by plain `hk.get_parameter` is never split
and never cast.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import gin
import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from valkyrie.config.ranges import Fraction, PositiveInt, ProperFraction, check_fields
from valkyrie.models import quantization
from valkyrie.models.declarations import FIRST_CARRY, Adapted, Declared, Decomposed
from valkyrie.models.quantization import Quantized
from valkyrie.sharding import ambient, sequence_parallel
from valkyrie.sharding.split_products import split_product
from valkyrie.types import Array, Axes, DType, leaf_path


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


def wide(dtype: DType) -> DType:
  """The dtype of states, norms and logits: float32, or their inputs' own if that is wider."""
  return jnp.promote_types(dtype, jnp.float32)


@dataclasses.dataclass(eq=False)
class Module(hk.Module):
  """A Haiku module whose options are fields; a number out of its range is a ConfigurationError."""

  name: str | None = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self):
    super().__post_init__()
    check_fields(self)

  @hk.transparent
  def first_state(self, state: Any) -> Any:
    """What documents begin with instead of zero: parameters like a state, without B; or None."""

    def learned(path, part):
      name = '.'.join(filter(None, ['first_carry', leaf_path(path)]))
      shape = part.shape[1:]
      axes = (FIRST_CARRY, *[None] * len(shape))[: len(shape)]
      return parameter(name, shape, jnp.zeros, axes=axes).astype(part.dtype)

    is_learned = ambient.current().learned_carry
    return jax.tree_util.tree_map_with_path(learned, state) if is_learned else None


def matmul(x: Array, w: Array, out_dtype: DType | None = None) -> Array:
  """x [..., D_in] @ w [D_in, D_out] in x's dtype, accumulated in float32 -> `out_dtype` or x's.

  Leading axes are merged first: the gradient of w then contracts a single axis, for which a CPU
  does not transpose the activations.
  """
  rows = x.reshape(-1, x.shape[-1])
  out = jnp.matmul(rows, w.astype(x.dtype), preferred_element_type=out_dtype or x.dtype)
  return out.reshape(*x.shape[:-1], w.shape[-1])


Matrix = Array | Adapted | Decomposed | Quantized


def whole(w: Matrix) -> Array:
  """The matrix as stored."""
  return w.whole if isinstance(w, Adapted | Decomposed | Quantized) else w


def behind(
  w: Matrix, x: Array, y: Array, axes: Axes, scale: Callable[[Array], Array] | None = None
) -> Array:
  """y = x W [..., d_out] with an adapter added, or as the masks of a site replace it; else y.

  Every matrix that multiplies activations passes here. `scale` is what y has besides x W, linear
  and from the left; the delta is applied to activations, so no matrix is formed for it.
  """
  outwards = functools.partial(matmul, out_dtype=y.dtype)
  if isinstance(w, Adapted):
    low = split_product(matmul, x, w.down, (axes[0], None))
    return y + split_product(outwards, low, w.up, (None, axes[1]))
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
  low = split_product(outwards, inner, w.u, (component_axis(axes[1]), axes[1]))
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

  The results of several weights in one entry stand side by side in one. `axes` are the logical axes
  of the weights, by which `split_product` splits their product.
  """
  groups = [w if isinstance(w, Sequence) else [w] for w in weights]
  kinds = {type(w) for group in groups for w in group}
  own: DType = x.dtype if out_dtype is None else out_dtype
  # The sum with an adapter is rounded once, so that its effect is as exact as the products are.
  summed = wide(own) if Adapted in kinds else own

  def apart(y, weights):
    return jnp.split(y, np.cumsum([w.shape[1] for w in weights])[:-1], axis=-1)

  def joined(parts, axis):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)

  def side_by_side(x, weights):
    return apart(matmul(x, jnp.concatenate(weights, axis=1), summed), weights)

  plain = [joined([whole(w) for w in group], 1) for group in groups]
  if quantized := [w for group in groups for w in group if isinstance(w, Quantized)]:
    return apart(quantization.product(x, quantized, own), plain)  # all are, of one module
  results = split_product(side_by_side, x, plain, axes)
  if kinds.isdisjoint({Adapted, Decomposed}):
    return results

  def replaced(group, y):
    pairs = zip(group, apart(y, group), strict=True)
    return joined([behind(w, x, part, axes) for w, part in pairs], -1).astype(own)

  return [replaced(group, y) for group, y in zip(groups, results, strict=True)]


def projections(
  x: Array, axes: Axes, init: Callable | None = None, /, **widths: int
) -> list[Matrix]:
  """Matrices [D_in, width] of the calling module, by name, for `products` with x."""
  fan_in = x.shape[-1]
  init = init or hk.initializers.TruncatedNormal(fan_in**-0.5)
  declared = Declared(init, axes, x.dtype, in_products=True, matrix=lambda matrix: matrix)
  return [hk.get_parameter(name, (fan_in, width), init=declared) for name, width in widths.items()]


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
@dataclasses.dataclass(eq=False)
class RMSNorm(Module):
  """Root-mean-square normalization (Zhang & Sennrich 2019, eq. 4), of [..., D] in float32."""

  epsilon: Fraction = 1e-6

  def __call__(self, x: Array) -> Array:
    scale = parameter('scale', (x.shape[-1],), jnp.ones, axes=('norm',))
    own = x.dtype
    x = x.astype(wide(x.dtype))
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale, range(x.ndim - 1))
    return (x * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(own)


@dataclasses.dataclass(eq=False)
class MLP(Module):
  """x [..., D] -> [..., D], each token by itself."""

  width: PositiveInt
  dropout: ProperFraction = 0.0  # the share of its inner values that is zeroed in training

  def __call__(self, x: Array) -> Array:
    raise NotImplementedError

  def forward_flops(self, width: int) -> int:
    """Operations of one token [width] in a forward pass, of 3 x width x self.width parameters."""
    return 6 * width * self.width


@gin.configurable
class GatedMLP(MLP):
  """(silu(x w_gate) * x w_hidden) w_out (Shazeer 2020, SwiGLU)."""

  def __call__(self, x: Array) -> Array:
    wide = project(x, ('embed', 'mlp'), gate=self.width, hidden=self.width)
    gate, hidden = (checkpoint_name(product, 'mlp') for product in wide)
    inner = dropout(jax.nn.silu(gate) * hidden, self.dropout)
    (out,) = project(inner, ('mlp', 'embed'), out=x.shape[-1])
    return out


@gin.configurable
class SquaredReLUMLP(MLP):
  """relu(x w_hidden)^2 w_out (So et al. 2021, Primer, section 4.1).

  Its inner width is 3/2 of `width`, so it has as many parameters as the gated MLP of that width.
  """

  def __call__(self, x: Array) -> Array:
    (hidden,) = project(x, ('embed', 'mlp'), hidden=3 * self.width // 2)
    inner = jnp.square(jax.nn.relu(checkpoint_name(hidden, 'mlp')))
    (out,) = project(dropout(inner, self.dropout), ('mlp', 'embed'), out=x.shape[-1])
    return out
