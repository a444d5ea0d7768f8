"""Parameters with declared axes, and the plain layers that use them.

Parameters are float32, unless the model stores those that every use casts in bfloat16; arithmetic
is in the dtype of the input. `parameter` declares logical axes and casts, so that neither a layout
nor a cast copy needs a table of paths. A parameter made by plain `hk.get_parameter` is never split
and never cast.
"""

from collections.abc import Callable, Container, Sequence
import dataclasses
from typing import Any, NamedTuple

import gin
import haiku as hk
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp

from valkyrie.config.ranges import Factor, Fraction, PositiveInt, ProperFraction, check_fields
from valkyrie.errors import check_choice
from valkyrie.models.declarations import FIRST_CARRY, Declared
from valkyrie.models.matrices import Matrix, as_matrix, products
from valkyrie.models.precision import wide
from valkyrie.sharding import sequence_parallel
from valkyrie.sharding.mesh import platform
from valkyrie.types import Array, Axes, DType, leaf_path

GATES = {'silu': jax.nn.silu, 'gelu': jax.nn.gelu}


def parameter(
  name: str,
  shape: tuple[int, ...],
  init: Callable,
  *,
  axes: Axes,
  cast: DType | None = None,
) -> Array:
  """A parameter of the calling module; see `Declared` for the arguments."""
  return hk.get_parameter(name, shape, init=Declared(init, axes, cast))


def broadcast(w: Array, x: Array) -> Array:
  """A parameter w for arithmetic with x, whose last axes are those of w.

  On accelerators its other axes have one element: layers that kept w for each token, for their
  backward pass, needed 22.3 GiB in place of 18.2 in `gin/v4_32.gin`. On a CPU it has the axes of x,
  and its gradient is a sum that leaves out those of one element, such as a batch of one row: XLA
  can take 25 times as long to sum [1, T, F] over its tokens as [T, F].
  """
  leading = x.shape[: x.ndim - w.ndim]
  if platform() != 'cpu':
    return jnp.expand_dims(w, range(len(leading)))
  summed = [size for size in leading if size != 1]
  repeated = jnp.broadcast_to(w, (*summed, *w.shape))
  return repeated.reshape(*leading, *w.shape)


def matrix(
  name: str,
  shape: tuple[int, ...],
  init: Callable,
  *,
  axes: Axes,
  form: Callable[[Array], Array],
) -> Matrix:
  """A parameter in float32 that multiplies activations by the matrix `form(parameter)`.

  The calling module computes the product, and calls `Matrix.adjust` with the result.
  """
  declared = Declared(init, axes, cast=None, matrix=form)
  return as_matrix(hk.get_parameter(name, shape, init=declared))


class MixerOptions(NamedTuple):
  """What a model, or its run, decides for the mixers of all blocks.

  learned_carry: documents begin with states of the recurrences that are learned.
  kernel_lengths: (class of a mixer, tokens that a device reads of a chunk at once) where its kernel
    was compared with the plain form, and agreed.
  """

  learned_carry: bool = False
  kernel_lengths: Container[tuple[str, int]] = ()


@dataclasses.dataclass(eq=False)
class Module(hk.Module):
  """A Haiku module whose options are fields; a number out of its range is a ConfigurationError."""

  name: str | None = dataclasses.field(default=None, kw_only=True)

  mixer_options = MixerOptions()

  def __post_init__(self):
    super().__post_init__()
    check_fields(self)

  def configure(self, options: MixerOptions) -> None:
    """Takes the options that the model gives its mixers; a mixer around another passes them on."""
    self.mixer_options = options

  @hk.transparent
  def first_state(self, state: Any) -> Any:
    """The learned state with which documents begin, a state without B; None if it is zero."""
    if not self.mixer_options.learned_carry:
      return None

    def learned(path, part):
      place = leaf_path(path)
      name = f'first_carry.{place}' if place else 'first_carry'
      _, *shape = part.shape
      axes: list[str | None] = [None] * len(shape)
      if axes:
        axes[0] = FIRST_CARRY
      first = parameter(name, tuple(shape), jnp.zeros, axes=tuple(axes))
      return first.astype(part.dtype)

    return jax.tree_util.tree_map_with_path(learned, state)


