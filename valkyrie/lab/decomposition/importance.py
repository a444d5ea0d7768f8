"""Causal importance: how much each token needs each component, from the clean activations.

An importance function gives one logit z for each token and component. Two squashings of it are
used: the lower one in the masks of components, the upper one in the pressure to be small (D6).
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Protocol
import zlib

import gin
import haiku as hk
import jax
import jax.numpy as jnp

from valkyrie.config import ranges
from valkyrie.errors import ConfigurationError
from valkyrie.models.block import Block
from valkyrie.models.declarations import Parameter
from valkyrie.models.layers import RMSNorm, project
from valkyrie.models.model import created
from valkyrie.models.sites import Site
from valkyrie.sharding import layer_weights
from valkyrie.types import Array, Batch, Carry, DType, Params

Sites = Mapping[str, Site]
LEAK = 0.01
_TINY = 1e-12
NETS = 'decomposition/nets'  # the module of the nets


@jax.custom_vjp
def lower(z: Array) -> Array:
  """clip(z, 0, 1). Its gradient leads out of z < 0, if descent raises z, and not out of z > 1."""
  return jnp.clip(z, 0, 1)


def _lower_backward(z: Array, g: Array) -> tuple[Array]:
  below = jnp.where(g < 0, LEAK * g, 0)
  return (jnp.where(z <= 0, below, jnp.where(z <= 1, g, 0)),)


lower.defvjp(lambda z: (lower(z), z), _lower_backward)


def upper(z: Array) -> Array:
  """clip(z, 0, 1), with a slope of 0.01 above 1."""
  return jnp.where(z > 1, 1 + LEAK * (z - 1), jnp.clip(z, 0, 1))


def counted(high: Array, exponent: Array | float, smooth: bool = False) -> Array:
  """What minimality counts of the upper importances g: (g + 1e-12)^p, or g² / (g² + p²) (D11)."""
  square = high * high
  return square / (square + exponent**2) if smooth else (high + _TINY) ** exponent


class Importance(Protocol):
  """The importance functions of all sites."""

  def created(self, sites: Sites) -> tuple[Callable, Callable]:
    """The functions `init` and `parameters` of `Model.extended`."""
    ...

  def initial_carry(self, rows: int, dtype: DType) -> Carry:
    """The carry of rows that have read nothing."""
    ...

  def __call__(
    self, params: Params, sites: Sites, inputs: Mapping[str, Array], carry: Carry, batch: Batch
  ) -> tuple[dict[str, Array], Carry]:
    """({path: z [L, B, T, C]}, the carry after), from the inputs [L, B, T, d_in] of each site."""
    ...


@dataclasses.dataclass(frozen=True)
class _Nets:
  """Nets of two layers with an exact GELU between them, of each token by itself.

  Attributes:
    width: h, of the hidden layer.
  """

  width: int = 16

  def __post_init__(self):
    ranges.check_fields(self)

  def _shapes(self, site: Site) -> dict[str, tuple[tuple[int, ...], float]]:
    """{name: (shape, standard deviation)} of the parameters of a site."""
    raise NotImplementedError

  def _logits(self, own: Mapping[str, Array], x: Array, v: Callable[[], Array]) -> Array:
    """z [L, B, T, C] from the parameters of a site, its inputs [L, B, T, d_in] and its V()."""
    raise NotImplementedError

  def created(self, sites):
    """Every device has the parameters whole. Each has its first values by a key of its name."""
    shapes = {f'{path}/{n}': of for path, s in sites.items() for n, of in self._shapes(s).items()}

    def init(rng):
      def value(name, shape, deviation):
        key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
        return deviation * jax.random.normal(key, shape, jnp.float32)

      return {NETS: {name: value(name, *of) for name, of in shapes.items()}}

    def declared(shape, _):
      return Parameter(jax.ShapeDtypeStruct(shape, jnp.float32), (None,) * len(shape), None)

    return init, lambda: {NETS: {name: declared(*of) for name, of in shapes.items()}}

  def initial_carry(self, rows, dtype):
    return ()

  def __call__(self, params, sites, inputs, carry, batch):
    return self.of_tokens(params, sites, inputs), carry

  def of_tokens(
    self, params: Params, sites: Sites, inputs: Mapping[str, Array]
  ) -> dict[str, Array]:
    """{path: z [L, B, T, C]}: each token has its own."""

    def of(path, site):
      own = {n: params[NETS][f'{path}/{n}'] for n in ('w1', 'b1', 'w2', 'b2')}
      shape = site.layers, site.d_in, site.components

      def v():
        return layer_weights.whole(site.factors(params)[0], shape, inputs[path].dtype)

      return self._logits(own, inputs[path], v)

    return {path: of(path, site) for path, site in sites.items()}


@gin.configurable
class PerComponent(_Nets):
  """A net 1 -> h -> 1 for each component, of its inner activation x V."""

  def _shapes(self, site: Site) -> dict[str, tuple[tuple[int, ...], float]]:
    """{name: (shape, standard deviation)}: by fan-in, with sqrt(2) before the GELU."""
    each = (site.layers, site.components, self.width)
    out = (site.layers, site.components)
    return {
      'w1': (each, math.sqrt(2)),
      'b1': (each, 0.0),
      'w2': (each, self.width**-0.5),
      'b2': (out, 0.0),
    }

  def _logits(self, own, x, v):
    inner = jnp.einsum('lbtd,ldc->lbtc', x, v().astype(x.dtype))
    hidden = inner[..., None] * own['w1'][:, None, None] + own['b1'][:, None, None]
    active = jax.nn.gelu(hidden, approximate=False)
    return jnp.einsum('lbtch,lch->lbtc', active, own['w2']) + own['b2'][:, None, None]


@gin.configurable
class Shared(_Nets):
  """A net d_in -> h -> C for each site, of its input."""

  def _shapes(self, site: Site) -> dict[str, tuple[tuple[int, ...], float]]:
    layers = site.layers
    h = self.width
    c = site.components
    return {
      'w1': ((layers, site.d_in, h), math.sqrt(2 / site.d_in)),
      'b1': ((layers, h), 0.0),
      'w2': ((layers, h, c), h**-0.5),
      'b2': ((layers, c), 0.0),
    }

  def _logits(self, own, x, v):
    hidden = jnp.einsum('lbtd,ldh->lbth', x, own['w1'].astype(x.dtype))
    active = jax.nn.gelu(hidden + own['b1'][:, None, None], approximate=False)
    return jnp.einsum('lbth,lhc->lbtc', active, own['w2']) + own['b2'][:, None, None]


class _Stack(hk.Module):
  """Blocks over the inputs of all sites [B, T, D] -> the logits of all components [B, T, ...]."""

  def __init__(self, width: int, pattern: Sequence[Callable[..., Block]], logits: int):
    super().__init__('decomposition')
    self._width = width
    self._logits = logits
    self._blocks = [make(name=f'block_{i}') for i, make in enumerate(pattern)]

  def initial_carry(self, rows: int, dtype: DType) -> list[Carry]:
    return [block.initial_carry(rows, dtype) for block in self._blocks]

  def __call__(self, x: Array, carry: list[Carry], batch: Batch) -> tuple[Array, list[Carry]]:
    (x,), after = project(x, (None, 'embed'), stream=self._width), []
    where = {'positions': batch.positions, 'segment_ids': batch.segment_ids}
    for block, before in zip(self._blocks, carry, strict=True):
      x, of_block = block(x, before, **where)
      after.append(of_block)
    (z,) = project(RMSNorm(name='final_norm')(x), ('embed', None), logits=self._logits)
    return z, after


@gin.configurable
@dataclasses.dataclass(frozen=True)
class Blocks:
  """A causal stack that reads the normalized inputs of all sites, with a carry of its own.

  Attributes:
    width: of its residual stream.
    pattern: classes of its blocks (`@importance/Block` in gin), one for each layer.
  """

  width: int
  pattern: Sequence[Callable[..., Block]]

  def __post_init__(self):
    ranges.check_fields(self)
    if not self.pattern:
      raise ConfigurationError('Blocks.pattern is empty. Name at least one block.')

  def _made(self, sites: Sites) -> _Stack:
    logits = sum(site.layers * site.components for site in sites.values())
    return _Stack(self.width, self.pattern, logits)

  def created(self, sites):
    def read():
      one = jnp.ones((1, 1), jnp.int32)
      inputs = sum(site.layers * site.d_in for site in sites.values())
      stack = self._made(sites)
      carry = stack.initial_carry(1, jnp.float32)
      stack(jnp.zeros((1, 1, inputs)), carry, Batch(one, one, jnp.ones((1, 1)), one, one))

    return created(read)

  def initial_carry(self, rows, dtype):
    make = hk.transform(lambda: self._made({}).initial_carry(rows, dtype))
    return make.apply({}, None)

  def __call__(self, params, sites, inputs, carry, batch):
    def flat(x):  # [L, B, T, d_in] -> [B, T, L d_in], each input with a mean square of 1
      wide = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
      return jnp.moveaxis(wide, 0, 2).reshape(*x.shape[1:3], -1)

    x = jnp.concatenate([flat(inputs[path]) for path in sites], axis=-1)
    read = hk.transform(lambda: self._made(sites)(x, carry, batch))
    z, after = read.apply(params, None)
    found = {}
    begin = 0
    for path, site in sites.items():
      size = site.layers * site.components
      of_site = z[..., begin : begin + size].reshape(*z.shape[:2], site.layers, site.components)
      found[path] = jnp.moveaxis(of_site, 2, 0)
      begin += size
    return found, after