def configure(mixer: Any, options: MixerOptions) -> None:
  """Gives a mixer the options, if it takes any."""
  if hasattr(mixer, 'configure'):
    mixer.configure(options)


def projections(
  x: Array,
  axes: Axes,
  init: Callable | None = None,
  /,
  **widths: int,
) -> list[Matrix]:
  """Matrices [D_in, width] of the calling module, by name, for `products` with x."""
  fan_in = x.shape[-1]
  init = init or hk.initializers.TruncatedNormal(fan_in**-0.5)
  declared = Declared(init, axes, x.dtype, in_products=True, matrix=lambda w: w)
  matrices = []
  for name, width in widths.items():
    stored = hk.get_parameter(name, (fan_in, width), init=declared)
    matrices.append(as_matrix(stored))
  return matrices


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

  def __call__(self, x: Array, groups: int = 1) -> Array:
    """x, whose D channels form groups of neighbors, each with a mean square of its own."""
    x = rows(x)
    *leading, width = x.shape
    scale = parameter('scale', (width,), jnp.ones, axes=('norm',))
    parts = x.astype(wide(x.dtype))
    if groups > 1:
      parts = parts.reshape(*leading, groups, -1)
      scale = scale.reshape(groups, -1)
    squares = jnp.square(parts)
    mean_square = jnp.mean(squares, axis=-1, keepdims=True)
    inverse_root = jax.lax.rsqrt(mean_square + self.epsilon)
    normed = parts * inverse_root * broadcast(scale, parts)
    normed = normed.reshape(x.shape)
    return rows(normed.astype(x.dtype))


def rows(x: Array, platforms: Container[str] = ('gpu',)) -> Array:
  """x [..., D], whose channels are neighbors in memory, in programs for these platforms.

  On a GPU, XLA may choose the tokens to be neighbors. A norm then reads x once for its mean square
  and again for its result.
  """
  if platform() not in platforms:
    return x
  major_to_minor = tuple(range(x.ndim))
  return with_layout_constraint(x, Layout(major_to_minor))


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


@gin.configurable(denylist=['width', 'dropout'])  # pyright: ignore  (gin has no types)
@dataclasses.dataclass(eq=False)
class GatedMLP(MLP):
  """(f(x w_gate) * x w_hidden) w_out (Shazeer 2020, SwiGLU and GEGLU).

  Its `activation` f is 'silu', or 'gelu' in the tanh form, as in Gemma.
  """

  activation: str = 'silu'

  def __post_init__(self):
    super().__post_init__()
    check_choice('GatedMLP.activation', self.activation, GATES)

  def __call__(self, x: Array) -> Array:
    gate, hidden = project(x, ('embed', 'mlp'), gate=self.width, hidden=self.width)
    gate = checkpoint_name(gate, 'mlp')
    hidden = checkpoint_name(hidden, 'mlp')
    activate = GATES[self.activation]
    active = activate(gate)
    inner = dropout(active * hidden, self.dropout)
    (out,) = project(inner, ('mlp', 'embed'), out=x.shape[-1])
    return out


@gin.configurable(denylist=['width', 'dropout'])  # pyright: ignore  (gin has no types)
@dataclasses.dataclass(eq=False)
class SquaredReLUMLP(MLP):
  """relu(x w_hidden)^2 w_out (So et al. 2021, Primer, section 4.1).

  Its inner width is `width_factor` times `width`: 3/2 gives it as many parameters as the gated MLP
  of that width has, 1 makes it `width`.
  """

  width_factor: Factor = 1.5

  @property
  def _inner(self) -> int:
    return int(self.width_factor * self.width)

  def forward_flops(self, width: int) -> int:
    """Operations of one token [width], of 2 x width x inner width parameters."""
    return 4 * width * self._inner

  def __call__(self, x: Array) -> Array:
    (hidden,) = project(x, ('embed', 'mlp'), hidden=self._inner)
    hidden = checkpoint_name(hidden, 'mlp')
    positive = jax.nn.relu(hidden)
    inner = jnp.square(positive)
    inner = dropout(inner, self.dropout)
    (out,) = project(inner, ('mlp', 'embed'), out=x.shape[-1])
    return out
